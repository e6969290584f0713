// The expected results of the kernels, computed by plain loops of doubles, and random numbers as inputs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef std::vector<double> Doubles;
typedef std::vector<float> Floats;
typedef std::vector<uint16_t> Halves;

// Conversions between float and bf16. `held` rounds a number to bf16 or to float.
static uint16_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float of_bits(uint16_t bits) {
  uint32_t u = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

static double held(double x, bool as_bf16) { return as_bf16 ? of_bits(bits_of(float(x))) : float(x); }

// Random numbers that are roughly normally distributed, and the same on every machine.
struct Random {
  uint64_t state;

  double uniform() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return double(state >> 11) / double(1ull << 53);
  }

  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform();
    return sum;
  }

  Doubles numbers(size_t count, bool as_bf16, double scale = 1) {
    Doubles all(count);
    for (double& x : all) x = held(normal() * scale, as_bf16);
    return all;
  }
};

static Floats floats_of(const Doubles& from) { return Floats(from.begin(), from.end()); }

// x [rows][inputs] W^T, with W [outputs][inputs].
static Doubles product(const Doubles& x, const Doubles& w, int rows, int inputs, int outputs) {
  Doubles y(size_t(rows) * outputs);
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) {
      double sum = 0;
      for (int k = 0; k < inputs; k++) sum += x[size_t(r) * inputs + k] * w[size_t(o) * inputs + k];
      y[size_t(r) * outputs + o] = sum;
    }
  return y;
}

static void norm(double* x, const double* weight, double epsilon, int n) {
  double squares = 0;
  for (int i = 0; i < n; i++) squares += x[i] * x[i];
  double scale = 1 / std::sqrt(squares / n + epsilon);
  for (int i = 0; i < n; i++) x[i] *= scale * weight[i];
}

static void rotate(double* x, const double* cosines, const double* sines, int dim) {
  for (int i = 0; i < dim / 2; i++) {
    double a = x[i], b = x[i + dim / 2];
    x[i] = a * cosines[i] - b * sines[i], x[i + dim / 2] = b * cosines[i] + a * sines[i];
  }
}

struct Heads {
  int query, kv, dim, block_tokens;
  double scale;
};

// One row's attention at `position`, over keys and values [positions][kv][dim].
static void attend(const Heads& s, const double* queries, const Doubles& keys, const Doubles& values, int position,
                   int window, double cap, double* output) {
  int from = window > 0 && position + 1 > window ? position + 1 - window : 0;
  for (int h = 0; h < s.query; h++) {
    const double* q = queries + h * s.dim;
    double* out = output + h * s.dim;
    Doubles weights;
    double most = -INFINITY, total = 0;
    for (int p = from; p <= position; p++) {
      const double* k = &keys[(size_t(p) * s.kv + h / (s.query / s.kv)) * s.dim];
      double dot = 0;
      for (int d = 0; d < s.dim; d++) dot += q[d] * k[d];
      dot *= s.scale;
      weights.push_back(cap > 0 ? cap * std::tanh(dot / cap) : dot);
      most = std::fmax(most, weights.back());
    }
    for (double& w : weights) total += w = std::exp(w - most);
    for (int d = 0; d < s.dim; d++) out[d] = 0;
    for (int p = from; p <= position; p++)
      for (int d = 0; d < s.dim; d++)
        out[d] += weights[p - from] / total * values[(size_t(p) * s.kv + h / (s.query / s.kv)) * s.dim + d];
  }
}
