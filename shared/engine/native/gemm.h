// y (+)= x W^T for x of few or many rows. W is packed so that a vector holds the weights of one input and LANES
// neighbouring outputs. A row's result is bit-identical whatever other rows there are: its sums run over the inputs in
// one fixed order.
#pragma once

#include "team.h"
#include "vec.h"

// Outputs per panel. W is packed as [panels][inputs][PANEL], or for pairs as [panels][inputs / 2][PANEL][2].
constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;
#elif defined(__AVX__)
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 4;
#endif
// Inputs that are summed in registers at a time. A panel's weights for so many inputs, 24 KB as floats, stay in the
// first-level cache.
constexpr int DEPTH = 6144 / PANEL;
// Rows that go through all panels together: their inputs stay in the second-level cache.
constexpr int BAND_ROWS = 32 * TILE_ROWS;

struct pair {
  bf16 even, odd;
};

static inline vf multiply_add(vf sum, vf weights, const float* x) { return sum + weights * *x; }

#if defined(__AVX512BF16__)
struct vp {
  __m512bh pairs;
};

static inline vp load(const pair* p) {
  vp v;
  v.pairs = (__m512bh)_mm512_loadu_si512(p);
  return v;
}

static inline vf multiply_add(vf sum, vp weights, const pair* x) {
  int32_t both;
  memcpy(&both, x, 4);
  return (vf)_mm512_dpbf16_ps((__m512)sum, weights.pairs, (__m512bh)_mm512_set1_epi32(both));
}
#endif

// Layout of x. ROWS_OF_INPUTS: the inputs of a row are adjacent. COLUMNS: the rows of an input are adjacent.
enum Lie { ROWS_OF_INPUTS, COLUMNS };

// One tile: `depth` inputs of R rows of x, times two vectors of outputs. The rows of w are `ldw` apart. Meanwhile the
// same amount of weights at `ahead` is prefetched, so that memory and CPU work at the same time.
template <int R, Lie LIE, class X, class W>
static inline void tile(const X* x, long ldx, const W* w, long ldw, const W* ahead, int depth, float* y, long ldy,
                        bool add) {
  vf acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vf{};
  for (int k = 0; k < depth; k++) {
    auto left = load(w), right = load(w + LANES);
    __builtin_prefetch(ahead, 0, 2);
    w += ldw, ahead += ldw;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const X* at = LIE == COLUMNS ? x + k * ldx + r : x + r * ldx + k;
      acc[r][0] = multiply_add(acc[r][0], left, at);
      acc[r][1] = multiply_add(acc[r][1], right, at);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) {
      float* to = y + r * ldy + half * LANES;
      store(to, add ? load(to) + acc[r][half] : acc[r][half]);
    }
}

template <Lie LIE = ROWS_OF_INPUTS, class X, class W>
static inline void tile_of(int rows, const X* x, long ldx, const W* w, long ldw, const W* ahead, int depth, float* y,
                           long ldy, bool add) {
#define ROWS(R) case R: return tile<R, LIE>(x, ldx, w, ldw, ahead, depth, y, ldy, add);
  switch (rows) {
    ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if defined(__AVX__)
    ROWS(5) ROWS(6)
#endif
#if defined(__AVX512F__)
    ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
  }
#undef ROWS
}

// All rows of x times one block of a panel: `depth` of its inputs. Only the first `outputs` of the panel's PANEL outputs
// exist; the others are padding. The block to be used next is at `next`; it is prefetched.
template <class X, class W>
static inline void rows_of_panel(const X* x, long ldx, int rows, const W* w, const W* next, int depth, float* y,
                                 long ldy, int outputs, bool add) {
  for (int r = 0; r < rows; r += TILE_ROWS) {
    int some = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
    const W* ahead = r + TILE_ROWS < rows ? w : next;
    if (outputs == PANEL) {
      tile_of(some, x + r * ldx, ldx, w, PANEL, ahead, depth, y + r * ldy, ldy, add);
      continue;
    }
    float edge[TILE_ROWS * PANEL];
    tile_of(some, x + r * ldx, ldx, w, PANEL, ahead, depth, edge, PANEL, false);
    for (int i = 0; i < some; i++)
      for (int n = 0; n < outputs; n++) {
        float* to = y + (r + i) * ldy + n;
        *to = add ? *to + edge[i * PANEL + n] : edge[i * PANEL + n];
      }
  }
}

// Widens a block of bf16 weights to floats, once for many rows. Meanwhile the next block is prefetched.
static inline void widen(const bf16* w, const bf16* next, int depth, float* scratch) {
  for (int i = 0; i < depth * PANEL; i += LANES) {
    __builtin_prefetch(next + i, 0, 2);
    store(scratch + i, load(w + i));
  }
}

// -- few rows -----------------------------------------------------------------------------------------------------------

