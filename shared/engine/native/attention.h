// Causal attention of packed sequences over KV pages [pages][2][block_tokens][kv_heads][head_dim].
//
// The query heads that share a KV head are rows of one unit of work. Few rows (decode) meet each key by a dot product,
// in chunks of CHUNK keys counted from position 0 that are merged in order, so that the work of a long context is
// spread over threads, and no sum depends on how. Many rows (prefill) go tile by tile of keys through two small matrix
// products with a running softmax.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "gemm.h"

struct Span {
  int32_t start, tokens, first_row, first_page;  // first_page: where its pages begin in the table of pages
};

struct Shape {
  int32_t query_heads, kv_heads, head_dim, block_tokens;
  float scale;
};

// What differs from layer to layer. window: keys a query sees, itself included; 0: all. cap: of the logits; 0: none.
struct Reach {
  int32_t window;
  float cap;
};

constexpr int CHUNK = 128;
constexpr int DOT_ROWS = 16;
constexpr int TOGETHER = 256;
constexpr int KEYS = 64;
constexpr int MANY_ROWS = 96;

struct Unit {
  int32_t span, head, heads;  // KV heads from `head` on
  int32_t from, to;           // few rows: keys of one chunk; many rows: queries of one tile
  int32_t few, part;          // part: where its partial results are, one after the other for the heads
};

// A step's work, the same for all layers.
struct Plan {
  Shape shape;
  std::vector<Span> spans;
  std::vector<int32_t> pages;
  std::vector<Unit> units;
  std::vector<float> parts;  // of few rows, for each unit and row: largest logit, sum, weighted values [head_dim]
  long part_floats = 0;
  std::atomic<int> next{0};

  int group() const { return shape.query_heads / shape.kv_heads; }
  bool has_parts() const { return !parts.empty(); }
  bool few(const Span& s) const { return s.tokens * group() <= DOT_ROWS && s.tokens <= 4; }

  // KV heads whose rows are read in one go: a head's own are too short to be read fast one by one.
  int together() const {
    int heads = 1;
    for (int n = 2; n <= shape.kv_heads; n++)
      if (shape.kv_heads % n == 0 && n * shape.head_dim <= TOGETHER) heads = n;
    return heads;
  }

  void lay_out() {
    units.clear();
    int heads = together();
    part_floats = long(DOT_ROWS) * (shape.head_dim + 2);
    int part = 0;
    for (int pass = 0; pass < 2; pass++)  // the largest units first
      for (size_t i = 0; i < spans.size(); i++) {
        const Span& s = spans[i];
        bool is_few = few(s);
        if (is_few != (pass == 1)) continue;
        int end = s.start + s.tokens;
        if (is_few) {
          for (int h = 0; h < shape.kv_heads; h += heads)
            for (int k = 0; k < end; k += CHUNK, part += heads)
              units.push_back({int32_t(i), h, heads, k, k + CHUNK < end ? k + CHUNK : end, 1, part});
          continue;
        }
        int step = MANY_ROWS / group() > 0 ? MANY_ROWS / group() : 1;
        int tiles = (s.tokens + step - 1) / step;
        for (int t = tiles - 1; t >= 0; t--)
          for (int h = 0; h < shape.kv_heads; h++) {
            int from = t * step, to = from + step < s.tokens ? from + step : s.tokens;
            units.push_back({int32_t(i), h, 1, from, to, 0, -1});
          }
      }
    parts.resize(part * part_floats);
  }
};

template <class T>
struct Rows {
  const T* base;
  const Plan& plan;
  const Span& span;
  int head;

  const T* key(int position) const { return row(position, 0); }
  const T* value(int position) const { return row(position, 1); }
  long stride() const { return long(plan.shape.kv_heads) * plan.shape.head_dim; }

  const T* row(int position, int half) const {
    const Shape& s = plan.shape;
    long page = plan.pages[span.first_page + position / s.block_tokens];
    return base + ((page * 2 + half) * s.block_tokens + position % s.block_tokens) * stride() + long(head) * s.head_dim;
  }
};

// Rows of a head lie apart, a little each: the CPU does not foresee them. They come while others are computed.
template <class T>
static inline void bring(const T* row, int dim) {
  for (int d = 0; d < dim; d += 64 / int(sizeof(T))) __builtin_prefetch(row + d, 0, 3);
}

// Of dot products; to base 2.
static inline vf logits(vf dots, const Shape& shape, const Reach& reach) {
  if (reach.cap > 0) return tanhv(dots * (shape.scale / reach.cap)) * (reach.cap * LOG2E);
  return dots * (shape.scale * LOG2E);
}

