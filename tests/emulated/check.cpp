// Compares builds of the kernels with plain loops: check LIBRARY... For each kind of work it prints one line, with the
// worst error as a share of the allowed one and a digest of all result bits. It fails if any comparison fails. If it is
// the first process of a machine, it turns the machine off at the end. `--spoil` adds an error to each result, so that
// all comparisons must fail.
#include <sys/reboot.h>
#include <unistd.h>

#include <string>

#include "library.h"
#include "steps.h"

static bool spoil = false;

// The results of one kind of work: how many cases there were, how many failed, and the worst error.
struct Tally {
  const char* what;
  int cases = 0, failures = 0;
  double worst = 0;
  uint64_t digest = 14695981039346656037u;

  // Errors are relative to the largest expected absolute value, or to 1 if that is larger.
  void compare(const std::string& which, const float* got, const Doubles& expected, double allowed) {
    double most = 1, error = 0;
    for (double x : expected) most = std::fmax(most, std::fabs(x));
    for (size_t i = 0; i < expected.size(); i++) {
      double is = got[i] + (spoil && i == expected.size() / 2 ? 0.01 * most + 3 * allowed * most : 0);
      double apart = std::fabs(is - expected[i]) / most;
      error = apart <= error ? error : apart;  // written so that a NaN is kept
      uint32_t bits;
      memcpy(&bits, got + i, 4);
      digest = (digest ^ bits) * 1099511628211u;
    }
    worst = error / allowed <= worst ? worst : error / allowed;
    require(error <= allowed, which + ": error " + std::to_string(error) + " of at most " + std::to_string(allowed));
    cases++;
  }

  void require(bool holds, const std::string& which) {
    if (!holds && ++failures <= 5) printf("  %s: %s\n", what, which.c_str());
  }

  bool report(const Library& lib) const {
    printf("%s %s | %s: %d cases, worst error %.3f of allowed, bits %016llx\n", failures ? "FAILED" : "passed", lib.name,
           what, cases, worst, static_cast<unsigned long long>(digest));
    return !failures;
  }
};

static const char* const KINDS[] = {"fp32", "bf16", "pairs"};

static bool products(const Library& lib, int kind, bool normed) {
  const int shapes[][2] = {{1, 2}, {16, 8}, {33, 30}, {64, 800}, {130, 420}, {300, 64}};
  std::string what = std::string(normed ? "products of norms, " : "products, ") + KINDS[kind] + " weights";
  Tally tally{what.c_str()};
  Random random{1};
  for (auto [outputs, inputs] : shapes)
    for (int rows : {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 40, 400}) {
      if (rows == 400 && inputs > 64) continue;
      Doubles w = random.numbers(size_t(outputs) * inputs, kind != FLOATS), x = random.numbers(size_t(rows) * inputs, false);
      Doubles weight = random.numbers(inputs, false);
      Packed packed(lib, kind, w, outputs, inputs);
      Floats from = floats_of(x), weights = floats_of(weight), y(size_t(rows) * outputs + 64, 7), space(from.size());
      auto head = [&](int threads, int first, int some, float* to) {
        lib.head(threads, kind, &from[size_t(first) * inputs], normed ? weights.data() : nullptr, 1e-5f, some, inputs,
                 packed.data(), outputs, space.data(), to);
      };
      head(1 + rows % 2, 0, rows, y.data());
      for (int r = 0; normed && r < rows; r++) norm(&x[size_t(r) * inputs], weight.data(), 1e-5f, inputs);
      for (double& v : x) v = kind == PAIRS ? held(v, true) : v;
      std::string which = std::to_string(rows) + " rows, " + std::to_string(inputs) + " to " + std::to_string(outputs);
      // A norm that is close to the middle between two bf16 may be rounded to either.
      double allowed = kind == PAIRS && normed ? 4e-3 : 1e-6 * std::sqrt(inputs);
      tally.compare(which, y.data(), product(x, w, rows, inputs, outputs), allowed);
      for (int i = 0; i < 64; i++) tally.require(y[size_t(rows) * outputs + i] == 7, which + ": wrote behind its end");
      Floats alone(outputs);
      head(1, rows - 1, 1, alone.data());
      bool same = !memcmp(alone.data(), &y[size_t(rows - 1) * outputs], outputs * sizeof(float));
      tally.require(same, which + ": the last row alone differs");
    }
  return tally.report(lib);
}

struct Asked {
  Heads heads;
  int window;
  double cap;
  std::vector<Sequence> sequences;  // start, tokens
};

static std::vector<Asked> steps() {
  const std::vector<Sequence> decodes{{0, 1}, {1, 1}, {15, 1}, {16, 1}, {90, 1}, {127, 1}, {128, 1}, {300, 1}};
  const std::vector<Sequence> mixed{{49, 1}, {20, 40}, {0, 33}, {60, 3}, {130, 4}}, prompts{{0, 100}, {33, 70}, {0, 5}};
  std::vector<Asked> all;
  for (int dim : {8, 16, 24, 40, 64, 72, 128}) all.push_back({{6, 2, dim, 16, 0.3}, 0, 0, mixed});
  const int ratios[][2] = {{1, 1}, {4, 4}, {9, 3}, {8, 1}, {16, 4}};
  for (auto [query, kv] : ratios) all.push_back({{query, kv, 32, 16, 0.3}, 0, 0, mixed});
  const std::pair<int, double> reaches[] = {{0, 0}, {20, 0}, {1, 0}, {150, 0}, {0, 2}, {33, 1.5}};
  for (auto [window, cap] : reaches) {
    all.push_back({{6, 2, 24, 16, 0.3}, window, cap, decodes});
    all.push_back({{6, 2, 24, 64, 0.3}, window, cap, prompts});
  }
  return all;
}