// Up to this many rows, the CPU computes as fast as memory delivers the weights.
constexpr int FEW_ROWS = TILE_ROWS / 2;
// Panels that few rows go through side by side: memory is faster when it is read in several places. With more panels, the
// sums would not fit into the registers.
constexpr int streams_for(int rows) { return rows == 1 ? 4 : 2; }
// How far ahead weights are prefetched.
constexpr int AHEAD_BYTES = 1024;

// R rows of x times S panels that are `apart` from each other. Gives the same bits as `tile`.
template <int R, int S, class X, class W>
static inline void tile_of_streams(const X* x, long ldx, const W* w, long apart, int depth, float* y, long ldy, bool add,
                                   long y_apart) {
  constexpr int LINE = 64 / (PANEL * sizeof(W)) > 0 ? 64 / (PANEL * sizeof(W)) : 1;
  vf acc[R][S][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) acc[r][s][0] = acc[r][s][1] = vf{};
#pragma GCC unroll 2
  for (int k = 0; k < depth; k++, w += PANEL) {
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) {
      const W* from = w + s * apart;
      if (k % LINE == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD_BYTES, 0, 3);
      auto left = load(from), right = load(from + LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        acc[r][s][0] = multiply_add(acc[r][s][0], left, x + r * ldx + k);
        acc[r][s][1] = multiply_add(acc[r][s][1], right, x + r * ldx + k);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
      for (int half = 0; half < 2; half++) {
        float* to = y + r * ldy + s * y_apart + half * LANES;
        store(to, add ? load(to) + acc[r][s][half] : acc[r][s][half]);
      }
}

// R rows of x times the panels first..last-1, which must be whole. Memory is read front to back, in S places at a time.
template <int R, int S, class X, class W>
static void stream(const X* x, int inputs, const W* w, int first, int last, float* y, int outputs, bool add) {
  int each = (last - first) / S;
  long size = long(inputs) * PANEL;
  for (int p = first; p < first + each; p++)
    for (int k = 0; k < inputs; k += DEPTH) {
      int depth = inputs - k < DEPTH ? inputs - k : DEPTH;
      tile_of_streams<R, S>(x + k, inputs, w + p * size + long(k) * PANEL, each * size, depth, y + long(p) * PANEL,
                            outputs, add || k, long(each) * PANEL);
    }
  if constexpr (S > 1) stream<R, 1>(x, inputs, w, first + each * S, last, y, outputs, add);
}

template <class X, class W>
static void stream_rows(int rows, const X* x, int inputs, const W* w, int first, int last, float* y, int outputs,
                        bool add) {
#define ROWS(R) case R: return stream<R, streams_for(R)>(x, inputs, w, first, last, y, outputs, add);
  switch (rows) {
    ROWS(1) ROWS(2)
#if defined(__AVX__)
    ROWS(3)
#endif
#if defined(__AVX512F__)
    ROWS(4) ROWS(5) ROWS(6)
#endif
  }
#undef ROWS
}

// -- any rows -----------------------------------------------------------------------------------------------------------

struct Panels {
  int first, last;
};

// This thread's share of the panels of `outputs` outputs. Groups of `together` panels go to the same thread.
static inline Panels panels_of(const Hand& hand, int outputs, int together = 1) {
  int sets = (outputs + PANEL * together - 1) / (PANEL * together);
  return {hand.from(sets) * together, hand.to(sets) * together};
}

// y[rows][outputs] (+)= x[rows][inputs] W^T for these panels.
template <class X, class W>
static void multiply(Panels panels, const X* x, int rows, int inputs, const W* w, int outputs, float* y, bool add) {
  if (rows <= FEW_ROWS) {
    int whole = long(panels.last) * PANEL <= outputs ? panels.last : panels.last - 1;
    if (panels.first < whole) stream_rows(rows, x, inputs, w, panels.first, whole, y, outputs, add);
    panels.first = whole;
  }
  for (int band = 0; band < rows; band += BAND_ROWS) {
    int some = rows - band < BAND_ROWS ? rows - band : BAND_ROWS;
    for (int k = 0; k < inputs; k += DEPTH) {
      int depth = inputs - k < DEPTH ? inputs - k : DEPTH;
      for (int p = panels.first; p < panels.last; p++) {
        const W* block = w + (long(p) * inputs + k) * PANEL;
        int existing = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
        const X* from = x + long(band) * inputs + k;
        float* to = y + long(band) * outputs + p * PANEL;
        const W* next = block + long(inputs) * PANEL;
        if constexpr (sizeof(W) == 2) {
          if (some > TILE_ROWS) {
            alignas(64) float scratch[DEPTH * PANEL];
            const float* wide = scratch;
            widen(block, next, depth, scratch);
            rows_of_panel(from, inputs, some, wide, wide, depth, to, outputs, existing, add || k);
            continue;
          }
        }
        rows_of_panel(from, inputs, some, block, next, depth, to, outputs, existing, add || k);
      }
    }
  }
}
