// A build of the kernels, loaded in the same way as from Python.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum Kind { FLOATS, BF16, PAIRS };

struct Layer {
  int32_t kind, hidden, inner;
  float epsilon;
  const void *qkv, *out, *gate_up, *down;
  const float *attention_norm, *mlp_norm, *qkv_bias, *query_norm, *key_norm;
  int32_t window;
  float cap;
  void* pages;
};

struct Space {
  void *inputs, *attended, *activated;
  float *qkv, *queries, *outputs, *gate_up;
};

struct Places {
  const float *cosines, *sines;
  const int64_t* slots;
};

typedef void (*AfterLayer)(int32_t);

struct Library {
  const char* name;
  void* handle;
  int32_t (*panel)();
  int32_t (*has_pairs)();
  void* (*plan_new)(int32_t, int32_t, int32_t, int32_t, float);
  void (*plan_free)(void*);
  void (*plan_set)(void*, int32_t, const int32_t*, int32_t, const int32_t*, int32_t);
  void (*attend)(void*, int32_t, int32_t, const void*, int32_t, float, const float*, float*);
  void (*pack)(int32_t, int32_t, const void*, int32_t, int32_t, void*);
  void (*head)(int32_t, int32_t, const float*, const float*, float, int32_t, int32_t, const void*, int32_t, void*, float*);
  void (*layers)(void*, int32_t, const Layer*, int32_t, const Space*, int32_t, float*, const Places*, int32_t, AfterLayer);

  explicit Library(const char* path) : name(path), handle(dlopen(path, RTLD_NOW)) {
    if (!handle) fail(dlerror());
    find(panel, "tsukimi_panel"), find(has_pairs, "tsukimi_has_pairs");
    find(plan_new, "tsukimi_plan_new"), find(plan_free, "tsukimi_plan_free"), find(plan_set, "tsukimi_plan_set");
    find(attend, "tsukimi_attend"), find(pack, "tsukimi_pack"), find(head, "tsukimi_head"), find(layers, "tsukimi_layers");
  }

  // `count` rounded up to whole panels.
  int whole(int count) const { return (count + panel() - 1) / panel() * panel(); }

 private:
  template <class F>
  void find(F& function, const char* symbol) {
    function = reinterpret_cast<F>(dlsym(handle, symbol));
    if (!function) fail(symbol);
  }

  static void fail(const char* what) {
    printf("FAILED cannot load: %s\n", what);
    if (getpid() == 1) sleep(1);  // let the output be printed: the machine stops when its first process ends
    exit(2);
  }
};
