// Matrix products with weights in float32, 16 bits, 8 or 4 bits; x and y in float32 or 16 bits. These 16 bits are a
// bfloat16, or with HALVES a float16, which is multiplied as a float32.
//
// The lanes of a register are rows of x, and a weight is broadcast to all of them; of few rows lanes are outputs, and x is
// broadcast (`cpu_few_rows.h`). Either way an element of the result is summed in one order, whatever the number of rows,
// threads or lanes: even and odd words of its inputs (`cpu_words.h`), each in turn, then both sums. Products of codes are
// summed as integers: a draft may round x. On AMX the order in bfloat16 is that of its tiles (`cpu_by_tiles.h`).
//
// With ONLY it takes only weights of so many bits, and compiles in a third of the time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "cpu_by_tiles.h"
#include "cpu_codes.h"
#include "cpu_few_rows.h"
#include "cpu_words.h"
#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add this is slower than torch"
#endif

constexpr int SUMS = WIDEST == 32 ? 6 : 12;  // registers of half of the sums; others hold the second half, x and weights
constexpr int64_t CHUNK = 48;                // outputs, whose weights stay in the L2 cache for the next rows
constexpr int64_t PART = 16;                 // words of x that a thread packs at once
constexpr int64_t PER_THREAD = 1 << 17;      // weights: with fewer, a second thread saves less than waking it takes
constexpr int64_t COLUMNS = WIDEST;          // outputs at once, of weights that lie transposed: four registers
constexpr int64_t ROWS_AHEAD = 8;            // prefetched, of weights that lie transposed
constexpr int64_t X_BYTES = 1 << 18;         // of rows of x at once, a part of the L2 cache
constexpr int64_t KEPT_BYTES = 1 << 25;      // of packed rows that stay in memory for the next call: those of steps
constexpr int64_t PIECE = 1 << 12;           // bytes of weights that a thread reads ahead before it looks whether it may go on
constexpr int64_t FETCHED = 1 << 18;         // bytes, at most: a part of the L2 cache of most CPUs
typedef float Values[CHUNK][MOST_ROWS];      // of a chunk: [output][lane]

// Sums of OUT outputs whose weights begin at `weights`, rows `bytes` long, for lanes of x; without scales
template <Kind KIND, int OUT, int VECTORS, typename V>
static inline __attribute__((always_inline)) void add_words(const char* weights, int64_t bytes, const uint32_t* x,
                                                            V (*sums)[VECTORS]) {
  constexpr int64_t LANES = sizeof(V) / 4;
  V totals[2][OUT][VECTORS] = {};  // of even and of odd words
  const auto add = [&](int64_t k, int which, auto word) __attribute__((always_inline)) {
    V inputs[VECTORS];
    for (int v = 0; v < VECTORS; ++v) inputs[v] = in_register(read<V>(x + (k * VECTORS + v) * LANES));
    for (int o = 0; o < OUT; ++o) {
      const uint32_t of_output = word(weights + o * bytes + 4 * k);
      for (int v = 0; v < VECTORS; ++v) totals[which][o][v] = plus<KIND>(totals[which][o][v], inputs[v], of_output);
    }
  };
  const auto word = [](const char* from) __attribute__((always_inline)) { return read<uint32_t>(from); };
  const int64_t words = bytes / 4;
  const char* next = weights + OUT * bytes;
  int64_t k = 0;
  for (; k + 2 <= words; k += 2) {
    if (k % 16 == 0)
      for (int o = 0; o < OUT; ++o) __builtin_prefetch(next + 4 * k * OUT + 64 * o);
    add(k, 0, word);
    add(k + 1, 1, word);
  }
  if (k < words) add(k, 0, word);
  const auto half = [](const char* from) __attribute__((always_inline)) { return (uint32_t)read<uint16_t>(from); };
  if (bytes % 4 && k == words) add(words, 0, half);  // beyond it are numbers of another row
  if (bytes % 4 && k != words) add(words, 1, half);
  for (int o = 0; o < OUT; ++o)
    for (int v = 0; v < VECTORS; ++v) sums[o][v] = totals[0][o][v] + totals[1][o][v];
}

