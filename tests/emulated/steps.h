// Sequences in KV pages, packed weights for the kernels, and small models.
#pragma once

#include "library.h"
#include "reference.h"

// Weights packed into panels.
struct Packed {
  Floats room;  // holds floats or bf16

  Packed(const Library& lib, int kind, const Doubles& w, int outputs, int inputs)
      : room(size_t(lib.whole(outputs)) * inputs + 16) {
    Floats floats = floats_of(w);
    Halves halves;
    for (float x : floats) halves.push_back(bits_of(x));
    const void* from = kind == FLOATS ? static_cast<const void*>(floats.data()) : halves.data();
    lib.pack(2, kind, from, outputs, inputs, room.data());
  }

  const void* data() const { return room.data(); }
};

struct Sequence {
  int start, tokens;
  int first_row = 0;
  std::vector<int> pages = {};
  std::vector<Doubles> keys = {}, values = {};  // of each layer: [positions][kv heads][dim]
};

// The sequences of one step, and their KV pages. The pages hold garbage wherever there is no row of a sequence.
struct Step {
  const Library& lib;
  Heads heads;
  int kv_bytes, rows = 0;
  void* plan;
  std::vector<Sequence> sequences;
  std::vector<Halves> pages, before;  // of each layer, as 16-bit words for either type
  std::vector<int64_t> slots;
  std::vector<int32_t> spans, table;  // the arguments of plan_set

  Step(const Library& lib, const Heads& heads, const std::vector<Sequence>& which, int kv_bytes, int layers, Random& random)
      : lib(lib), heads(heads), kv_bytes(kv_bytes), sequences(which) {
    int block = heads.block_tokens, total = 3;
    for (const Sequence& s : sequences) total += (s.start + s.tokens + block - 1) / block;
    std::vector<int> free;
    for (int p = 0; p < total; p++) free.insert(free.begin() + int(random.uniform() * (p + 1)), p);
    float garbage = 1e3f;
    Halves one{bits_of(garbage)};
    if (kv_bytes == 4) one.resize(2), memcpy(one.data(), &garbage, 4);
    Halves fresh;
    for (size_t i = 0; i < size_t(total) * 2 * block * width(); i++) fresh.insert(fresh.end(), one.begin(), one.end());
    pages.assign(layers, fresh);
    for (Sequence& s : sequences) {
      s.first_row = rows;
      rows += s.tokens;
      spans.insert(spans.end(), {s.start, s.tokens, s.first_row, int(table.size())});
      for (int p = 0; p < s.start + s.tokens; p += block) s.pages.push_back(free.back()), free.pop_back();
      table.insert(table.end(), s.pages.begin(), s.pages.end());
      for (int t = s.start; t < s.start + s.tokens; t++)
        slots.push_back(int64_t(s.pages[t / block]) * 2 * block + t % block);
      for (int layer = 0; layer < layers; layer++) {
        s.keys.push_back(random.numbers(size_t(s.start + s.tokens) * width(), kv_bytes == 2));
        s.values.push_back(random.numbers(size_t(s.start + s.tokens) * width(), kv_bytes == 2));
        for (int t = 0; t < s.start; t++) put(s, layer, t);
      }
    }
    before = pages;
    plan = lib.plan_new(heads.query, heads.kv, heads.dim, block, float(heads.scale));
    lay_out_for(1);
  }

  // Sets the plan for this number of threads.
  void lay_out_for(int threads) {
    lib.plan_set(plan, threads, spans.data(), int(sequences.size()), table.data(), int(table.size()));
  }

  Step(const Step&) = delete;
  ~Step() { lib.plan_free(plan); }

  size_t width() const { return size_t(heads.kv) * heads.dim; }

  // Writes a position's keys and values into its page.
  void put(const Sequence& s, int layer, int position) {
    for (size_t i = 0; i < width(); i++)
      for (bool value : {false, true}) {
        float x = float((value ? s.values : s.keys)[layer][position * width() + i]);
        uint16_t bits = bits_of(x);
        memcpy(place(pages[layer], s, position, value, i), kv_bytes == 4 ? static_cast<void*>(&x) : &bits, kv_bytes);
      }
  }

