// Matrix products with weights in float32, 16 bits, 8 or 4 bits; x and y in float32 or 16 bits. These 16 bits are a
// bfloat16, or with HALVES a float16, which is multiplied as a float32.
//
// An element of the result is summed in one order, whatever the number of rows, outputs or threads. The lanes of a
// register are inputs (`cpu_dense.h`), on AMX in bfloat16 those of its tiles (`cpu_by_tiles.h`). For codes they are rows
// of x, and a word of weights is broadcast to all of them: products of codes are summed as integers, so a draft may round
// x (`cpu_codes.h`).
//
// With ONLY it takes only weights of so many bits, and compiles in a third of the time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "cpu_by_tiles.h"
#include "cpu_codes.h"
#include "cpu_dense.h"
#include "cpu_words.h"
#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add this is slower than torch"
#endif

constexpr int SUMS = WIDEST == 32 ? 6 : 12;  // registers of sums of codes; others hold x and weights
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

#ifdef HAS_BYTES
// OUT outputs of a group of rows into `values`, of codes that begin at `codes`
template <Kind KIND, int OUT, int VECTORS, typename V>
static void outputs(const Matrix& w, const char* codes, const Packed& x, const Group& g, float (*values)[MOST_ROWS],
                    int64_t first) {
  V sums[OUT][VECTORS] = {};
  if constexpr (sizeof(V) < WIDEST)
    add_codes_of_few<KIND == CODES_8 ? 8 : 4, OUT>(w, codes, x, g, first, sums);
  else
    add_codes<KIND == CODES_8 ? 8 : 4, OUT>(w, codes, x, g, first, sums);
  for (int o = 0; o < OUT; ++o) std::memcpy(values[o], sums[o], sizeof sums[o]);
}

// Outputs first..end, a chunk
template <Kind KIND, int VECTORS, typename V>
static void rows(const Matrix& w, const char* codes, int64_t bytes, const Packed& x, const Group& g,
                 float (*values)[MOST_ROWS], int64_t first, int64_t end) {
  constexpr int OUT = SUMS / VECTORS, FEWER = OUT > 4 ? 4 : 1;
  for (; first + OUT <= end; first += OUT, codes += OUT * bytes, values += OUT)
    outputs<KIND, OUT, VECTORS, V>(w, codes, x, g, values, first);
  for (; first + FEWER <= end; first += FEWER, codes += FEWER * bytes, values += FEWER)
    outputs<KIND, FEWER, VECTORS, V>(w, codes, x, g, values, first);
  for (; first < end; ++first, codes += bytes, ++values)
    outputs<KIND, 1, VECTORS, V>(w, codes, x, g, values, first);
}

