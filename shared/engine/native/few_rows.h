// Attention of few rows (decode): logits are dot products, computed in chunks of keys. The chunks' parts are merged in
// order.
#pragma once

#include "plan.h"

// Prefetches a row. The rows of a head are short and lie apart, so the CPU does not predict them. They are loaded while
// other rows are computed.
template <class T>
static inline void bring(const T* row, int dim) {
  for (int d = 0; d < dim; d += 64 / int(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// Logits of dot products, times log2(e), so that exp2 gives the weights.
static inline vf logits(vf dots, const Shape& shape, const Reach& reach) {
  if (reach.cap > 0) return tanhv(dots * (shape.scale / reach.cap)) * (reach.cap * LOG2E);
  return dots * (shape.scale * LOG2E);
}

// Reorders a head's values as load_pair does; put_in_order reverses this.
template <class T>
static inline void pair_up(const float* from, int dim, float* to) {
  int d = 0;
  for (; d + 2 * LANES <= dim; d += 2 * LANES)
#pragma GCC unroll 32
    for (int i = 0; i < 2 * LANES; i++) to[d + place_in_pair(static_cast<const T*>(nullptr), i)] = from[d + i];
  for (; d < dim; d++) to[d] = from[d];
}

template <class T>
static inline void put_in_order(const float* from, int dim, float* to) {
  int d = 0;
  for (; d + 2 * LANES <= dim; d += 2 * LANES)
#pragma GCC unroll 32
    for (int i = 0; i < 2 * LANES; i++) to[d + i] = from[d + place_in_pair(static_cast<const T*>(nullptr), i)];
  for (; d < dim; d++) to[d] = from[d];
}

// Dot products of R rows of q, in the order of pair_up, with N keys that are `stride` apart. out is [R][N], its rows are
// `ldo` apart.
template <int R, int N, class T>
static inline void dots(const float* q, const T* key, long stride, int dim, float* out, long ldo) {
  vf acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) acc[r][n] = vf{};
  int d = 0;
  for (; d + 2 * LANES <= dim; d += 2 * LANES)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      vf even, odd;
      load_pair(key + n * stride + d, even, odd);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        acc[r][n] += even * load(q + r * dim + d);
        acc[r][n] += odd * load(q + r * dim + d + LANES);
      }
    }
  for (; d + LANES <= dim; d += LANES)
    for (int n = 0; n < N; n++)
      for (int r = 0; r < R; r++) acc[r][n] += load(key + n * stride + d) * load(q + r * dim + d);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    if constexpr (N == 4) {
      quad four = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      memcpy(out + r * ldo, &four, sizeof four);
    } else {
      for (int n = 0; n < N; n++) out[r * ldo + n] = sum(acc[r][n]);
    }
    for (int n = 0; d < dim && n < N; n++)
      for (int e = d; e < dim; e++) out[r * ldo + n] += scalar(key + n * stride + e) * q[r * dim + e];
  }
}

template <int R, int V, class T>
static inline void weigh_some(const float* p, long ldp, const Rows<T>& rows, int from, int to, int d, float* out,
                              long ldo) {
  vf acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) acc[r][v] = vf{};
  int block = rows.plan.shape.block_tokens;
  for (int k = from; k < to;) {
    int end = (k / block + 1) * block < to ? (k / block + 1) * block : to;
    const T* value = rows.value(k) + d;
    for (; k < end; k++, value += rows.stride()) {
      vf x[V];
      if constexpr (V == 1) {
        x[0] = load(value);
      } else {
#pragma GCC unroll 8
        for (int v = 0; v < V; v += 2) load_pair(value + v * LANES, x[v], x[v + 1]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][v] += x[v] * p[r * ldp + k - from];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(out + r * ldo + d + v * LANES, acc[r][v]);
}

// Calls f(R, r) for rows r .. r + R - 1, four at a time.
template <class F>
static inline void in_fours(int rows, const F& f) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>(), r);
  if (rows - r == 3) f(std::integral_constant<int, 3>(), r);
  if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
}

// Turns one row's dot products with the keys from..to-1 into weights, not yet divided by their sum. Keys outside of
// seen_from..seen_to-1 get weight 0. Puts the largest logit and the sum of the weights into `part`.
static inline void soften(float* row, int from, int to, int seen_from, int seen_to, const Shape& shape, const Reach& reach,
                          float* part) {
  int count = to - from, padded = (count + LANES - 1) / LANES * LANES;
  int begin = seen_from > from ? seen_from - from : 0, end = seen_to < to ? seen_to - from : count;
  for (int i = 0; i < padded; i += LANES) store(row + i, logits(load(row + i), shape, reach));
  for (int i = 0; i < begin && i < padded; i++) row[i] = -INFINITY;
  for (int i = end > 0 ? end : 0; i < padded; i++) row[i] = -INFINITY;
  vf top = load(row);
  for (int i = LANES; i < padded; i += LANES) top = larger(top, load(row + i));
  float most = largest(top);
  vf total = {};
  for (int i = 0; i < padded; i += LANES) {
    vf e = most == -INFINITY ? vf{} : exp2v(load(row + i) - most);
    store(row + i, e);
    total += e;
  }
  part[0] = most;
  part[1] = sum(total);
}