// OUT outputs of a group of rows into `values`; `weights` of the first, of another matrix than `w` if they were unpacked
template <Kind KIND, int OUT, int VECTORS, typename V>
static void outputs(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, const Group& g,
                    float (*values)[MOST_ROWS], int64_t first) {
  V sums[OUT][VECTORS] = {};
  if constexpr (KIND == SINGLES || KIND == PAIRS)
    add_words<KIND, OUT>(weights, bytes, x.at(g), sums);
#ifdef HAS_BYTES
  else if constexpr (sizeof(V) < WIDEST)
    add_codes_of_few<KIND == CODES_8 ? 8 : 4, OUT>(w, weights, x, g, first, sums);
  else
    add_codes<KIND == CODES_8 ? 8 : 4, OUT>(w, weights, x, g, first, sums);
#endif
  for (int o = 0; o < OUT; ++o) std::memcpy(values[o], sums[o], sizeof sums[o]);
}

// Outputs first..end, a chunk
template <Kind KIND, int VECTORS, typename V>
static void rows(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, const Group& g,
                 float (*values)[MOST_ROWS], int64_t first, int64_t end) {
  constexpr int OUT = SUMS / VECTORS, FEWER = OUT > 4 ? 4 : 1;
  for (; first + OUT <= end; first += OUT, weights += OUT * bytes, values += OUT)
    outputs<KIND, OUT, VECTORS, V>(w, weights, bytes, x, g, values, first);
  for (; first + FEWER <= end; first += FEWER, weights += FEWER * bytes, values += FEWER)
    outputs<KIND, FEWER, VECTORS, V>(w, weights, bytes, x, g, values, first);
  for (; first < end; ++first, weights += bytes, ++values)
    outputs<KIND, 1, VECTORS, V>(w, weights, bytes, x, g, values, first);
}

// Rounds the values of a chunk of outputs, with their biases, to y.
static void write(const Matrix& w, const Values& values, const Group& g, const Output& to, int64_t first, int64_t end) {
#ifdef __AVX512F__
  if (g.rows > 4) {
    for (int64_t o = 0; o < end - first; o += 16) {
      const int64_t count = std::min<int64_t>(16, end - first - o);
      Floats bias = {};
      for (int64_t i = 0; w.bias && i < count; ++i) bias[i] = to.bias(w, first + o + i);
      for (int64_t lane = 0; lane < g.rows; lane += 16) {
        Words lines[16];
        for (int64_t i = 0; i < 16; ++i) lines[i] = read<Words>(values[o + i] + lane);
        transpose(lines);
        for (int64_t m = 0; m < std::min<int64_t>(16, g.rows - lane); ++m)
          store(to, g.first + lane + m, first + o, count, (Floats)lines[m] + bias);
      }
    }
    return;
  }
#endif
  for (int64_t o = 0; o < end - first; ++o) {
    const float bias = to.bias(w, first + o);
    for (int64_t m = 0; m < g.rows; ++m) to.set(g.first + m, first + o, values[o][m] + bias);
  }
}

// Outputs first..end of the rows from `row` to `last`
template <Kind KIND>
static void by_words(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, int64_t row, int64_t last,
                     const Output& to, int64_t first, int64_t end) {
  for (int64_t m = row; m < last; m += MOST_ROWS) {
    const Group g = group_at(m, last);
    if constexpr (WIDEST > 16 && KIND == PAIRS) {
      if (g.rows <= FEW) {
        by_outputs<PAIRS, uint32_t>(w, weights, bytes, x, g, to, first, end);
        continue;
      }
    }
    alignas(64) Values values;
    const auto go = [&](auto run) {
      run(w, weights, bytes, x, g, values, first, end);
      write(w, values, g, to, first, end);
    };
    constexpr int64_t WIDE = WIDEST / 4;
    if (g.lanes == 4)
      go(rows<KIND, 1, Register<16>::Floats>);
    else if (WIDE == 16 && g.lanes == 8)
      go(rows<KIND, 1, Register<WIDEST == 64 ? 32 : WIDEST>::Floats>);
    else if (g.lanes == WIDE)
      go(rows<KIND, 1, Register<WIDEST>::Floats>);
    else if (g.lanes == 2 * WIDE)
      go(rows<KIND, 2, Register<WIDEST>::Floats>);
    else
      go(rows<KIND, MOST_VECTORS, Register<WIDEST>::Floats>);
  }
}

