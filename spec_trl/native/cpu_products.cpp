// Matrix products with weights in float32, bfloat16, 8 or 4 bits; x and y in float32 or bfloat16.
//
// The lanes of a register are rows of x, and a weight is broadcast to all of them. So rows share every load of a weight,
// and an element of the result is summed in one order, whatever the number of rows, threads or lanes: even and odd words
// of its inputs (`cpu_words.h`), each in turn, then both sums. Products of codes are summed as integers: a draft may round
// x. On AMX the order in bfloat16 is that of its tiles (`cpu_by_tiles.h`).
//
// With ONLY it takes only weights of so many bits, and compiles in a third of the time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_by_tiles.h"
#include "cpu_codes.h"
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
constexpr int64_t PACKED_BYTES = 1 << 20;    // the same, of tiles
constexpr int64_t KEPT_BYTES = 1 << 24;      // of packed rows that stay in memory for the next call: those of steps
typedef float Values[CHUNK][MOST_ROWS];      // of a chunk: [output][lane]

// total + the products of a word of weights with words of x, of which a lane is a row
template <Kind KIND, typename V>
static inline __attribute__((always_inline)) V plus(V total, V x, uint32_t weights) {
  if constexpr (KIND == SINGLES) {
    return fused(all_of<V>(read<float>(&weights)), x, total);
  } else {
#ifdef __AVX512BF16__
    if constexpr (sizeof(V) == 64)
      return (V)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)_mm512_set1_epi32(weights));
    if constexpr (sizeof(V) == 32)
      return (V)_mm256_dpbf16_ps((__m256)total, (__m256bh)x, (__m256bh)_mm256_set1_epi32(weights));
    if constexpr (sizeof(V) == 16)
      return (V)_mm_dpbf16_ps((__m128)total, (__m128bh)x, (__m128bh)_mm_set1_epi32(weights));