static bool attention(const Library& lib, int kv_bytes) {
  Tally tally{kv_bytes == 4 ? "attention, fp32 KV" : "attention, bf16 KV"};
  Random random{2};
  for (const Asked& asked : steps()) {
    const Heads& s = asked.heads;
    Step step(lib, s, asked.sequences, kv_bytes, 1, random);
    size_t width = size_t(s.query) * s.dim;
    Doubles queries = random.numbers(step.rows * width, false), expected(step.rows * width);
    for (Sequence& sequence : step.sequences)
      for (int t = 0; t < sequence.tokens; t++) {
        step.put(sequence, 0, sequence.start + t);
        size_t at = (sequence.first_row + t) * width;
        attend(s, &queries[at], sequence.keys[0], sequence.values[0], sequence.start + t, asked.window, asked.cap, &expected[at]);
      }
    Floats from = floats_of(queries), one(from.size(), 7), two(from.size(), 7);
    lib.attend(step.plan, 1, kv_bytes, step.pages[0].data(), asked.window, float(asked.cap), from.data(), one.data());
    step.lay_out_for(2);
    lib.attend(step.plan, 2, kv_bytes, step.pages[0].data(), asked.window, float(asked.cap), from.data(), two.data());
    std::string which = std::to_string(s.query) + "/" + std::to_string(s.kv) + " heads of " + std::to_string(s.dim) +
                        ", window " + std::to_string(asked.window) + ", cap " + std::to_string(asked.cap);
    tally.compare(which, one.data(), expected, 5e-6);
    tally.require(one == two, which + ": two threads differ from one");
  }
  return tally.report(lib);
}

static int told = 0;

static bool whole_layers(const Library& lib, int kind, int kv_bytes) {
  std::string what = std::string("layers, ") + KINDS[kind] + " weights, " + (kv_bytes == 4 ? "fp32" : "bf16") + " KV";
  Tally tally{what.c_str()};
  Random random{3};
  const int LAYERS = 2, sizes[][2] = {{48, 90}, {70, 32}, {96, 200}};  // hidden, inner
  for (auto [hidden, inner] : sizes)
    for (bool extras : {false, true})
      for (const std::vector<Sequence>& sequences :
           {std::vector<Sequence>{{40, 1}}, {{5, 1}, {150, 1}, {0, 3}, {30, 1}}, {{0, 70}, {20, 30}, {99, 1}}}) {
        Heads s{6, 2, 16, 16, 0.25};
        Step step(lib, s, sequences, kv_bytes, LAYERS, random);
        Model model(lib, s, kind, hidden, inner, LAYERS, extras, random);
        Doubles x = random.numbers(size_t(step.rows) * hidden, false);
        Floats one = floats_of(x), two = one;
        std::string which = std::to_string(hidden) + " by " + std::to_string(inner) + ", " + std::to_string(step.rows) + " rows";
        told = 0;
        model.run(step, 1, one, [](int32_t layer) { told += layer == told ? 1 : 100; });
        tally.require(told == LAYERS, which + ": not told of each layer in turn");
        std::vector<Halves> pages = step.pages;
        model.run(step, 2, two, nullptr);
        tally.require(one == two, which + ": two threads differ from one");
        tally.require(pages == step.pages, which + ": two threads' pages differ from one's");
        model.expect(step, x);
        // A number that is close to the middle between two bf16 may be rounded to either.
        double allowed = kind == PAIRS ? 1e-2 : kv_bytes == 2 ? 2e-3 : 1e-5;
        tally.compare(which, one.data(), x, allowed);
        for (int layer = 0; layer < LAYERS; layer++) {
          Doubles expected;
          Floats got = step.written(layer, expected);
          tally.compare(which + ", its KV", got.data(), expected, kv_bytes == 2 || kind == PAIRS ? 1.2e-2 : 1e-5);
          tally.require(step.rest_is_untouched(layer), which + ": wrote into others' pages");
        }
      }
  return tally.report(lib);
}

static bool all_of(const Library& lib) {
  bool good = true;
  for (int kind = FLOATS; kind <= (lib.has_pairs() ? PAIRS : BF16); kind++) {
    if (kind == BF16 && lib.has_pairs()) continue;  // this build packs bf16 as pairs
    for (bool normed : {false, true}) good = products(lib, kind, normed) && good;
    for (int kv_bytes : {4, 2}) good = whole_layers(lib, kind, kv_bytes) && good;
  }
  for (int kv_bytes : {4, 2}) good = attention(lib, kv_bytes) && good;
  return good;
}

int main(int count, char** words) {
  bool good = true;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  for (int i = 1; i < count; i++) {
    if (!strcmp(words[i], "--spoil"))
      spoil = true;
    else
      good = all_of(Library(words[i])) && good;
  }
  printf("%s\n", good ? "ALL PASSED" : "SOME FAILED");
  if (getpid() == 1) sleep(1), reboot(RB_POWER_OFF);
  return good ? 0 : 1;
}
