// The functions that Python calls through ctypes: plans of steps, attention, products, and whole layers of Llama's block.
// Pointers are to contiguous rows of floats unless said otherwise. Only plans and scratch memory are allocated here.

#include "layer.h"

template <class T>
static void run_layers_of(const Hand& hand, Plan& plan, const Layer* layers, int32_t count, const Space& space, int rows,
                          float* x, const Places& places, AfterLayer after) {
  for (int i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    if (layer.kind == FLOATS)
      run_layer<float, float, T>(hand, plan, layer, space, rows, x, places, i, after);
    else if (layer.kind == BF16)
      run_layer<float, bf16, T>(hand, plan, layer, space, rows, x, places, i, after);
#if defined(__AVX512BF16__)
    else
      run_layer<bf16, pair, T>(hand, plan, layer, space, rows, x, places, i, after);
#endif
  }
}

template <class T>
static void write_kv_of(const Hand& hand, const Plan& plan, const Layer& layer, const Space& space, int rows,
                        const float* x, const Places& places) {
  if (layer.kind == FLOATS)
    write_kv<float, float, T>(hand, plan.shape, layer, space, rows, x, places, false);
  else if (layer.kind == BF16)
    write_kv<float, bf16, T>(hand, plan.shape, layer, space, rows, x, places, false);
#if defined(__AVX512BF16__)
  else
    write_kv<bf16, pair, T>(hand, plan.shape, layer, space, rows, x, places, false);
#endif
}

template <class A, class In, class W>
static void run_head(const Hand& hand, const float* x, const float* norm_weight, float epsilon, int rows, int inputs,
                     const void* weights, int outputs, void* space, float* y) {
  const A* from = norm_weight ? normed(hand, x, norm_weight, epsilon, rows, inputs, static_cast<A*>(space))
                              : narrowed(hand, x, rows, inputs, static_cast<A*>(space));
  multiply(panels_of(hand, outputs), reinterpret_cast<const In*>(from), rows, inputs / int(sizeof(In) / sizeof(A)),
           static_cast<const W*>(weights), outputs, y, false);
}

template <class T>
static void pack_panel(const T* from, int outputs, int inputs, int panel, T* to, bool pairs) {
  for (int k = 0; k < inputs; k++)
    for (int n = 0; n < PANEL; n++) {
      int output = panel * PANEL + n;
      long at = pairs ? (long(k / 2) * PANEL + n) * 2 + k % 2 : long(k) * PANEL + n;
      to[at] = output < outputs ? from[long(output) * inputs + k] : T{};
    }
}

extern "C" {

int32_t tsukimi_panel() { return PANEL; }

int32_t tsukimi_has_pairs() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

void* tsukimi_plan_new(int32_t query_heads, int32_t kv_heads, int32_t head_dim, int32_t block_tokens, float scale) {
  Plan* plan = new Plan;
  plan->shape = {query_heads, kv_heads, head_dim, block_tokens, scale};
  return plan;
}

void tsukimi_plan_free(void* plan) { delete static_cast<Plan*>(plan); }

// Each span is (start, tokens, first row, index of its first page in `pages`). The results do not depend on `threads`;
// only the distribution of the work does.
void tsukimi_plan_set(void* handle, int32_t threads, const int32_t* spans, int32_t n_spans, const int32_t* pages,
                      int32_t n_pages) {
  Plan& plan = *static_cast<Plan*>(handle);
  plan.spans.resize(n_spans);
  memcpy(plan.spans.data(), spans, n_spans * sizeof(Span));
  plan.pages.assign(pages, pages + n_pages);
  plan.lay_out(threads);
}

// queries and outputs are [rows][query_heads][head_dim]. The step's keys and values must be in the pages already.
void tsukimi_attend(void* handle, int32_t threads, int32_t kv_bytes, const void* pages, int32_t window, float cap,
                    const float* queries, float* outputs) {
  Plan& plan = *static_cast<Plan*>(handle);
  Reach reach{window, cap};
  plan.next = 0;
  Team::run(threads, [&](const Hand& hand) {
    thread_local Scratch scratch;
    if (kv_bytes == 4)
      attend_share(plan, reach, static_cast<const float*>(pages), queries, outputs, scratch);
    else
      attend_share(plan, reach, static_cast<const bf16*>(pages), queries, outputs, scratch);
    hand.wait();
    if (kv_bytes == 4)
      merge_share<float>(hand, plan, outputs);
    else
      merge_share<bf16>(hand, plan, outputs);
  });
}

// Packs weights [outputs][inputs] into panels. `to` must have room for inputs * outputs elements, with outputs rounded up
// to whole panels.
void tsukimi_pack(int32_t threads, int32_t kind, const void* from, int32_t outputs, int32_t inputs, void* to) {
  int panels = (outputs + PANEL - 1) / PANEL;
  Team::run(threads, [&](const Hand& hand) {
    for (int p = hand.from(panels); p < hand.to(panels); p++) {
      long at = long(p) * PANEL * inputs;
      if (kind == FLOATS)
        pack_panel(static_cast<const float*>(from), outputs, inputs, p, static_cast<float*>(to) + at, false);
      else
        pack_panel(static_cast<const bf16*>(from), outputs, inputs, p, static_cast<bf16*>(to) + at, kind == PAIRS);
    }
  });
}

// y [rows][outputs] = norm(x) W^T, or x W^T if norm_weight is null. `inputs_space` is a buffer like Space.inputs.
void tsukimi_head(int32_t threads, int32_t kind, const float* x, const float* norm_weight, float epsilon, int32_t rows,
                  int32_t inputs, const void* weights, int32_t outputs, void* inputs_space, float* y) {
  Team::run(threads, [&](const Hand& hand) {
    if (kind == FLOATS)
      run_head<float, float, float>(hand, x, norm_weight, epsilon, rows, inputs, weights, outputs, inputs_space, y);
    else if (kind == BF16)
      run_head<float, float, bf16>(hand, x, norm_weight, epsilon, rows, inputs, weights, outputs, inputs_space, y);
#if defined(__AVX512BF16__)
    else
      run_head<bf16, pair, pair>(hand, x, norm_weight, epsilon, rows, inputs, weights, outputs, inputs_space, y);
#endif
  });
}

// Takes x [rows][hidden] through `count` layers, in place.
void tsukimi_layers(void* handle, int32_t threads, const Layer* layers, int32_t count, const Space* space, int32_t rows,
                    float* x, const Places* places, int32_t kv_bytes, AfterLayer after) {
  Plan& plan = *static_cast<Plan*>(handle);
  Team::run(threads, [&](const Hand& hand) {
    if (kv_bytes == 4)
      run_layers_of<float>(hand, plan, layers, count, *space, rows, x, *places, after);
    else
      run_layers_of<bf16>(hand, plan, layers, count, *space, rows, x, *places, after);
  });
}

// Computes only a layer's keys and values of its input x [rows][hidden], for rows whose output nothing reads.
void tsukimi_write_kv(void* handle, int32_t threads, const Layer* layer, const Space* space, int32_t rows, const float* x,
                      const Places* places, int32_t kv_bytes) {
  const Plan& plan = *static_cast<Plan*>(handle);
  Team::run(threads, [&](const Hand& hand) {
    if (kv_bytes == 4)
      write_kv_of<float>(hand, plan, *layer, *space, rows, x, *places);
    else
      write_kv_of<bf16>(hand, plan, *layer, *space, rows, x, *places);
  });
}
}
