// A whole layer of Llama's block, computed by all threads of a team with as few barriers as possible.
#pragma once

#include <type_traits>

#include "attention.h"

enum Kind : int32_t { FLOATS = 0, BF16 = 1, PAIRS = 2 };  // of packed weights

// A layer's weights and pages. A null pointer means that the model has no such weights.
struct Layer {
  int32_t kind, hidden, inner;                    // inner: rounded up to whole panels; the padding is zeros
  float epsilon;
  const void *qkv, *out, *gate_up, *down;         // packed; q, k, v stacked by outputs; gate and up alternate by panels
  const float *attention_norm, *mlp_norm, *qkv_bias, *query_norm, *key_norm;
  Reach reach;
  void* pages;
};

// Buffers of a step, with room for `rows` rows each.
struct Space {
  void *inputs, *attended, *activated;            // inputs of products: floats, or bf16 for PAIRS
  float *qkv, *queries, *outputs, *gate_up;
};

// Positions of a step's rows: their angles for RoPE, and where their keys and values are in the pages.
struct Places {
  const float *cosines, *sines;                   // [rows][head_dim / 2]
  const int64_t* slots;                           // of each row's keys: page * 2 * block_tokens + offset within the page
};

// Called by the first thread as soon as a layer's keys and values are in the pages. May be null.
typedef void (*AfterLayer)(int32_t layer);

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

// The input of a product: norms of the rows of x. With few rows, every thread computes all of them, since that is faster
// than waiting for the other threads.
template <class A>
static const A* normed(const Hand& hand, const float* x, const float* weight, float epsilon, int rows, int n, A* shared) {
  if (rows <= FEW_ROWS) {
    thread_local std::vector<A> own;
    own.resize(long(rows) * n);
    for (int r = 0; r < rows; r++) norm_to(x + long(r) * n, weight, epsilon, n, own.data() + long(r) * n);
    return own.data();
  }
  for (int r = hand.from(rows); r < hand.to(rows); r++)
    norm_to(x + long(r) * n, weight, epsilon, n, shared + long(r) * n);
  hand.wait();
  return shared;
}

// The input of a product: the rows of x, converted to A.
template <class A>
static const A* narrowed(const Hand& hand, const float* x, int rows, int n, A* shared) {
  if constexpr (sizeof(A) == 4) {
    return x;
  } else {
    for (long i = long(hand.from(rows)) * n; i < long(hand.to(rows)) * n; i++) put(shared + i, x[i]);
    hand.wait();
    return shared;
  }
}

