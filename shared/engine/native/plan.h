// A step's attention work: packed sequences over KV pages [pages][2][block_tokens][kv_heads][head_dim], cut into units.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "gemm.h"

struct Span {
  int32_t start, tokens, first_row, first_page;  // first_page: index of its first page in Plan.pages
};

struct Shape {
  int32_t query_heads, kv_heads, head_dim, block_tokens;
  float scale;
};

// What may differ between layers. window: how many keys a query sees, its own included; 0: its own and all before it.
// cap: logits x become cap * tanh(x / cap); 0: they are not capped.
struct Reach {
  int32_t window;
  float cap;
};

constexpr int CHUNK = 128;           // few rows: keys per chunk
constexpr int DOT_ROWS = 16;         // few rows: most rows (tokens times group) of a span
constexpr int TOGETHER = 256;        // few rows: most floats of a key that a unit reads together, over its heads
constexpr int MAX_DIM = 512;         // largest head_dim
constexpr int KEYS = 64;             // many rows: keys per tile
constexpr int MANY_ROWS = 192;       // many rows: most rows of a unit, unless one token has more
constexpr int UNITS_PER_THREAD = 2;  // many rows: units wanted per thread

struct Unit {
  int32_t span, head, heads;  // KV heads head .. head + heads - 1
  int32_t from, to;           // few rows: keys from .. to-1, one chunk; many rows: query tokens from .. to-1
  int32_t few, part;          // part: index of the first head's part; the other heads' follow; -1: many rows
};

// A step's work. It is the same for all layers.
struct Plan {
  Shape shape;
  std::vector<Span> spans;
  std::vector<int32_t> pages;
  std::vector<Unit> units;
  std::vector<float> parts;  // of few rows; per unit, head and row: largest logit, sum, weighted values [head_dim]
  long part_floats = 0;
  std::atomic<int> next{0};

  int group() const { return shape.query_heads / shape.kv_heads; }
  bool has_parts() const { return !parts.empty(); }
  bool few(const Span& s) const { return s.tokens * group() <= DOT_ROWS && s.tokens <= 4; }

  // How many KV heads a unit of few rows reads together: the rows of a single head are too short to be read fast.
  int together() const {
    int heads = 1;
    for (int n = 2; n <= shape.kv_heads; n++)
      if (shape.kv_heads % n == 0 && n * shape.head_dim <= TOGETHER) heads = n;
    return heads;
  }

  // Query tokens per unit of many rows. The more there are, the less often keys and values are read; but there must be
  // enough units for all threads.
  int step_for(int threads) const {
    for (int rows = MANY_ROWS;; rows /= 2) {
      int step = rows / group() > 0 ? rows / group() : 1;
      long made = 0;
      for (const Span& s : spans)
        if (!few(s)) made += long((s.tokens + step - 1) / step) * shape.kv_heads;
      if (threads == 1 || made >= long(threads) * UNITS_PER_THREAD || rows <= MANY_ROWS / 4) return step;
    }
  }

  void lay_out(int threads) {
    units.clear();
    int heads = together();
    part_floats = long(DOT_ROWS) * (shape.head_dim + 2);
    int part = 0, step = step_for(threads);
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

struct Scratch {
  std::vector<float> q, k, v, s, o, most, total, keep;
  std::vector<int32_t> positions;
};