  // Returns the KV that is in the pages for the step's rows. Appends the KV of the sequences, which it should equal, to
  // `expected`.
  Floats written(int layer, Doubles& expected) {
    Floats got;
    for (const Sequence& s : sequences)
      for (int t = s.start; t < s.start + s.tokens; t++)
        for (size_t i = 0; i < width(); i++)
          for (bool value : {false, true}) {
            float x;
            uint16_t bits;
            const uint16_t* from = place(pages[layer], s, t, value, i);
            memcpy(&x, from, kv_bytes == 4 ? 4 : 2), memcpy(&bits, from, 2);
            got.push_back(kv_bytes == 4 ? x : of_bits(bits));
            expected.push_back((value ? s.values : s.keys)[layer][t * width() + i]);
          }
    return got;
  }

  bool rest_is_untouched(int layer) {
    Halves now = pages[layer];
    for (const Sequence& s : sequences)
      for (int t = s.start; t < s.start + s.tokens; t++)
        for (size_t i = 0; i < width(); i++)
          for (bool value : {false, true})
            memcpy(place(now, s, t, value, i), place(before[layer], s, t, value, i), kv_bytes);
    return now == before[layer];
  }

 private:
  uint16_t* place(Halves& in, const Sequence& s, int position, bool value, size_t i) const {
    int block = heads.block_tokens;
    size_t row = (size_t(s.pages[position / block]) * 2 + value) * block + position % block;
    return &in[(row * width() + i) * (kv_bytes / 2)];
  }
};

// Layers of Llama's block with random weights. If `extras` is set, they have biases, and norms of queries and keys.
struct Model {
  struct Weights {
    Doubles qkv, out, gate, up, down, attention_norm, mlp_norm, bias, query_norm, key_norm;
  };

  const Library& lib;
  Heads heads;
  int kind, hidden, inner;
  bool extras;
  std::vector<Weights> weights;
  std::vector<Layer> layers;
  Doubles cosines, sines;

  Model(const Library& lib, const Heads& heads, int kind, int hidden, int inner, int count, bool extras, Random& random)
      : lib(lib), heads(heads), kind(kind), hidden(hidden), inner(inner), extras(extras), random_(random) {
    for (int i = 0; i < count; i++) {
      Weights w;
      bool narrow = kind != FLOATS;
      auto some = [&](int outputs, int inputs) { return random.numbers(size_t(outputs) * inputs, narrow, 1 / std::sqrt(inputs)); };
      w.qkv = some(all(), hidden), w.out = some(hidden, q()), w.gate = some(inner, hidden), w.up = some(inner, hidden);
      w.down = some(hidden, inner);
      for (Doubles* norm : {&w.attention_norm, &w.mlp_norm}) *norm = random.numbers(hidden, false);
      w.bias = random.numbers(all(), false);
      for (Doubles* norm : {&w.query_norm, &w.key_norm}) *norm = random.numbers(heads.dim, false);
      weights.push_back(w);
      layers.push_back(packed(w));
    }
  }

  Model(const Model&) = delete;

  // Computes the step by the kernels, on x in place.
  void run(Step& step, int threads, Floats& x, AfterLayer after) {
    int rows = step.rows, half = heads.dim / 2, wide = lib.whole(inner);
    if (cosines.empty())
      for (int i = 0; i < rows * half; i++) {
        double angle = random_.uniform() * 6.28;
        cosines.push_back(float(std::cos(angle))), sines.push_back(float(std::sin(angle)));
      }
    Floats c = floats_of(cosines), s = floats_of(sines);
    Floats inputs(rows * hidden), attended(rows * q()), activated(rows * wide), qkv(rows * all()), queries(rows * q());
    Floats outputs(rows * q()), gate_up(rows * 2 * wide);
    Space space{inputs.data(), attended.data(), activated.data(), qkv.data(), queries.data(), outputs.data(), gate_up.data()};
    Places places{c.data(), s.data(), step.slots.data()};
    for (size_t i = 0; i < layers.size(); i++) layers[i].pages = step.pages[i].data();
    step.lay_out_for(threads);
    lib.layers(step.plan, threads, layers.data(), int(layers.size()), &space, rows, x.data(), &places, step.kv_bytes, after);
  }