#endif
    typedef typename Register<sizeof(V)>::Integers Integers;
    const Integers both = (int32_t)weights - Integers{}, upper = Integers{} + (int32_t)0xffff0000;
    total = fused((V)(both << 16), (V)((Integers)x << 16), total);
    return fused((V)(both & upper), (V)((Integers)x & upper), total);
  }
}

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
          const Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
          const auto narrow = __builtin_convertvector(value == value ? rounded : bits >> 16 | 64, Halves);
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
static void by_words(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, int64_t row, int64_t last,
                     const Output& to, int64_t first, int64_t end) {
  for (int64_t m = row; m < last; m += MOST_ROWS) {
    const Group g = group_at(m, last);
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

// The weights of outputs first..end as words of `kind`, in `scratch` if they do not lie so
static const char* unpacked(const Matrix& w, Kind kind, int64_t first, int64_t end, std::vector<char>& scratch) {
  const char* from = (const char*)w.weights + first * w.in * w.bits / 8;
  if (kind != SINGLES || w.bits == 32) return from;
  scratch.resize(4 * (end - first) * w.in);
  float* to = (float*)scratch.data();
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

static void chunk(const Matrix& w, Kind kind, const Packed& x, int64_t row, int64_t last, const Output& to,
                  int64_t first, int64_t end) {
  static thread_local std::vector<char> scratch;
  const char* weights = unpacked(w, kind, first, end, scratch);
  switch (kind) {
#if !ONLY || ONLY == 16
    case PAIRS: return by_words<PAIRS>(w, weights, 2 * w.in, x, row, last, to, first, end);
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 8)
    case CODES_8: return by_words<CODES_8>(w, weights, w.in, x, row, last, to, first, end);
#endif
#if defined(HAS_BYTES) && (!ONLY || ONLY == 4)
    case CODES_4: return by_words<CODES_4>(w, weights, w.in / 2, x, row, last, to, first, end);
#endif
#if !ONLY || ONLY == 32 || (ONLY < 16 && !defined(HAS_BYTES))
    default: by_words<SINGLES>(w, weights, 4 * w.in, x, row, last, to, first, end);
#else
    default: __builtin_unreachable();
#endif
  }
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
      constexpr decltype(&by_column<float, 1>) halves[] = {by_column<Bfloat16, 1>, by_column<Bfloat16, 2>,
                                                           by_column<Bfloat16, 3>, by_column<Bfloat16, 4>};
      const int64_t several = std::min<int64_t>(4, count - m) - 1;
      (w.bits == 16 ? halves : singles)[several](w, x + m * x_stride, x_stride, to.after(m, 0), first,
                                                 std::min(COLUMNS, end - first));
    }
}

// y [count, out of all] = x [count, in] times the transposed `matrices`, and their biases, next to each other; rows are
// strides apart; `most_threads` at most. x and y are float32, or bfloat16 where `is_narrow`, as are dense weights.
// Threads are woken once for all matrices: that takes as long as 1e5 products.
extern "C" void multiply(const Matrix* matrices, int64_t number, const void* x, int64_t x_stride, int64_t count, void* y,
                         int64_t y_stride, int64_t most_threads, int64_t is_narrow) {
  if (!count) return;
  const int64_t in = matrices->in;
  int64_t weights = 0;
  for (int64_t n = 0; n < number; ++n) weights += matrices[n].out * in;
  const int64_t threads = std::min(most_threads, 1 + weights / PER_THREAD);
  bool tiles = false;
#ifdef __AMX_BF16__
  tiles = is_narrow && in % 32 == 0 && has_tiles();
  for (int64_t n = 0; n < number; ++n) tiles = tiles && matrices[n].bits == 16 && !matrices[n].is_transposed;
#endif
  const auto start = [&](const Matrix& w) { return tiles ? w.out / TILE * TILE : 0; };
  std::vector<float> wide;  // x, for what reads no bfloat16
  for (int64_t n = 0; n < number && wide.empty(); ++n)
    if (is_narrow && (matrices[n].is_transposed || kind_of(matrices[n]) != PAIRS)) wide.resize(count * in);
  if (!wide.empty())
    for (int64_t m = 0; m < count; ++m)
      for (int64_t k = 0; k < in; ++k) wide[m * in + k] = ((const Bfloat16*)x)[m * x_stride + k];
  const float* inputs = is_narrow ? wide.data() : (const float*)x;
  const int64_t input_stride = is_narrow ? in : x_stride;
  static thread_local Packed own[KINDS];  // whose memory stays
  Packed* packed = own;
  bool has[KINDS] = {};
  for (int64_t n = 0; n < number; ++n) {
    const Kind kind = kind_of(matrices[n]);
    if (matrices[n].is_transposed || start(matrices[n]) == matrices[n].out || has[kind]) continue;
    has[kind] = true;
    reserve(packed[kind], kind, matrices[n], count);
    for (int64_t m = 0; kind >= CODES_8 && m < count; m += MOST_ROWS)
      pack_codes(packed[kind], kind, inputs, input_stride, group_at(m, count));
  }
  const int64_t most_rows = std::max(PACKED_BYTES / (in * 2) / (2 * TILE), (int64_t)1) * 2 * TILE;
  std::vector<uint32_t> by_tiles_of(tiles ? (std::min(count, most_rows) + TILE) * in / 2 : 0);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#ifdef __AMX_BF16__
    std::optional<Tiles> shapes;
    if (tiles) shapes.emplace(TILE);
    for (int64_t row = 0; tiles && row < count; row += most_rows) {
      const int64_t many = std::min(count - row, most_rows);
      pack_tiles((const Bfloat16*)x + row * x_stride, x_stride, many, in, by_tiles_of.data());
      for (int64_t n = 0, column = 0; n < number; column += matrices[n++].out) {
        const Matrix& w = matrices[n];
        const Output to = Output{y, y_stride, true}.after(row, column);
        const Bfloat16* from = (const Bfloat16*)by_tiles_of.data();
#pragma omp for schedule(static) nowait
        for (int64_t pair = 0; pair < w.out / (2 * TILE); ++pair)
          by_tiles(w, from, many, to, pair * 2 * TILE, (pair + 1) * 2 * TILE);
#pragma omp single nowait
        by_tiles(w, from, many, to, w.out / (2 * TILE) * 2 * TILE, w.out / TILE * TILE);
      }
#pragma omp barrier
    }
    shapes.reset();
#endif
    for (const Kind kind : {SINGLES, PAIRS}) {
      if (!has[kind]) continue;
      Packed& to = packed[kind];
      const int64_t parts = (to.words + PART - 1) / PART, groups = (count + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < groups * parts; ++i) {
        const Group g = group_at(i / parts * MOST_ROWS, count);
        const int64_t k = i % parts * PART, end = std::min(k + PART, to.words);
        const char* from = kind == PAIRS ? (const char*)x : (const char*)inputs;
        const int64_t stride = kind == PAIRS ? 2 * x_stride : 4 * input_stride;
        spread(g, to.bytes, k, end, to.x.data() + g.first * to.words,
               [&](int64_t row) { return from + (g.first + row) * stride; });
      }
    }
    const int64_t block = std::max(MOST_ROWS, X_BYTES / (in * 4) / MOST_ROWS * MOST_ROWS);
    for (int64_t row = 0; row < count; row += block)
      for (int64_t n = 0, column = 0; n < number; column += matrices[n++].out) {
        const Matrix w = matrices[n];
        const Kind kind = kind_of(w);
        const Output to = Output{y, y_stride, (bool)is_narrow}.after(0, column);
        const int64_t last = std::min(count, row + block);
        const int64_t size = w.is_transposed ? COLUMNS : w.out < 4 * threads * CHUNK ? CHUNK / 2 : CHUNK;
#pragma omp for schedule(static) nowait
        for (int64_t first = start(w); first < w.out; first += size) {
          const int64_t end = std::min(w.out, first + size);
          if (w.is_transposed)
            by_columns(w, inputs + row * input_stride, input_stride, last - row, to.after(row, 0), first, end);
          else
            chunk(w, kind, packed[kind], row, last, to, first, end);
        }
      }
  }
  for (Packed& each : own)
    if ((int64_t)each.x.size() * 4 > KEPT_BYTES) each = {};
}