// Attention of the rows of unit.heads KV heads over one chunk of keys. Writes one part for each head.
template <class T>
static void few_rows(Plan& plan, const Unit& unit, const Reach& reach, const T* base, const float* queries,
                     Scratch& scratch) {
  const Shape& shape = plan.shape;
  const Span& span = plan.spans[unit.span];
  int dim = shape.head_dim, group = plan.group(), rows = span.tokens * group;
  Rows<T> kv{base, plan, span, unit.head};
  scratch.q.resize(unit.heads * rows * dim), scratch.s.resize(unit.heads * rows * CHUNK);
  float *q = scratch.q.data(), *s = scratch.s.data();
  for (int i = 0; i < unit.heads * rows; i++) {
    int head = (unit.head + i / rows) * group + i % rows % group, row = span.first_row + i % rows / group;
    pair_up<T>(queries + (long(row) * shape.query_heads + head) * dim, dim, q + i * dim);
  }
  for (int k = unit.from; k < unit.to;) {
    int end = (k / shape.block_tokens + 1) * shape.block_tokens;
    if (end > unit.to) end = unit.to;
    const T *key = kv.key(k), *value = kv.value(k), *later = end < unit.to ? kv.key(end) : key;
    while (k < end) {
      int some = end - k >= 4 ? 4 : 1;
      for (int n = 0; n < some; n++)
        bring(later + n * kv.stride(), unit.heads * dim), bring(value + n * kv.stride(), unit.heads * dim);
      for (int h = 0; h < unit.heads; h++)
        in_fours(rows, [&](auto r_type, int r) {
          constexpr int R = decltype(r_type)::value;
          int i = h * rows + r;
          if (some == 4)
            dots<R, 4>(q + i * dim, key + h * dim, kv.stride(), dim, s + i * CHUNK + k - unit.from, CHUNK);
          else
            dots<R, 1>(q + i * dim, key + h * dim, kv.stride(), dim, s + i * CHUNK + k - unit.from, CHUNK);
        });
      k += some, key += some * kv.stride(), value += some * kv.stride(), later += some * kv.stride();
    }
  }
  for (int h = 0; h < unit.heads; h++) {
    float *part = plan.parts.data() + (unit.part + h) * plan.part_floats, *p = s + h * rows * CHUNK;
    for (int r = 0; r < rows; r++) {
      int seen_to = span.start + r / group + 1, seen_from = reach.window > 0 ? seen_to - reach.window : 0;
      soften(p + r * CHUNK, unit.from, unit.to, seen_from, seen_to, shape, reach, part + r * long(dim + 2));
    }
    Rows<T> of_head{base, plan, span, unit.head + h};
    in_fours(rows, [&](auto r_type, int r) {
      constexpr int R = decltype(r_type)::value, V = R <= 3 ? 4 : 2;
      const float* weights = p + r * CHUNK;
      float* out = part + r * long(dim + 2) + 2;
      int d = 0;
      for (; d + V * LANES <= dim; d += V * LANES)
        weigh_some<R, V>(weights, CHUNK, of_head, unit.from, unit.to, d, out, dim + 2);
      for (; d + 2 * LANES <= dim; d += 2 * LANES)
        weigh_some<R, 2>(weights, CHUNK, of_head, unit.from, unit.to, d, out, dim + 2);
      for (; d + LANES <= dim; d += LANES)
        weigh_some<R, 1>(weights, CHUNK, of_head, unit.from, unit.to, d, out, dim + 2);
      for (; d < dim; d++)
        for (int i = 0; i < R; i++) {
          float sum = 0;
          for (int j = unit.from; j < unit.to; j++) sum += weights[i * CHUNK + j - unit.from] * scalar(of_head.value(j) + d);
          out[i * (dim + 2) + d] = sum;
        }
    });
  }
}

// Merges the chunks of one sequence and KV head, in order, into the output's rows. The first chunk's part has index
// `part`; those of the next chunks follow, `apart` parts from each other.
template <class T>
static void merge(const Plan& plan, int span_index, int head, int part, int apart, int chunks, float* output) {
  const Span& span = plan.spans[span_index];
  int dim = plan.shape.head_dim, group = plan.group();
  for (int r = 0; r < span.tokens * group; r++) {
    const float* first = plan.parts.data() + part * plan.part_floats + r * long(dim + 2);
    float* out = output + (long(span.first_row + r / group) * plan.shape.query_heads + head * group + r % group) * dim;
    float most = -INFINITY, total = 0;
    for (int c = 0; c < chunks; c++) most = std::fmax(most, first[c * apart * plan.part_floats]);
    float all[MAX_DIM] = {};
    for (int c = 0; c < chunks; c++) {
      const float* p = first + c * apart * plan.part_floats;
      if (p[0] == -INFINITY) continue;
      float share = std::exp2(p[0] - most);
      total += share * p[1];
      for (int d = 0; d < dim; d++) all[d] += share * p[2 + d];
    }
    for (int d = 0; d < dim; d++) all[d] /= total;
    put_in_order<T>(all, dim, out);
  }
}