// Applies RoPE to a head's vector: rotates the pairs (x[i], x[i + dim / 2]) by the position's angles.
static void rotate(float* x, const float* cosines, const float* sines, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

// For one row: adds the bias, applies the norms of queries and keys and RoPE, and writes keys and values into the pages.
// If `queries` is null, the queries are not computed.
template <class T>
static void finish_row(const Layer& layer, const Shape& s, float* qkv, const float* cosines, const float* sines,
                       float* queries, T* slot) {
  int dim = s.head_dim, heads = s.query_heads, kv = s.kv_heads, first = queries ? 0 : heads;
  if (layer.qkv_bias)
    for (int i = first * dim; i < (heads + 2 * kv) * dim; i++) qkv[i] += layer.qkv_bias[i];
  for (int h = first; h < heads + kv; h++) {
    float* x = qkv + h * dim;
    const float* weight = h < heads ? layer.query_norm : layer.key_norm;
    if (weight) norm(x, weight, layer.epsilon, dim, x);
    rotate(x, cosines, sines, dim);
  }
  if (queries) memcpy(queries, qkv, sizeof(float) * heads * dim);
  long values = long(s.block_tokens) * kv * dim;
  for (int i = 0; i < kv * dim; i++) {
    put(slot + i, qkv[heads * dim + i]);
    put(slot + values + i, qkv[(heads + kv) * dim + i]);
  }
}

// silu(gate) * up of the columns of these panels, which this thread has just computed. Panels of gate and up alternate.
template <class A>
static void activate(Panels panels, int rows, int inner, const float* gate_up, A* activated) {
  for (int r = 0; r < rows; r++)
    for (int p = panels.first; p < panels.last; p += 2) {
      const float* gate = gate_up + long(r) * 2 * inner + long(p) * PANEL;
      A* to = activated + long(r) * inner + long(p) / 2 * PANEL;
      for (int i = 0; i < PANEL; i += LANES) store(to + i, silu(load(gate + i)) * load(gate + PANEL + i));
    }
}

// The products of a layer. A is the type of their inputs, W that of the packed weights.
template <class A, class W>
struct Products {
  typedef typename std::conditional<sizeof(A) == 4, float, pair>::type In;
  static constexpr int per = sizeof(A) == 4 ? 1 : 2;  // inputs per element of `In`
  int rows;

  void operator()(Panels panels, const A* from, int inputs, const void* weights, int outputs, float* y, bool add) const {
    multiply(panels, reinterpret_cast<const In*>(from), rows, inputs / per, static_cast<const W*>(weights), outputs, y, add);
  }
};

// The first part of a layer: writes keys and values into the pages and, if `queries` is set, the queries into the space.
// When it returns, all threads are done with it.
template <class A, class W, class T>
static void write_kv(const Hand& hand, const Shape& s, const Layer& layer, const Space& space, int rows, const float* x,
                     const Places& places, bool queries) {
  int hidden = layer.hidden, dim = s.head_dim;
  int q = s.query_heads * dim, all = q + 2 * s.kv_heads * dim;
  T* pages = static_cast<T*>(layer.pages);
  const A* inputs = normed(hand, x, layer.attention_norm, layer.epsilon, rows, hidden, static_cast<A*>(space.inputs));
  int spared = queries ? 0 : q / PANEL;
  Panels panels = panels_of(hand, all - spared * PANEL);
  Products<A, W>{rows}({spared + panels.first, spared + panels.last}, inputs, hidden, layer.qkv, all, space.qkv, false);
  hand.wait();
  for (int r = hand.from(rows); r < hand.to(rows); r++)
    finish_row(layer, s, space.qkv + long(r) * all, places.cosines + long(r) * (dim / 2), places.sines + long(r) * (dim / 2),
               queries ? space.queries + long(r) * q : nullptr, pages + places.slots[r] * s.kv_heads * dim);
  hand.wait();
}

template <class A, class W, class T>
static void run_layer(const Hand& hand, Plan& plan, const Layer& layer, const Space& space, int rows, float* x,
                      const Places& places, int32_t number, AfterLayer after) {
  const Shape& s = plan.shape;
  int hidden = layer.hidden, inner = layer.inner, q = s.query_heads * s.head_dim;
  auto* activated = static_cast<A*>(space.activated);
  Products<A, W> product{rows};

  if (hand.thread == 0) plan.next = 0;
  write_kv<A, W, T>(hand, s, layer, space, rows, x, places, true);
  if (hand.thread == 0 && after) after(number);

  thread_local Scratch scratch;
  attend_share(plan, layer.reach, static_cast<const T*>(layer.pages), space.queries, space.outputs, scratch);
  hand.wait();
  if (plan.has_parts()) {
    merge_share<T>(hand, plan, space.outputs);
    hand.wait();
  }
  const A* attended = narrowed(hand, space.outputs, rows, q, static_cast<A*>(space.attended));
  product(panels_of(hand, hidden), attended, q, layer.out, hidden, x, true);
  hand.wait();

  const A* inputs = normed(hand, x, layer.mlp_norm, layer.epsilon, rows, hidden, static_cast<A*>(space.inputs));
  Panels both = panels_of(hand, 2 * inner, 2);
  product(both, inputs, hidden, layer.gate_up, 2 * inner, space.gate_up, false);
  activate(both, rows, inner, space.gate_up, activated);
  hand.wait();
  product(panels_of(hand, hidden), activated, inner, layer.down, hidden, x, true);
  hand.wait();
}