#if !defined(HAS_BYTES) || defined(HALVES)
// The weights of outputs first..end as float32, in `scratch`
static const char* unpacked(const Matrix& w, int64_t first, int64_t end, std::vector<float>& scratch) {
  scratch.resize((end - first) * w.in);
  float* to = scratch.data();
  for (int64_t o = first; o < end; ++o, to += w.in) {
    const int8_t* codes = (const int8_t*)w.weights + o * w.in;
#ifdef HALVES
    if (w.bits == 16) {
      const _Float16* numbers = (const _Float16*)w.weights + o * w.in;
      int64_t i = 0;
      for (; i + SIDE <= w.in; i += SIDE) {
        const Floats words = words_at<_Float16>(numbers + i);
        std::memcpy(to + i, &words, sizeof words);
      }
      for (; i < w.in; ++i) to[i] = numbers[i];
    }
#endif
    if (w.bits == 8)
      for (int64_t i = 0; i < w.in; ++i) to[i] = w.scales[o] * codes[i];
    for (int64_t i = 0; w.bits == 4 && i < w.in; i += 64) {
      const uint16_t* words = (const uint16_t*)w.weights + (o * w.in + i) / 4;
      const int64_t part = (o * w.in + i) / w.group;
      for (int64_t j = 0; j < 64; ++j)
        to[i + j] = w.scales[part] * ((words[j % 16] >> j / 16 * 4 & 15) - w.zeros[part]);
    }
  }
  return (const char*)scratch.data();
}
#endif

static void chunk(const Matrix& w, Kind kind, const Packed& x, int64_t row, int64_t last, const Output& to,
                  int64_t first, int64_t end) {
  [[maybe_unused]] const char* weights = (const char*)w.weights + first * w.in * w.bits / 8;
  switch (kind) {
#if !defined(HALVES) && (!ONLY || ONLY == 16)
    case PAIRS: return by_words<PAIRS>(w, weights, 2 * w.in, x, row, last, to, first, end);
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 8)
    case CODES_8: return by_words<CODES_8>(w, weights, w.in, x, row, last, to, first, end);
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 4)
    case CODES_4: return by_words<CODES_4>(w, weights, w.in / 2, x, row, last, to, first, end);
#endif
#if !ONLY || ONLY == 32
    case SINGLES:
      if (w.bits == 32) return by_words<SINGLES>(w, weights, 4 * w.in, x, row, last, to, first, end);
#endif
    default: break;
  }
#if !defined(HAS_BYTES) || defined(HALVES)
#ifdef HALVES
  if (w.bits == 16 && last - row <= FEW)
    return by_outputs<SINGLES, _Float16>(w, weights, 2 * w.in, x, group_at(row, last), to, first, end);
#endif
  static thread_local std::vector<float> scratch;
  by_words<SINGLES>(w, unpacked(w, first, end, scratch), 4 * w.in, x, row, last, to, first, end);
#endif
}

// `count` outputs from `first` on, up to COLUMNS, of weights that lie [in, out]: lanes are outputs
template <typename NUMBER, int ROWS>
static void by_column(const Matrix& w, const float* x, int64_t x_stride, const Output& to, int64_t first,
                      int64_t count) {
  constexpr int64_t LANES = WIDEST / 4, VECTORS = COLUMNS / LANES;
  const NUMBER* at = (const NUMBER*)w.weights + first;
  Floats sums[VECTORS][ROWS] = {};
  for (int64_t k = 0; k < w.in; ++k, at += w.out)
    for (int v = 0; v < VECTORS && v * LANES < count; ++v) {
      __builtin_prefetch(at + v * LANES + ROWS_AHEAD * w.out);
      float weights[LANES] = {};
      if (count - v * LANES >= LANES)
        for (int64_t l = 0; l < LANES; ++l) weights[l] = at[v * LANES + l];
      else
        for (int64_t l = 0; l < count - v * LANES; ++l) weights[l] = at[v * LANES + l];
      for (int m = 0; m < ROWS; ++m)
        sums[v][m] = fused(read<Floats>(weights), all_of<Floats>(x[m * x_stride + k]), sums[v][m]);
    }
  for (int64_t o = 0; o < count; ++o)
    for (int m = 0; m < ROWS; ++m) to.set(m, first + o, sums[o / LANES][m][o % LANES] + to.bias(w, first + o));
}