// Rounds the values of a chunk of outputs, with their biases, to y.
static void write(const Matrix& w, const Values& values, const Group& g, const Output& to, int64_t first, int64_t end) {
#ifdef __AVX512F__
  if (g.rows > 4) {
    for (int64_t o = 0; o < end - first; o += 16) {
      const int64_t count = std::min<int64_t>(16, end - first - o);
      Register<64>::Floats bias = {};
      for (int64_t i = 0; w.bias && i < count; ++i) bias[i] = to.bias(w, first + o + i);
      for (int64_t lane = 0; lane < g.rows; lane += 16) {
        Words lines[16];
        for (int64_t i = 0; i < 16; ++i) lines[i] = read<Words>(values[o + i] + lane);
        transpose(lines);
        const int64_t bytes = to.is_narrow ? 2 * count : 4 * count;
        for (int64_t m = 0; m < std::min<int64_t>(16, g.rows - lane); ++m) {
          const auto value = (Register<64>::Floats)lines[m] + bias;
          void* at = to.after(g.first + lane + m, first + o).y;
#ifdef HALVES
          const auto narrow = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#else
          const Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
          const auto narrow = __builtin_convertvector(value == value ? rounded : bits >> 16 | 64, Halves);
#endif
          if (count < 16)
            std::memcpy(at, to.is_narrow ? (const void*)&narrow : &value, bytes);
          else if (to.is_narrow)
            std::memcpy(at, &narrow, sizeof narrow);
          else
            std::memcpy(at, &value, sizeof value);
        }
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
static void by_words(const Matrix& w, const Packed& x, int64_t row, int64_t last, const Output& to, int64_t first,
                     int64_t end) {
  const int64_t bytes = w.in * w.bits / 8;
  const char* codes = (const char*)w.weights + first * bytes;
  for (int64_t m = row; m < last; m += MOST_ROWS) {
    const Group g = group_at(m, last);
    alignas(64) Values values;
    const auto go = [&](auto run) {
      run(w, codes, bytes, x, g, values, first, end);
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

#else
// The weights of outputs first..end, which are codes, as float32
static const float* unpacked(const Matrix& w, int64_t first, int64_t end, std::vector<float>& scratch) {
  scratch.resize((end - first) * w.in);
  float* to = scratch.data();
  for (int64_t o = first; o < end; ++o, to += w.in) {
    const int8_t* codes = (const int8_t*)w.weights + o * w.in;
    if (w.bits == 8)
      for (int64_t i = 0; i < w.in; ++i) to[i] = w.scales[o] * codes[i];
    for (int64_t i = 0; w.bits == 4 && i < w.in; i += 64) {
      const uint16_t* words = (const uint16_t*)w.weights + (o * w.in + i) / 4;
      const int64_t part = (o * w.in + i) / w.group;
      for (int64_t j = 0; j < 64; ++j)
        to[i + j] = w.scales[part] * ((words[j % 16] >> j / 16 * 4 & 15) - w.zeros[part]);
    }
  }
  return scratch.data();
}
#endif

// Outputs first..end of the rows from `row` to `last`. x: as they lie, in float32 if they are read so.
static void chunk(const Matrix& w, const void* x, int64_t x_stride, const Packed& packed, int64_t row, int64_t last,
                  const Output& to, int64_t first, int64_t end) {
  [[maybe_unused]] const auto dense = [&](auto kind, const void* weights) {
    typedef decltype(kind) KIND;
    const auto* of_rows = (const typename KIND::X*)x + row * x_stride;
    by_inputs<KIND>(w, weights, of_rows, x_stride, last - row, to.after(row, 0), first, end);
  };
  [[maybe_unused]] const auto at = [&](int64_t bytes) { return (const char*)w.weights + first * w.in * bytes; };
  switch (w.bits) {
#if !ONLY || ONLY == 32
    case 32: return dense(Singles<float>(), at(4));
#endif
#if !ONLY || ONLY == 16
    case 16: return dense(Dense16(), at(2));
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 8)
    case 8: return by_words<CODES_8>(w, packed, row, last, to, first, end);
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 4)
    case 4: return by_words<CODES_4>(w, packed, row, last, to, first, end);
#endif
  }
#if !defined(HAS_BYTES) && ONLY < 16
  static thread_local std::vector<float> scratch;
  dense(Singles<float>(), unpacked(w, first, end, scratch));
#endif
}

// `count` outputs from `first` on, up to COLUMNS, of weights that lie [in, out]: lanes are outputs
template <typename NUMBER, int ROWS>
static void by_column(const Matrix& w, const float* x, int64_t x_stride, const Output& to, int64_t first,
                      int64_t count) {
  typedef Register<WIDEST>::Floats Floats;
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

// Whether rows of x are packed by lanes, as codes
static bool is_packed(const Matrix& w) {
#ifdef HAS_BYTES
  return w.bits < 16 && !w.is_transposed;
#endif
  return false;
}

static bool is_read_wide(const Product& p) {
  bool is_wide = false;
  for (int64_t n = 0; n < p.number; ++n)
    is_wide = is_wide || p.matrices[n].is_transposed || p.matrices[n].bits != 16 || !READS_NARROW;
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
    if (is_packed(w)) memory.buffers[kind_of(w)].grow(w, p->count);
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
    if (!is_packed(w) || has[kind]) continue;
    has[kind] = true;
#pragma omp for schedule(static) nowait
    for (int64_t group = 0; group < groups; ++group)
      pack_codes(memory.buffers[kind].packed(w), kind, inputs, input_stride, group_at(group * MOST_ROWS, p.count));
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
        const bool reads_narrow = READS_NARROW && p.is_narrow && w.bits == 16;
        if (w.is_transposed)
          by_columns(w, inputs + row * input_stride, input_stride, last - row, to.after(row, 0), at.first, at.end);
        else
          chunk(w, reads_narrow ? p.x : inputs, reads_narrow ? p.x_stride : input_stride,
                memory.buffers[kind_of(w)].packed(w), row, last, to, at.first, at.end);
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
