// What Python calls, through ctypes: plans of steps, attention, products, and whole layers of Llama's block.
// Pointers are to contiguous rows of floats unless said otherwise; nothing here allocates but plans and scratch.

#include <omp.h>

#include "attention.h"

enum Kind : int32_t { FLOATS = 0, BF16 = 1, PAIRS = 2 };  // of packed weights

// One layer of Llama's block. Null pointers: the model has no such thing.
struct Layer {
  int32_t kind, hidden, inner;
  float epsilon;
  const void *qkv, *out, *gate_up, *down;  // packed; q, k, v and gate, up one below the other
  const float *attention_norm, *mlp_norm, *qkv_bias, *query_norm, *key_norm;
  Reach reach;
};

// Buffers of a step, with room for `rows` rows each.
struct Space {
  void *inputs, *attended, *activated;            // what products read: floats, or bf16 for PAIRS
  float *qkv, *queries, *outputs, *gate_up;
};

static void norm(const float* x, const float* weight, float epsilon, int n, float* y) {
  vf squares = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int j = i; j < n; j++) total += x[j] * x[j];
  float scale = 1.0f / std::sqrt(total / n + epsilon);
  for (i = 0; i + LANES <= n; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

template <class A>
static void norm_to(const float* x, const float* weight, float epsilon, int n, A* y) {
  if constexpr (sizeof(A) == 4) {
    norm(x, weight, epsilon, n, y);
  } else {
    thread_local std::vector<float> row;
    row.resize(n);
    norm(x, weight, epsilon, n, row.data());
    for (int i = 0; i < n; i++) put(y + i, row[i]);
  }
}

// Rotates the halves of a head's vector by the position's angles.
static void rotate(float* x, const float* cosines, const float* sines, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

// One row: bias, norms of queries and keys, rotation; keys and values go into the pages.
template <class T>
static void finish_row(const Layer& layer, const Shape& s, float* qkv, const float* cosines, const float* sines,
                       float* queries, T* slot) {
  int dim = s.head_dim, heads = s.query_heads, kv = s.kv_heads;
  if (layer.qkv_bias)
    for (int i = 0; i < (heads + 2 * kv) * dim; i++) qkv[i] += layer.qkv_bias[i];
  for (int h = 0; h < heads + kv; h++) {
    float* x = qkv + h * dim;
    const float* weight = h < heads ? layer.query_norm : layer.key_norm;
    if (weight) norm(x, weight, layer.epsilon, dim, x);
    rotate(x, cosines, sines, dim);
  }
  memcpy(queries, qkv, sizeof(float) * heads * dim);
  long values = long(s.block_tokens) * kv * dim;
  for (int i = 0; i < kv * dim; i++) {
    put(slot + i, qkv[heads * dim + i]);
    put(slot + values + i, qkv[(heads + kv) * dim + i]);
  }
}

template <class A, class W, class T>
static void run_layer(int thread, int threads, Plan& plan, const Layer& layer, const Space& space, int rows, float* x,
                      const float* cosines, const float* sines, const int64_t* slots, T* pages) {
  const Shape& s = plan.shape;
  int hidden = layer.hidden, inner = layer.inner, dim = s.head_dim;
  int q = s.query_heads * dim, all = q + 2 * s.kv_heads * dim;
  auto* inputs = static_cast<A*>(space.inputs);
  auto* attended = static_cast<A*>(space.attended);
  auto* activated = static_cast<A*>(space.activated);
  typedef typename std::conditional<sizeof(A) == 4, const float, const pair>::type In;
  constexpr int per = sizeof(A) == 4 ? 1 : 2;  // inputs an element of `In` holds
  auto in = [](A* p) { return reinterpret_cast<In*>(p); };
  auto weights = [](const void* p) { return static_cast<const W*>(p); };
  int first = long(rows) * thread / threads, last = long(rows) * (thread + 1) / threads;

  for (int r = first; r < last; r++)
    norm_to(x + long(r) * hidden, layer.attention_norm, layer.epsilon, hidden, inputs + long(r) * hidden);
#pragma omp barrier
  linear_share(thread, threads, in(inputs), rows, hidden / per, weights(layer.qkv), all, space.qkv, false);
#pragma omp single
  plan.next = 0;
  for (int r = first; r < last; r++)
    finish_row(layer, s, space.qkv + long(r) * all, cosines + long(r) * (dim / 2), sines + long(r) * (dim / 2),
               space.queries + long(r) * q, pages + slots[r] * s.kv_heads * dim);
#pragma omp barrier
  thread_local Scratch scratch;
  attend_share(plan, layer.reach, static_cast<const T*>(pages), space.queries, space.outputs, scratch);
#pragma omp barrier
  merge_share(thread, threads, plan, space.outputs);
#pragma omp barrier
  if constexpr (sizeof(A) != 4) {
    for (long i = long(first) * q; i < long(last) * q; i++) put(attended + i, space.outputs[i]);
#pragma omp barrier
    linear_share(thread, threads, in(attended), rows, q / per, weights(layer.out), hidden, x, true);
  } else {
    linear_share(thread, threads, in(space.outputs), rows, q, weights(layer.out), hidden, x, true);
  }
#pragma omp barrier
  for (int r = first; r < last; r++)
    norm_to(x + long(r) * hidden, layer.mlp_norm, layer.epsilon, hidden, inputs + long(r) * hidden);
#pragma omp barrier
  linear_share(thread, threads, in(inputs), rows, hidden / per, weights(layer.gate_up), 2 * inner, space.gate_up, false);
#pragma omp barrier
  for (int r = first; r < last; r++) {
    const float* gate = space.gate_up + long(r) * 2 * inner;
    for (int i = 0; i < inner; i += LANES) {
      int wide = inner - i < LANES ? inner - i : LANES;
      float buffer[2 * LANES] = {};
      memcpy(buffer, gate + i, wide * 4), memcpy(buffer + LANES, gate + inner + i, wide * 4);
      store(buffer, silu(load(buffer)) * load(buffer + LANES));
      for (int j = 0; j < wide; j++) put(activated + long(r) * inner + i + j, buffer[j]);
    }
  }
#pragma omp barrier
  linear_share(thread, threads, in(activated), rows, inner / per, weights(layer.down), hidden, x, true);
}

template <class T>
static void run_layer_of(int32_t threads, Plan& plan, const Layer& layer, const Space& space, int rows, float* x,
                         const float* cosines, const float* sines, const int64_t* slots, T* pages) {
#pragma omp parallel num_threads(threads)
  {
    int thread = omp_get_thread_num(), all = omp_get_num_threads();
    if (layer.kind == FLOATS)
      run_layer<float, float>(thread, all, plan, layer, space, rows, x, cosines, sines, slots, pages);
    else if (layer.kind == BF16)
      run_layer<float, bf16>(thread, all, plan, layer, space, rows, x, cosines, sines, slots, pages);
#if defined(__AVX512BF16__)
    else
      run_layer<bf16, pair>(thread, all, plan, layer, space, rows, x, cosines, sines, slots, pages);
#endif
  }
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

// spans: (start, tokens, first row, first page in `pages`) each.
void tsukimi_plan_set(void* handle, const int32_t* spans, int32_t n_spans, const int32_t* pages, int32_t n_pages) {
  Plan& plan = *static_cast<Plan*>(handle);
  plan.spans.resize(n_spans);
  memcpy(plan.spans.data(), spans, n_spans * sizeof(Span));
  plan.pages.assign(pages, pages + n_pages);
  plan.lay_out();
}

// queries and outputs [rows][query_heads][head_dim]; the step's keys and values are in the pages already.
void tsukimi_attend(void* handle, int32_t threads, int32_t kv_bytes, const void* pages, int32_t window, float cap,
                    const float* queries, float* outputs) {
  Plan& plan = *static_cast<Plan*>(handle);
  Reach reach{window, cap};
  plan.next = 0;
#pragma omp parallel num_threads(threads)
  {
    thread_local Scratch scratch;
    if (kv_bytes == 4)
      attend_share(plan, reach, static_cast<const float*>(pages), queries, outputs, scratch);
    else
      attend_share(plan, reach, static_cast<const bf16*>(pages), queries, outputs, scratch);
#pragma omp barrier
    merge_share(omp_get_thread_num(), omp_get_num_threads(), plan, outputs);
  }
}

// `to` has room for the panels: inputs times outputs rounded up to whole panels.
void tsukimi_pack(int32_t threads, int32_t kind, const void* from, int32_t outputs, int32_t inputs, void* to) {
  int panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
  for (int p = 0; p < panels; p++) {
    long at = long(p) * PANEL * inputs;
    if (kind == FLOATS)
      pack_panel(static_cast<const float*>(from), outputs, inputs, p, static_cast<float*>(to) + at, false);
    else
      pack_panel(static_cast<const bf16*>(from), outputs, inputs, p, static_cast<bf16*>(to) + at, kind == PAIRS);
  }
}

// y [rows][outputs] = norm(x) W^T, or x W^T where norm_weight is null. `inputs_space` as in Space.
void tsukimi_head(int32_t threads, int32_t kind, const float* x, const float* norm_weight, float epsilon, int32_t rows,
                  int32_t inputs, const void* weights, int32_t outputs, void* inputs_space, float* y) {
#pragma omp parallel num_threads(threads)
  {
    int thread = omp_get_thread_num(), all = omp_get_num_threads();
    for (int r = thread; r < rows; r += all) {
      const float* from = x + long(r) * inputs;
      if (kind == PAIRS) {
        bf16* to = static_cast<bf16*>(inputs_space) + long(r) * inputs;
        if (norm_weight)
          norm_to(from, norm_weight, epsilon, inputs, to);
        else
          for (int i = 0; i < inputs; i++) put(to + i, from[i]);
      } else {
        float* to = static_cast<float*>(inputs_space) + long(r) * inputs;
        if (norm_weight)
          norm(from, norm_weight, epsilon, inputs, to);
        else
          memcpy(to, from, sizeof(float) * inputs);
      }
    }
#pragma omp barrier
    if (kind == FLOATS)
      linear_share(thread, all, static_cast<float*>(inputs_space), rows, inputs, static_cast<const float*>(weights),
                   outputs, y, false);
    else if (kind == BF16)
      linear_share(thread, all, static_cast<float*>(inputs_space), rows, inputs, static_cast<const bf16*>(weights),
                   outputs, y, false);
#if defined(__AVX512BF16__)
    else
      linear_share(thread, all, static_cast<pair*>(inputs_space), rows, inputs / 2, static_cast<const pair*>(weights),
                   outputs, y, false);
#endif
  }
}

// x [rows][hidden] in and out. slots: page * 2 * block_tokens + row in the page, of each row's keys.
void tsukimi_layer(void* handle, int32_t threads, const Layer* layer, const Space* space, int32_t rows, float* x,
                   const float* cosines, const float* sines, const int64_t* slots, int32_t kv_bytes, void* pages) {
  Plan& plan = *static_cast<Plan*>(handle);
  if (kv_bytes == 4)
    run_layer_of(threads, plan, *layer, *space, rows, x, cosines, sines, slots, static_cast<float*>(pages));
  else
    run_layer_of(threads, plan, *layer, *space, rows, x, cosines, sines, slots, static_cast<bf16*>(pages));
}
}
