// Attention of many rows (prefill): tile by tile of keys, through two small matrix products with a running softmax.
#pragma once

#include "plan.h"

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