  // Computes the step by plain loops, on x in place. Also sets the sequences' keys and values.
  void expect(Step& step, Doubles& x) const {
    for (size_t i = 0; i < weights.size(); i++) {
      const Weights& w = weights[i];
      Doubles qkv = product(normed(x, w.attention_norm), w.qkv, step.rows, hidden, all());
      Doubles outputs(size_t(step.rows) * q());
      for (Sequence& s : step.sequences)
        for (int t = 0; t < s.tokens; t++) finish(step, s, int(i), t, &qkv[size_t(s.first_row + t) * all()], &outputs);
      add(x, product(narrowed(outputs), w.out, step.rows, q(), hidden));
      Doubles inputs = normed(x, w.mlp_norm);
      Doubles gate = product(inputs, w.gate, step.rows, hidden, inner), up = product(inputs, w.up, step.rows, hidden, inner);
      for (size_t j = 0; j < gate.size(); j++) gate[j] = gate[j] / (1 + std::exp(-gate[j])) * up[j];
      add(x, product(narrowed(gate), w.down, step.rows, inner, hidden));
    }
  }

 private:
  Random& random_;
  std::vector<Packed> packed_;
  std::vector<Floats> kept_;

  int q() const { return heads.query * heads.dim; }
  int all() const { return q() + 2 * heads.kv * heads.dim; }
  static int window_of(int layer) { return layer % 2 ? 24 : 0; }

  Layer packed(const Weights& w) {
    int panel = lib.panel(), wide = lib.whole(inner);
    Doubles turns(size_t(2) * wide * hidden), down(size_t(hidden) * wide);
    for (int o = 0; o < inner; o++)
      for (int k = 0; k < hidden; k++) {
        size_t at = size_t(o / panel * 2 * panel + o % panel) * hidden + k;
        turns[at] = w.gate[size_t(o) * hidden + k], turns[at + size_t(panel) * hidden] = w.up[size_t(o) * hidden + k];
        down[size_t(k) * wide + o] = w.down[size_t(k) * inner + o];
      }
    Layer layer{};
    layer.kind = kind, layer.hidden = hidden, layer.inner = wide, layer.epsilon = 1e-5f;
    layer.window = window_of(int(layers.size()));
    layer.qkv = kept(w.qkv, all(), hidden), layer.out = kept(w.out, hidden, q());
    layer.gate_up = kept(turns, 2 * wide, hidden), layer.down = kept(down, hidden, wide);
    layer.attention_norm = kept(w.attention_norm), layer.mlp_norm = kept(w.mlp_norm);
    if (extras) layer.qkv_bias = kept(w.bias), layer.query_norm = kept(w.query_norm), layer.key_norm = kept(w.key_norm);
    return layer;
  }

  const void* kept(const Doubles& w, int outputs, int inputs) {
    packed_.emplace_back(lib, kind, w, outputs, inputs);
    return packed_.back().data();
  }

  const float* kept(const Doubles& w) {
    kept_.push_back(floats_of(w));
    return kept_.back().data();
  }

  // Rounds the inputs of a product to bf16 if the kind is PAIRS, as the kernels do.
  Doubles narrowed(Doubles x) const {
    for (double& v : x) v = kind == PAIRS ? held(v, true) : v;
    return x;
  }

  Doubles normed(Doubles x, const Doubles& weight) const {
    for (size_t r = 0; r < x.size(); r += hidden) norm(&x[r], weight.data(), 1e-5f, hidden);
    return narrowed(x);
  }

  static void add(Doubles& x, const Doubles& more) {
    for (size_t i = 0; i < x.size(); i++) x[i] += more[i];
  }

  // One row, from its QKV product to its attention output.
  void finish(Step& step, Sequence& s, int layer, int token, double* qkv, Doubles* outputs) const {
    const Weights& w = weights[layer];
    int dim = heads.dim, row = s.first_row + token, position = s.start + token;
    for (int i = 0; extras && i < all(); i++) qkv[i] += w.bias[i];
    for (int h = 0; h < heads.query + heads.kv; h++) {
      if (extras) norm(qkv + h * dim, (h < heads.query ? w.query_norm : w.key_norm).data(), 1e-5f, dim);
      rotate(qkv + h * dim, &cosines[size_t(row) * (dim / 2)], &sines[size_t(row) * (dim / 2)], dim);
    }
    for (size_t i = 0; i < step.width(); i++) {
      s.keys[layer][position * step.width() + i] = held(qkv[q() + i], step.kv_bytes == 2);
      s.values[layer][position * step.width() + i] = held(qkv[q() + step.width() + i], step.kv_bytes == 2);
    }
    attend(heads, qkv, s.keys[layer], s.values[layer], position, window_of(layer), 0, &(*outputs)[size_t(row) * q()]);
  }
};