// -- few rows -----------------------------------------------------------------------------------------------------------

template <int R, class T>
static inline void dots(const float* q, long ldq, const T* key, int dim, float* out, long ldo) {
  vf acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = vf{};
  int d = 0;
  for (; d + LANES <= dim; d += LANES) {
    vf k = load(key + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] += k * load(q + r * ldq + d);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float s = sum(acc[r]);
    for (int e = d; e < dim; e++) s += scalar(key + e) * q[r * ldq + e];
    out[r * ldo] = s;
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
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        vf x = load(value + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][v] += x * p[r * ldp + k - from];
      }
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

// Makes weights of one row's logits, which belong to keys from..to. Puts the largest and the weights' sum into `part`.
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

struct Scratch {
  std::vector<float> q, k, v, s, o, most, total;
};

// One chunk's keys and values for the rows of some heads; a part for each head.
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
    memcpy(q + i * dim, queries + (long(row) * shape.query_heads + head) * dim, dim * sizeof(float));
  }
  for (int k = unit.from; k < unit.to;) {
    int end = (k / shape.block_tokens + 1) * shape.block_tokens;
    if (end > unit.to) end = unit.to;
    const T *keys = kv.key(k), *values = kv.value(k), *later = end < unit.to ? kv.key(end) : keys;
    for (int h = 0; h < unit.heads; h++)
      in_fours(rows, [&](auto r_type, int r) {
        constexpr int R = decltype(r_type)::value;
        float *to = s + (h * rows + r) * CHUNK + k - unit.from, *from = q + (h * rows + r) * dim;
        for (long at = h * dim, j = k; j < end; j++, at += kv.stride(), to++) {
          if (r == 0) bring(values + at, dim), bring(later + at, dim);
          dots<R>(from, dim, keys + at, dim, to, CHUNK);
        }
      });
    k = end;
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

// Merge the chunks of one sequence and KV head, in order, into the output's rows. The first chunk's part is `part`; the
// others' are `apart`.
static void merge(const Plan& plan, int span_index, int head, int part, int apart, int chunks, float* output) {
  const Span& span = plan.spans[span_index];
  int dim = plan.shape.head_dim, group = plan.group();
  for (int r = 0; r < span.tokens * group; r++) {
    const float* first = plan.parts.data() + part * plan.part_floats + r * long(dim + 2);
    float* out = output + (long(span.first_row + r / group) * plan.shape.query_heads + head * group + r % group) * dim;
    float most = -INFINITY, total = 0;
    for (int c = 0; c < chunks; c++) most = std::fmax(most, first[c * apart * plan.part_floats]);
    for (int d = 0; d < dim; d++) out[d] = 0;
    for (int c = 0; c < chunks; c++) {
      const float* p = first + c * apart * plan.part_floats;
      if (p[0] == -INFINITY) continue;
      float share = std::exp2(p[0] - most);
      total += share * p[1];
      for (int d = 0; d < dim; d++) out[d] += share * p[2 + d];
    }
    for (int d = 0; d < dim; d++) out[d] /= total;
  }
}

// -- many rows ----------------------------------------------------------------------------------------------------------

static inline void product(const float* x, long ldx, int rows, const float* w, long ldw, int depth, int outputs, float* y,
                           long ldy, bool add) {
  for (int n = 0; n < outputs; n += PANEL)
    for (int r = 0; r < rows; r += TILE_ROWS)
      tile_of(rows - r < TILE_ROWS ? rows - r : TILE_ROWS, x + r * ldx, ldx, w + n, ldw, w + n, depth, y + r * ldy + n, ldy, add);
}

template <class T>
static void many_rows(const Plan& plan, const Unit& unit, const Reach& reach, const T* base, const float* queries,
                      float* output, Scratch& scratch) {
  const Shape& shape = plan.shape;
  const Span& span = plan.spans[unit.span];
  int dim = shape.head_dim, group = plan.group(), tokens = unit.to - unit.from, rows = tokens * group;
  int wide = (dim + PANEL - 1) / PANEL * PANEL;
  Rows<T> kv{base, plan, span, unit.head};
  scratch.q.resize(rows * dim), scratch.k.resize(dim * KEYS), scratch.v.assign(KEYS * wide, 0);
  scratch.s.resize(rows * KEYS), scratch.o.assign(long(rows) * wide, 0);
  scratch.most.assign(rows, -INFINITY), scratch.total.assign(rows, 0);
  float *q = scratch.q.data(), *k = scratch.k.data(), *v = scratch.v.data(), *s = scratch.s.data(), *o = scratch.o.data();
  float to_base_2 = reach.cap > 0 ? 1.0f : LOG2E;
  for (int r = 0; r < rows; r++) {
    const float* from = queries + (long(span.first_row + unit.from + r / group) * shape.query_heads + unit.head * group + r % group) * dim;
    for (int d = 0; d < dim; d++) q[r * dim + d] = from[d] * shape.scale * to_base_2;
  }
  int first_position = span.start + unit.from, end = span.start + unit.to;
  int begin = reach.window > 0 && first_position + 1 > reach.window ? first_position + 1 - reach.window : 0;
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    int count = end - tile < KEYS ? end - tile : KEYS;
    for (int j = 0; j < count;) {
      int page_end = ((tile + j) / shape.block_tokens + 1) * shape.block_tokens - tile;
      if (page_end > count) page_end = count;
      const T *key = kv.key(tile + j), *value = kv.value(tile + j);
      for (; j < page_end; j++, key += kv.stride(), value += kv.stride()) {
        for (int d = 0; d < dim; d++) k[d * KEYS + j] = scalar(key + d);
        for (int d = 0; d < dim; d++) v[j * wide + d] = scalar(value + d);
      }
    }
    for (int d = 0; count < KEYS && d < dim; d++)
      for (int j = count; j < KEYS; j++) k[d * KEYS + j] = 0;
    product(q, dim, rows, k, KEYS, dim, KEYS, s, KEYS, false);
    for (int r = 0; r < rows; r++) {
      float* row = s + r * KEYS;
      int position = first_position + r / group;
      if (reach.cap > 0)
        for (int j = 0; j < KEYS; j += LANES) store(row + j, tanhv(load(row + j) / reach.cap) * (reach.cap * LOG2E));
      for (int j = position + 1 - tile > 0 ? position + 1 - tile : 0; j < KEYS; j++) row[j] = -INFINITY;
      int hidden = reach.window > 0 ? position + 1 - reach.window - tile : 0;
      for (int j = 0; j < hidden && j < KEYS; j++) row[j] = -INFINITY;
      vf top = load(row);
      for (int j = LANES; j < KEYS; j += LANES) top = larger(top, load(row + j));
      float most = std::fmax(scratch.most[r], largest(top));
      if (most == -INFINITY) {
        for (int j = 0; j < KEYS; j++) row[j] = 0;
        continue;
      }
      float keep = std::exp2(scratch.most[r] - most);
      vf total = {};
      for (int j = 0; j < KEYS; j += LANES) {
        vf e = exp2v(load(row + j) - most);
        store(row + j, e);
        total += e;
      }
      scratch.total[r] = scratch.total[r] * keep + sum(total);
      scratch.most[r] = most;
      if (keep != 1.0f)
        for (int d = 0; d < wide; d += LANES) store(o + r * wide + d, load(o + r * wide + d) * keep);
    }
    product(s, KEYS, rows, v, wide, count, wide, o, wide, true);
  }
  for (int r = 0; r < rows; r++) {
    float* to = output + (long(span.first_row + unit.from + r / group) * shape.query_heads + unit.head * group + r % group) * dim;
    for (int d = 0; d < dim; d++) to[d] = o[r * wide + d] / scratch.total[r];
  }
}

// -- both ---------------------------------------------------------------------------------------------------------------

// This thread's share of one layer's attention. Call from all threads, with a barrier between the two halves.
template <class T>
static void attend_share(Plan& plan, const Reach& reach, const T* base, const float* queries, float* output,
                         Scratch& scratch) {
  for (;;) {
    int i = plan.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= int(plan.units.size())) return;
    const Unit& unit = plan.units[i];
    if (unit.few)
      few_rows(plan, unit, reach, base, queries, scratch);
    else
      many_rows(plan, unit, reach, base, queries, output, scratch);
  }
}

static void merge_share(const Hand& hand, const Plan& plan, float* output) {
  int turn = 0;
  for (size_t i = 0; i < plan.units.size();) {
    const Unit& first = plan.units[i];
    if (!first.few) {
      i++;
      continue;
    }
    size_t j = i + 1;
    while (j < plan.units.size() && plan.units[j].few && plan.units[j].span == first.span && plan.units[j].head == first.head) j++;
    for (int h = 0; h < first.heads; h++)
      if (turn++ % hand.threads == hand.thread)
        merge(plan, first.span, first.head + h, first.part + h, first.heads, int(j - i), output);
    i = j;
  }
}
