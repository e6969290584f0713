// Causal attention of packed sequences over KV pages [pages][2][block_tokens][kv_heads][head_dim].
//
// The query heads that share a KV head are rows of one unit of work. Few rows (decode) meet each key by a dot product,
// in chunks of CHUNK keys counted from position 0 that are merged in order, so that the work of a long context is
// spread over threads, and no sum depends on how. Many rows (prefill) go tile by tile of keys through two small matrix
// products with a running softmax.
#pragma once

#include <atomic>
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

constexpr int CHUNK = 256;
constexpr int FEW_ROWS = 16;
constexpr int KEYS = 64;
constexpr int MANY_ROWS = 96;

struct Unit {
  int32_t span, head, from, to;  // few rows: keys of one chunk; many rows: queries of one tile
  int32_t few, part;             // part: where its partial result is
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
  bool few(const Span& s) const { return s.tokens * group() <= FEW_ROWS && s.tokens <= 4; }

  void lay_out() {
    units.clear();
    part_floats = long(FEW_ROWS) * (shape.head_dim + 2);
    int part = 0;
    for (int pass = 0; pass < 2; pass++)  // the largest units first
      for (size_t i = 0; i < spans.size(); i++) {
        const Span& s = spans[i];
        bool is_few = few(s);
        if (is_few != (pass == 1)) continue;
        int end = s.start + s.tokens;
        if (is_few) {
          for (int h = 0; h < shape.kv_heads; h++)
            for (int k = 0; k < end; k += CHUNK)
              units.push_back({int32_t(i), h, k, k + CHUNK < end ? k + CHUNK : end, 1, part++});
          continue;
        }
        int step = MANY_ROWS / group() > 0 ? MANY_ROWS / group() : 1;
        int tiles = (s.tokens + step - 1) / step;
        for (int t = tiles - 1; t >= 0; t--)
          for (int h = 0; h < shape.kv_heads; h++) {
            int from = t * step, to = from + step < s.tokens ? from + step : s.tokens;
            units.push_back({int32_t(i), h, from, to, 0, -1});
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

template <int R, class T>
static void few_rows(const Plan& plan, const Unit& unit, const Reach& reach, const T* base, const float* queries,
                     float* part, int first) {
  const Shape& shape = plan.shape;
  const Span& span = plan.spans[unit.span];
  int dim = shape.head_dim, group = plan.group(), count = unit.to - unit.from;
  Rows<T> rows{base, plan, span, unit.head};
  alignas(64) float p[R * CHUNK], q[R * 512];
  int seen_from[R], seen_to[R];
  for (int r = 0; r < R; r++) {
    int token = (first + r) / group, position = span.start + token;
    const float* from = queries + (long(span.first_row + token) * shape.query_heads + unit.head * group + (first + r) % group) * dim;
    memcpy(q + r * dim, from, dim * sizeof(float));
    seen_to[r] = position + 1;
    seen_from[r] = reach.window > 0 && position + 1 > reach.window ? position + 1 - reach.window : 0;
  }
  for (int k = unit.from; k < unit.to;) {
    int end = (k / shape.block_tokens + 1) * shape.block_tokens;
    if (end > unit.to) end = unit.to;
    const T *key = rows.key(k), *value = rows.value(k), *later = end < unit.to ? rows.key(end) : key;
    for (; k < end; k++, key += rows.stride(), value += rows.stride(), later += rows.stride()) {
      bring(value, dim), bring(later, dim);
      dots<R>(q, dim, key, dim, p + k - unit.from, CHUNK);
    }
  }
  for (int r = 0; r < R; r++) {
    float* row = p + r * CHUNK;
    int padded = (count + LANES - 1) / LANES * LANES;
    int begin = seen_from[r] > unit.from ? seen_from[r] - unit.from : 0;
    int end = seen_to[r] < unit.to ? seen_to[r] - unit.from : count;
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
    float* to = part + (first + r) * long(dim + 2);
    to[0] = most;
    to[1] = sum(total);
  }
  float* out = part + first * long(dim + 2) + 2;
  int d = 0;
  constexpr int V = R <= 3 ? 4 : 2;
  for (; d + V * LANES <= dim; d += V * LANES) weigh_some<R, V>(p, CHUNK, rows, unit.from, unit.to, d, out, dim + 2);
  for (; d + LANES <= dim; d += LANES) weigh_some<R, 1>(p, CHUNK, rows, unit.from, unit.to, d, out, dim + 2);
  for (; d < dim; d++)
    for (int r = 0; r < R; r++) {
      float s = 0;
      for (int i = 0; i < count; i++) s += p[r * CHUNK + i] * scalar(rows.value(unit.from + i) + d);
      out[r * (dim + 2) + d] = s;
    }
}

// Merge the chunks of one sequence and KV head, in order, into the output's rows.
static void merge(const Plan& plan, int span_index, int head, const Unit* first, int chunks, float* output) {
  const Span& span = plan.spans[span_index];
  int dim = plan.shape.head_dim, group = plan.group();
  for (int r = 0; r < span.tokens * group; r++) {
    const float* part = plan.parts.data() + first->part * plan.part_floats + r * long(dim + 2);
    float* out = output + (long(span.first_row + r / group) * plan.shape.query_heads + head * group + r % group) * dim;
    float most = -INFINITY, total = 0;
    for (int c = 0; c < chunks; c++) most = std::fmax(most, part[c * plan.part_floats]);
    for (int d = 0; d < dim; d++) out[d] = 0;
    for (int c = 0; c < chunks; c++) {
      const float* p = part + c * plan.part_floats;
      if (p[0] == -INFINITY) continue;
      float share = std::exp2(p[0] - most);
      total += share * p[1];
      for (int d = 0; d < dim; d++) out[d] += share * p[2 + d];
    }
    for (int d = 0; d < dim; d++) out[d] /= total;
  }
}

// -- many rows ----------------------------------------------------------------------------------------------------------

struct Scratch {
  std::vector<float> q, k, v, s, o, most, total;
};

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
  int group = plan.group();
  for (;;) {
    int i = plan.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= int(plan.units.size())) return;
    const Unit& unit = plan.units[i];
    if (!unit.few) {
      many_rows(plan, unit, reach, base, queries, output, scratch);
      continue;
    }
    float* part = plan.parts.data() + unit.part * plan.part_floats;
    int rows = plan.spans[unit.span].tokens * group;
    for (int r = 0; r < rows;) {
      int left = rows - r;
      if (left >= 4) few_rows<4>(plan, unit, reach, base, queries, part, r), r += 4;
      else if (left == 3) few_rows<3>(plan, unit, reach, base, queries, part, r), r += 3;
      else if (left == 2) few_rows<2>(plan, unit, reach, base, queries, part, r), r += 2;
      else few_rows<1>(plan, unit, reach, base, queries, part, r), r += 1;
    }
  }
}

static void merge_share(int thread, int threads, const Plan& plan, float* output) {
  int turn = 0;
  for (size_t i = 0; i < plan.units.size();) {
    const Unit& first = plan.units[i];
    if (!first.few) {
      i++;
      continue;
    }
    size_t j = i + 1;
    while (j < plan.units.size() && plan.units[j].few && plan.units[j].span == first.span && plan.units[j].head == first.head) j++;
    if (turn++ % threads == thread) merge(plan, first.span, first.head, &first, int(j - i), output);
    i = j;
  }
}
