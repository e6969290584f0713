// Attention of many rows (prefill): each tile of keys goes through two small matrix products with a running softmax.
//
// Queries are transposed once, so that a vector holds the same dimension of LANES neighbouring queries. Keys and values
// are then used in the order of the pages, and the softmax needs no operation across a vector. A query's sums run in one
// fixed order, whatever other queries there are.
#pragma once

#include "plan.h"

// The queries of a unit, in panels. `rows` counts them; `across` is rows rounded up to whole panels.
struct Queries {
  const Plan& plan;
  const Unit& unit;
  int dim, group, rows, across;

  Queries(const Plan& plan, const Unit& unit)
      : plan(plan), unit(unit), dim(plan.shape.head_dim), group(plan.group()), rows((unit.to - unit.from) * group),
        across((rows + PANEL - 1) / PANEL * PANEL) {}

  // The index of row r's first float in the step's queries, and in its outputs.
  long at(int r) const {
    long token = plan.spans[unit.span].first_row + unit.from + r / group;
    return (token * plan.shape.query_heads + unit.head * group + r % group) * dim;
  }

  int position(int r) const { return plan.spans[unit.span].start + unit.from + (r < rows ? r : rows - 1) / group; }
};

// One step of the running softmax, for one vector of queries: turns their logits of `count` keys from position `tile` on
// into weights, not yet divided by their sum. Updates the largest logits `most` and the sums `total`. `keep` receives the
// factors by which the outputs summed so far must be multiplied.
static inline void soften(const Reach& reach, float* logits, long step, int tile, int count, const int32_t* positions,
                          float* most, float* total, float* keep) {
  vi position;
  memcpy(&position, positions, sizeof position);
  bool hides = tile + count - 1 > positions[0] || (reach.window > 0 && tile <= positions[LANES - 1] - reach.window);
  vf top = load(most);
  for (int j = 0; j < count; j++) {
    vf x = load(logits + j * step);
    if (reach.cap > 0) x = tanhv(x / reach.cap) * (reach.cap * LOG2E);
    if (hides) {
      int key = tile + j;
      vi hidden = key > position;
      if (reach.window > 0) hidden |= key <= position - reach.window;
      x = hidden ? splat(-INFINITY) : x;
    }
    if (hides || reach.cap > 0) store(logits + j * step, x);
    top = larger(top, x);
  }
  vf base = top == -INFINITY ? vf{} : top;  // the query has seen no key yet
  vf kept = exp2v(load(most) - base), sums = {};
  for (int j = 0; j < count; j++) {
    vf e = exp2v(load(logits + j * step) - base);
    store(logits + j * step, e);
    sums += e;
  }
  store(total, load(total) * kept + sums);
  store(most, top);
  store(keep, kept);
}

template <class T>
static void many_rows(const Plan& plan, const Unit& unit, const Reach& reach, const T* base, const float* queries,
                      float* output, Scratch& scratch) {
  const Shape& shape = plan.shape;
  const Span& span = plan.spans[unit.span];
  Queries of{plan, unit};
  int dim = of.dim, rows = of.rows, across = of.across, wide = (dim + PANEL - 1) / PANEL * PANEL;
  Rows<T> kv{base, plan, span, unit.head};
  scratch.q.assign(long(across) * dim, 0), scratch.k.resize(KEYS * dim), scratch.v.assign(KEYS * wide, 0);
  scratch.s.resize(long(KEYS) * across), scratch.o.assign(long(rows) * wide, 0), scratch.positions.resize(across);
  scratch.most.assign(across, -INFINITY), scratch.total.assign(across, 0), scratch.keep.resize(across);
  float *q = scratch.q.data(), *k = scratch.k.data(), *v = scratch.v.data(), *s = scratch.s.data(), *o = scratch.o.data();
  const float* keep = scratch.keep.data();
  float scale = shape.scale * (reach.cap > 0 ? 1.0f : LOG2E);
  for (int r = 0; r < across; r++) scratch.positions[r] = of.position(r);
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < dim; d++) q[(long(r / PANEL) * dim + d) * PANEL + r % PANEL] = queries[of.at(r) + d] * scale;

  int first = span.start + unit.from, end = span.start + unit.to;
  int begin = reach.window > 0 && first + 1 > reach.window ? first + 1 - reach.window : 0;
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    int count = end - tile < KEYS ? end - tile : KEYS;
    for (int j = 0; j < count;) {
      int page_end = ((tile + j) / shape.block_tokens + 1) * shape.block_tokens - tile;
      if (page_end > count) page_end = count;
      const T *key = kv.key(tile + j), *value = kv.value(tile + j);
      for (; j < page_end; j++, key += kv.stride(), value += kv.stride()) {
        for (int d = 0; d < dim; d++) k[j * dim + d] = scalar(key + d);
        for (int d = 0; d < dim; d++) v[j * wide + d] = scalar(value + d);
      }
    }
    for (int n = 0; n < across; n += PANEL)
      for (int j = 0; j < count; j += TILE_ROWS) {
        const float* w = q + long(n) * dim;
        tile_of(count - j < TILE_ROWS ? count - j : TILE_ROWS, k + j * dim, dim, w, PANEL, w, dim, s + long(j) * across + n, across, false);
      }
    bool rescales = false;
    for (int n = 0; n < across; n += LANES) {
      soften(reach, s + n, across, tile, count, &scratch.positions[n], &scratch.most[n], &scratch.total[n], &scratch.keep[n]);
      for (int r = n; r < n + LANES; r++) rescales |= keep[r] != 1.0f;
    }
    for (int r = 0; rescales && r < rows; r++)
      for (int d = 0; d < wide; d += LANES) store(o + r * wide + d, load(o + r * wide + d) * keep[r]);
    for (int r = 0; r < rows; r += TILE_ROWS)
      for (int n = 0; n < wide; n += PANEL)
        tile_of<COLUMNS>(rows - r < TILE_ROWS ? rows - r : TILE_ROWS, s + r, across, v + n, wide, v + n, count, o + r * wide + n, wide, true);
  }
  for (int r = 0; r < rows; r++)
    for (int d = 0; d < dim; d++) output[of.at(r) + d] = o[r * wide + d] / scratch.total[r];
}
