// Test builds include this before kernels.cpp. It makes the compiler build the code for AVX-512 on CPUs that have only
// AVX2. The compiler splits each 64-byte vector into two halves. With PAIRS_BY_HALVES, the one instruction that the
// kernels use by name, VDPBF16PS, is replaced by the function below.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#error "this is for builds without AVX-512"
#endif
#define __AVX512F__ 1

#if defined(PAIRS_BY_HALVES)
#define __AVX512BF16__ 1

typedef uint32_t words_by_halves __attribute__((vector_size(64)));
typedef float floats_by_halves __attribute__((vector_size(64)));

static inline words_by_halves load_by_halves(const void* p) {
  words_by_halves v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline words_by_halves splat_by_halves(uint32_t x) { return x - words_by_halves{}; }

// VDPBF16PS treats denormal inputs as zero, and flushes denormal results to zero.
static inline floats_by_halves flushed(floats_by_halves v) {
  words_by_halves bits = (words_by_halves)v, sign = bits & 0x80000000;
  return (floats_by_halves)((bits & 0x7f800000) == 0 ? sign : bits);
}

// VDPBF16PS: adds to each float the product of the odd numbers of two pairs and rounds, then adds the product of the even
// numbers and rounds. A product of two bf16 is exact as a float. Not inlined, since that would take a minute to compile.
__attribute__((noinline)) static floats_by_halves dot_by_halves(floats_by_halves sum, words_by_halves a, words_by_halves b) {
  floats_by_halves odd_a = flushed((floats_by_halves)(a & 0xffff0000)), even_a = flushed((floats_by_halves)(a << 16));
  floats_by_halves odd_b = flushed((floats_by_halves)(b & 0xffff0000)), even_b = flushed((floats_by_halves)(b << 16));
  sum = flushed(flushed(sum) + odd_a * odd_b);
  return flushed(sum + even_a * even_b);
}

#define __m512bh words_by_halves
#define _mm512_loadu_si512 load_by_halves
#define _mm512_set1_epi32 splat_by_halves
#define _mm512_dpbf16_ps dot_by_halves
#endif