static void by_columns(const Matrix& w, const float* x, int64_t x_stride, int64_t count, const Output& to,
                       int64_t first, int64_t end) {
  for (; first < end; first += COLUMNS)
    for (int64_t m = 0; m < count; m += 4) {
      constexpr decltype(&by_column<float, 1>) singles[] = {by_column<float, 1>, by_column<float, 2>,
                                                            by_column<float, 3>, by_column<float, 4>};
      constexpr decltype(&by_column<float, 1>) narrow[] = {by_column<Narrow, 1>, by_column<Narrow, 2>,
                                                           by_column<Narrow, 3>, by_column<Narrow, 4>};
      const int64_t several = std::min<int64_t>(4, count - m) - 1;
      (w.bits == 16 ? narrow : singles)[several](w, x + m * x_stride, x_stride, to.after(m, 0), first,
                                                 std::min(COLUMNS, end - first));
    }
}

// A number in a cache line of its own
struct alignas(64) Counter {
  int64_t taken;
};

// What threads of a product share
struct Memory {
  Buffers buffers[KINDS];
  std::vector<float> wide;       // x [count, in], for what reads none of 16 bits
  std::vector<uint32_t> tiles;   // x, of AMX
  std::vector<Counter> counters;  // [block of rows][thread]: chunks of its share that are taken
};

static bool is_read_wide(const Product& p) {
  bool is_wide = false;
  for (int64_t n = 0; n < p.number; ++n)
    is_wide = is_wide || p.matrices[n].is_transposed || kind_of(p.matrices[n]) != PAIRS;
  return p.is_narrow && is_wide;
}

static int64_t block_of_rows(const Product& p) {
  return std::max(MOST_ROWS, X_BYTES / (p.matrices->in * 4) / MOST_ROWS * MOST_ROWS);
}

static int64_t counters_of(const Product& p) {
  return (p.count + block_of_rows(p) - 1) / block_of_rows(p) * p.threads;
}

// Outputs of a chunk
static int64_t size_of(const Matrix& w, const Product& p) {
  return w.is_transposed ? COLUMNS : w.out < 4 * p.threads * CHUNK ? CHUNK / 2 : CHUNK;
}

// Chunks of a matrix, but for its outputs that tile registers compute
static int64_t chunks_of(const Matrix& w, const Product& p) {
  const int64_t out = by_tile_registers(p) ? w.out % TILE : w.out, size = size_of(w, p);
  return (out + size - 1) / size;
}

struct Place {
  const Matrix* matrix;
  int64_t column, first, end;  // the matrix's first column of y; outputs
};

// The place of chunk `i` of all
static Place place_of(const Product& p, int64_t i) {
  const Matrix* w = p.matrices;
  int64_t column = 0, chunks;
  for (; i >= (chunks = chunks_of(*w, p)); ++w) {
    i -= chunks;
    column += w->out;
  }
  const int64_t size = size_of(*w, p), first = (by_tile_registers(p) ? w->out / TILE * TILE : 0) + i * size;
  return {w, column, first, std::min(w->out, first + size)};
}

static int64_t all_chunks(const Product& p) {
  int64_t chunks = 0;
  for (int64_t n = 0; n < p.number; ++n) chunks += chunks_of(p.matrices[n], p);
  return chunks;
}

static void prepare(Product* p) {
  static thread_local Memory memory;  // which stays
  p->memory = &memory;
  const int64_t in = p->matrices->in;
  for (int64_t n = 0; n < p->number; ++n) {
    const Matrix& w = p->matrices[n];
    const Kind kind = kind_of(w);
    if (!w.is_transposed && chunks_of(w, *p)) memory.buffers[kind].grow(kind, w, p->count);
  }
  const auto grow = [](auto& of, int64_t size) { of.resize(std::max<int64_t>(of.size(), size)); };
  if (is_read_wide(*p)) grow(memory.wide, p->count * in);
  if (by_tile_registers(*p)) grow(memory.tiles, (std::min(p->count, rows_of_tiles(*p)) + TILE) * in / 2);
  grow(memory.counters, counters_of(*p));
}

