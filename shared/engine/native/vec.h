// Vectors of LANES floats, as many as a register of the build's instruction set holds. They use the compiler's vector
// extensions, so the same source is built for AVX-512, AVX2 and any other CPU. Sums are taken in the same order whatever
// the number of rows or threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
  uint16_t bits;
};

static inline vf splat(float x) { return x - vf{}; }

static inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu) << 16;
  return (vf)u;
}

// Loads 2 * LANES adjacent numbers. For bf16, `a` gets the even ones and `b` the odd ones: this needs only a shift and a
// mask to widen them. `place_in_pair` is the index of the i-th number in (a, b).
static inline void load_pair(const float* p, vf& a, vf& b) { a = load(p), b = load(p + LANES); }

static inline void load_pair(const bf16* p, vf& a, vf& b) {
  vu both;
  memcpy(&both, p, sizeof both);
  a = (vf)(both << 16), b = (vf)(both & 0xffff0000);
}

static inline constexpr int place_in_pair(const float*, int i) { return i; }
static inline constexpr int place_in_pair(const bf16*, int i) { return i % 2 * LANES + i / 2; }

static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// Rounds to nearest even; a NaN stays one.
static inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vi sound = v == v;
  vu bits = ((vu)sound & rounded) | (~(vu)sound & 0x7fc0);
  vh h = __builtin_convertvector(bits, vh);
  memcpy(p, &h, sizeof h);
}

static inline float scalar(const float* p) { return *p; }

static inline float scalar(const bf16* p) {
  uint32_t u = uint32_t(p->bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline void put(float* p, float x) { *p = x; }

static inline void put(bf16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : 0x7fc0;
}

// Adds the upper half to the lower half until LEFT numbers are left, without leaving the registers.
template <int LEFT, int N>
static inline void fold(const float (&s)[N], float (&to)[LEFT]) {
  if constexpr (N == LEFT) {
    memcpy(to, s, sizeof s);
  } else {
    typedef float half __attribute__((vector_size(N * 2)));
    half a, b;
    memcpy(&a, s, sizeof a), memcpy(&b, s + N / 2, sizeof b);
    a += b;
    float rest[N / 2];
    memcpy(rest, &a, sizeof a);
    fold(rest, to);
  }
}

static inline float sum(vf v) {
  float s[LANES];
  memcpy(s, &v, sizeof s);
  float all[1];
  fold(s, all);
  return all[0];
}

typedef float quad __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t quad_of_places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, quad_of_places{__VA_ARGS__})
#endif

static inline quad four_of(vf v) {
  float s[LANES], four[4];
  memcpy(s, &v, sizeof s);
  fold(s, four);
  quad q;
  memcpy(&q, four, sizeof q);
  return q;
}

// The sums of four vectors. Each has the same bits as `sum`.
static inline quad sums(vf v0, vf v1, vf v2, vf v3) {
  quad a = four_of(v0), b = four_of(v1), c = four_of(v2), d = four_of(v3);
  quad ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
  quad cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
  return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

static inline vf larger(vf a, vf b) { return a > b ? a : b; }

static inline float largest(vf v) {
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// 2^x with a relative error of about 1e-7; 0 if x < -126.
static inline vf exp2v(vf x) {
  vi tiny = x < -126.0f;
  vf held = tiny ? splat(-126.0f) : (x > 127.0f ? splat(127.0f) : x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  vf shifted = held + magic;
  vi n = (vi)shifted - 0x4b400000;
  vf f = held - (shifted - magic);
  vf p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  vf power = (vf)((n + 127) << 23);
  vf result = p * power;
  return tiny ? vf{} : result;
}

constexpr float LOG2E = 1.44269504f;

static inline vf silu(vf x) { return x / (1.0f + exp2v(x * -LOG2E)); }

static inline vf tanhv(vf x) { return 1.0f - 2.0f / (1.0f + exp2v(x * (2.0f * LOG2E))); }