static void pack(const Product& p) {
  Memory& memory = *(Memory*)p.memory;
  const int64_t in = p.matrices->in, stride = p.x_stride, groups = (p.count + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t i = 0; !omp_get_thread_num() && i < counters_of(p); ++i) memory.counters[i].taken = 0;
  if (is_read_wide(p)) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < p.count; ++m)
      for (int64_t k = 0; k < in; ++k) memory.wide[m * in + k] = ((const Narrow*)p.x)[m * stride + k];
  }
  const float* inputs = p.is_narrow ? memory.wide.data() : (const float*)p.x;
  const int64_t input_stride = p.is_narrow ? in : stride;
  bool has[KINDS] = {};
  for (int64_t n = 0; n < p.number; ++n) {
    const Matrix& w = p.matrices[n];
    const Kind kind = kind_of(w);
    if (w.is_transposed || !chunks_of(w, p) || has[kind]) continue;
    has[kind] = true;
    const Packed to = memory.buffers[kind].packed(kind, w);
    if (kind >= CODES_8) {
#pragma omp for schedule(static) nowait
      for (int64_t group = 0; group < groups; ++group)
        pack_codes(to, kind, inputs, input_stride, group_at(group * MOST_ROWS, p.count));
      continue;
    }
    const int64_t parts = (to.words + PART - 1) / PART;
    const char* from = kind == PAIRS ? (const char*)p.x : (const char*)inputs;
    const int64_t bytes = kind == PAIRS ? 2 * stride : 4 * input_stride;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < groups * parts; ++i) {
      const Group g = group_at(i / parts * MOST_ROWS, p.count);
      const int64_t k = i % parts * PART, end = std::min(k + PART, to.words);
      spread(g, to.bytes, k, end, to.at(g), [&](int64_t row) { return from + (g.first + row) * bytes; });
    }
  }
}

// Each thread computes its share of the chunks, then what is left of others': some have more of their weights in a cache.
static void run(const Product& p) {
  Memory& memory = *(Memory*)p.memory;
#ifdef __AMX_BF16__
  if (by_tile_registers(p)) run_tiles(p, memory.tiles.data());
#endif
  const float* inputs = p.is_narrow ? memory.wide.data() : (const float*)p.x;
  const int64_t input_stride = p.is_narrow ? p.matrices->in : p.x_stride, chunks = all_chunks(p);
  const int64_t block = block_of_rows(p), team = omp_get_num_threads(), self = omp_get_thread_num();
  for (int64_t row = 0; row < p.count; row += block) {
    const int64_t last = std::min(p.count, row + block);
    for (int64_t turn = 0; turn < team; ++turn) {
      const int64_t of = (self + turn) % team, end = chunks * (of + 1) / team;
      int64_t& taken = memory.counters[row / block * team + of].taken;
      for (int64_t i; (i = chunks * of / team + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < end;) {
        const Place at = place_of(p, i);
        const Matrix w = *at.matrix;
        const Output to = Output{p.y, p.y_stride, (bool)p.is_narrow}.after(0, at.column);
        const Kind kind = kind_of(w);
        if (w.is_transposed)
          by_columns(w, inputs + row * input_stride, input_stride, last - row, to.after(row, 0), at.first, at.end);
        else
          chunk(w, kind, memory.buffers[kind].packed(kind, w), row, last, to, at.first, at.end);
      }
    }
  }
}

// Weights that tile registers multiply are not read ahead.
static bool fetch(const Product& p, int64_t piece) {
  const int64_t chunks = all_chunks(p);
  if (!chunks || (piece + 1) * PIECE > FETCHED) return false;
  const Place at = place_of(p, chunks * omp_get_thread_num() / omp_get_num_threads());
  const Matrix& w = *at.matrix;
  const int64_t row = w.in * w.bits / 8;
  if (w.is_transposed || (piece + 1) * PIECE > (w.out - at.first) * row) return false;
  const char* from = (const char*)w.weights + at.first * row + piece * PIECE;
  for (int64_t line = 0; line < PIECE; line += 64) __builtin_prefetch(from + line, 0, 2);
  return true;
}

extern "C" const Products products;
const Products products = {prepare, pack, run, fetch};

// A product by threads of its own, `most_threads` at most. They are woken once for all matrices: that takes as long as
// 1e5 products.
extern "C" void multiply(const Matrix* matrices, int64_t number, const void* x, int64_t x_stride, int64_t count, void* y,
                         int64_t y_stride, int64_t most_threads, int64_t is_narrow) {
  if (!count) return;
  int64_t weights = 0;
  for (int64_t n = 0; n < number; ++n) weights += matrices[n].out * matrices->in;
  const int64_t threads = std::min(most_threads, 1 + weights / PER_THREAD);
  Product p = {matrices, number, x, x_stride, count, y, y_stride, is_narrow, threads};
  prepare(&p);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    pack(p);
#pragma omp barrier
    run(p);
  }
  Memory& memory = *(Memory*)p.memory;
  for (Buffers& each : memory.buffers)
    if ((int64_t)each.x.size() * 4 > KEPT_BYTES) each = {};
  if ((int64_t)memory.wide.size() * 4 > KEPT_BYTES) memory.wide = {};
}
