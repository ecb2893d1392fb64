// Matrix products with weights in float32, bfloat16, 8 or 4 bits; x and y in float32 or bfloat16.
//
// The lanes of a register are rows of x, and a weight is broadcast to all of them. So rows share every load of a weight,
// and an element of the result is summed in one order, whatever the number of rows, threads or lanes: even and odd words
// of its inputs, each in turn, then both sums. A word has one float32, two bfloat16, or four codes of 8 bits, whose
// products are summed as integers; there x is rounded to 8 bits by row, as a draft may be. On AMX the order in bfloat16 is
// that of its tiles.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_bfloat16.h"
#include "cpu_structs.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"
#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add this is slower than torch"
#endif
#ifdef __AVX2__
#define HAS_BYTES 1  // sums of products of bytes
#endif

constexpr int SUMS = WIDEST == 64 ? 12 : 6;  // registers of half of the sums; the others hold the second half, x, weights
constexpr int MOST_VECTORS = WIDEST == 32 ? 2 : 4;  // of rows at once
constexpr int64_t MOST_ROWS = MOST_VECTORS * WIDEST / 4;
constexpr int64_t TILE = 16;               // rows of an AMX tile, and its columns of float32
constexpr int64_t CHUNK = 48;            // outputs, whose weights stay in the L2 cache for the next rows
constexpr int64_t PART = 16;             // words of x that a thread packs at once, and the least outputs of a chunk
typedef float Values[CHUNK][MOST_ROWS];  // of a chunk: [output][lane]
constexpr int64_t PER_THREAD = 1 << 17;  // weights: with fewer, a second thread saves less than waking it takes
constexpr int64_t COLUMNS = WIDEST;      // outputs at once, of weights that lie transposed: four registers
constexpr int64_t ROWS_AHEAD = 8;        // prefetched, of weights that lie transposed
constexpr int64_t X_BYTES = 1 << 18;       // of rows of x at once, a part of the L2 cache
constexpr int64_t PACKED_BYTES = 1 << 20;  // of rows of x at once, which stay in the L2 cache for all outputs

template <int64_t BYTES>
struct Register {
  typedef float Floats __attribute__((vector_size(BYTES)));
  typedef int32_t Integers __attribute__((vector_size(BYTES)));
};

template <typename T>
static inline __attribute__((always_inline)) T read(const void* from) {  // at any address
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A value that the compiler does not read from memory again, once for every use.
template <typename V>
static inline __attribute__((always_inline)) V in_register(V value) {
#ifdef __AVX512F__
  asm("" : "+v"(value));
#elif defined(__AVX2__)
  asm("" : "+x"(value));
#endif
  return value;
}

// Where results go: rows `stride` apart
struct Output {
  void* y;
  int64_t stride;
  bool is_narrow;  // bfloat16
  Output after(int64_t rows, int64_t columns) const {
    return {(char*)y + (rows * stride + columns) * (is_narrow ? 2 : 4), stride, is_narrow};
  }
  float bias(const Matrix& w, int64_t column) const {
    if (!w.bias) return 0;
    return is_narrow ? (float)((const Bfloat16*)w.bias)[column] : ((const float*)w.bias)[column];
  }
  void set(int64_t row, int64_t column, float value) const {
    const int64_t at = row * stride + column;
    if (is_narrow)
      ((Bfloat16*)y)[at] = narrowed(value);
    else
      ((float*)y)[at] = value;
  }
};

// ---- rows of x in words, by lanes ----------------------------------------------------------------------------------

enum Kind { SINGLES, PAIRS, CODES_8, CODES_4, KINDS };  // what is in a word; the codes of 4 bits have their own order

static Kind kind_of(const Matrix& w, bool is_narrow) {
#ifdef HAS_BYTES
  if (w.bits == 4) return CODES_4;
  if (w.bits == 8 && w.in % 4 == 0) return CODES_8;
#endif
  return w.bits == 16 && is_narrow ? PAIRS : SINGLES;
}

// Rows of x that are multiplied at once
struct Group {
  int64_t first, rows, lanes;
};

static Group group_at(int64_t first, int64_t count) {
  const int64_t rows = std::min(count - first, MOST_ROWS);
  int64_t lanes = 4;
  while (lanes < rows) lanes *= 2;
  return {first, rows, lanes};
}

// x [rows, words of 4 bytes], the last word padded with zeros, as [group][word][lane]
struct Packed {
  int64_t bytes, words;  // of a row
  std::vector<uint32_t> x;
  std::vector<float> scales;  // [group][lane]: of codes
  std::vector<float> sums;    // [group][part][lane]: of codes, with a minus
  int64_t parts;              // of the inputs, with a scale and a zero of weights
  const uint32_t* at(const Group& g) const { return x.data() + g.first * words; }
};

// The words k..end of the rows of a group: `from` gives a row's bytes.
template <typename From>
static void spread(const Group& g, int64_t bytes, int64_t k, int64_t end, uint32_t* to, From from) {
#ifdef __AVX512F__
  for (; k < end; k += 16)
    for (int64_t lane = 0; lane < g.lanes; lane += 16) {
      Words lines[16] = {};
      const int64_t left = std::min<int64_t>(64, bytes - 4 * k);
      for (int64_t m = lane; m < std::min(lane + 16, g.rows); ++m)
        if (left == 64)
          lines[m - lane] = read<Words>(from(m) + 4 * k);
        else
          std::memcpy(&lines[m - lane], from(m) + 4 * k, left);
      transpose(lines);
      for (int64_t i = 0; i < std::min<int64_t>(16, end - k); ++i)
        std::memcpy(to + (k + i) * g.lanes + lane, &lines[i], 4 * std::min<int64_t>(16, g.lanes));
    }
#else
  std::fill(to + k * g.lanes, to + end * g.lanes, 0);
  for (int64_t m = 0; m < g.rows; ++m)
    for (int64_t i = k; i < end; ++i)
      std::memcpy(to + i * g.lanes + m, from(m) + 4 * i, std::min<int64_t>(4, bytes - 4 * i));
#endif
}

// The input that position i of a row of codes of 4 bits has: a byte of the weights has inputs 16 apart, a word 32.
static int64_t input_of(int64_t i) {
  const int64_t half = i % 64 / 32, l = i % 32 / 2;
  return i / 64 * 64 + 16 * half + 32 * (i % 2) + l;
}

// The largest code of x. Without an instruction for four products, two of weights of 8 bits must fit 16 bits.
static float most_code(Kind kind) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return 127;
#else
  return kind == CODES_8 ? 64 : 127;
#endif
}

// Codes of a row of x, and their scale: x = scale * code
static float round_to_codes(const float* x, int64_t in, float most_code, int8_t* codes) {
  uint32_t most = 0;
  for (int64_t i = 0; i < in; ++i) most = std::max(most, read<uint32_t>(x + i) & 0x7fffffff);
  const float largest = read<float>(&most), inverse = largest > 0 ? most_code / largest : 0;
  for (int64_t i = 0; i < in; ++i) {
    const float shifted = x[i] * inverse + 12582912.f;  // 1.5 * 2^23: a number that is added to it is rounded
    codes[i] = (int8_t)read<int32_t>(&shifted);
  }
  return largest / most_code;
}

// Makes room for `count` rows.
static void reserve(Packed& to, Kind kind, const Matrix& w, int64_t count) {
  const Group last = group_at((count - 1) / MOST_ROWS * MOST_ROWS, count);
  const int64_t lanes = last.first + last.lanes;
  to.bytes = kind == SINGLES ? 4 * w.in : kind == PAIRS ? 2 * w.in : w.in;
  to.words = (to.bytes + 3) / 4;
  to.parts = kind == CODES_4 ? w.in / w.group : 1;
  const auto grow = [](auto& of, int64_t size) { of.resize(std::max<int64_t>(of.size(), size)); };
  grow(to.x, lanes * to.words);
  if (kind < CODES_8) return;
  grow(to.scales, lanes);
  grow(to.sums, lanes * to.parts);
}

// Rows of a group as codes; `x` in float32.
static void pack_codes(Packed& to, Kind kind, const float* x, int64_t stride, const Group& g) {
  const int64_t in = to.bytes, each = in / to.parts;
  std::vector<int8_t> codes(g.rows * in), plain(in);
  for (int64_t row = 0; row < g.rows; ++row) {
    int8_t* own = codes.data() + row * in;
    to.scales[g.first + row] = round_to_codes(x + (g.first + row) * stride, in, most_code(kind), plain.data());
    for (int64_t i = 0; i < in; ++i) own[i] = plain[kind == CODES_8 ? i : input_of(i)];
    for (int64_t p = 0; p < to.parts; ++p) {
      int32_t sum = 0;
      for (int64_t i = p * each; i < (p + 1) * each; ++i) sum += own[i];
      to.sums[g.first * to.parts + p * g.lanes + row] = -sum;
    }
  }
  spread(g, in, 0, to.words, to.x.data() + g.first * to.words, [&](int64_t row) { return (char*)&codes[row * in]; });
}

// ---- products -------------------------------------------------------------------------------------------------------

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

#ifdef HAS_BYTES
// The same of four codes without a sign, and four of x
template <typename I>
static inline __attribute__((always_inline)) I plus_codes(I total, I x, I codes) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if constexpr (sizeof(I) == 64) return (I)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
  if constexpr (sizeof(I) == 32) return (I)_mm256_dpbusd_epi32((__m256i)total, (__m256i)codes, (__m256i)x);
  if constexpr (sizeof(I) == 16) return (I)_mm_dpbusd_epi32((__m128i)total, (__m128i)codes, (__m128i)x);
#else  // whose products' sums of two fit 16 bits
#ifdef __AVX512BW__
  if constexpr (sizeof(I) == 64)
    return total + (I)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)codes, (__m512i)x), _mm512_set1_epi16(1));
#endif
  if constexpr (sizeof(I) == 32)
    return total + (I)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, (__m256i)x), _mm256_set1_epi16(1));
  if constexpr (sizeof(I) == 16)
    return total + (I)_mm_madd_epi16(_mm_maddubs_epi16((__m128i)codes, (__m128i)x), _mm_set1_epi16(1));
#endif
}
#endif

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

#ifdef HAS_BYTES
// The same of codes, whose scales and zeros change every `w.in / x.parts` inputs. Not inline, for then `sums` would take
// the registers of x.
template <int BITS, int OUT, int VECTORS, typename V>
static __attribute__((noinline)) void add_codes(const Matrix& w, const char* codes, const Packed& x, const Group& g,
                                                int64_t first, V (*sums)[VECTORS]) {
  typedef typename Register<sizeof(V)>::Integers Integers;
  constexpr int64_t LANES = sizeof(V) / 4, EACH = 8 * 8 / BITS;  // words of x for eight words of codes
  const uint32_t* words = x.at(g);
  const int64_t bytes = w.in * BITS / 8, steps = x.words / x.parts;
  const char* next = codes + OUT * bytes;
  for (int64_t part = 0; part < x.parts; ++part) {
    Integers totals[OUT][VECTORS] = {};
    const auto add = [&](int64_t k, int64_t at) __attribute__((always_inline)) {
      Integers inputs[VECTORS], others[VECTORS];  // these, eight words behind, for upper halves of bytes
      for (int v = 0; v < VECTORS; ++v) {
        inputs[v] = in_register(read<Integers>(words + (k * VECTORS + v) * LANES));
        if (BITS == 4) others[v] = in_register(read<Integers>(words + ((k + 8) * VECTORS + v) * LANES));
      }
      for (int o = 0; o < OUT; ++o) {
        const Integers both = in_register(Integers{} + read<int32_t>(codes + o * bytes + at));
        const Integers lower = BITS == 8 ? both ^ (int32_t)0x80808080 : both & 0x0f0f0f0f, upper = both >> 4 & 0x0f0f0f0f;
        for (int v = 0; v < VECTORS; ++v) {
          totals[o][v] = plus_codes(totals[o][v], inputs[v], lower);
          if (BITS == 4) totals[o][v] = plus_codes(totals[o][v], others[v], upper);
        }
      }
    };
    for (int64_t k = part * steps; k < (part + 1) * steps; k += EACH) {
      const int64_t at = k * BITS / 2;
      if (at % 64 == 0)
        for (int o = 0; o < OUT; ++o) __builtin_prefetch(next + at * OUT + 64 * o);
      for (int64_t i = 0; i < std::min<int64_t>(8, (part + 1) * steps - k); ++i) add(k + i, at + 4 * i);
    }
    const float* of_x = x.sums.data() + g.first * x.parts + part * g.lanes;
    for (int o = 0; o < OUT; ++o) {
      const int64_t place = (first + o) * x.parts + part;
      const V zero = all_of<V>(BITS == 8 ? 128.f : (float)w.zeros[place]), scale = all_of<V>(w.scales[place]);
      for (int v = 0; v < VECTORS; ++v) {
        const V product = fused(zero, read<V>(of_x + v * LANES), __builtin_convertvector(totals[o][v], V));
        sums[o][v] = fused(product, scale, sums[o][v]);
      }
    }
  }
  for (int v = 0; v < VECTORS; ++v) {
    const V scale = read<V>(x.scales.data() + g.first + v * LANES);
    for (int o = 0; o < OUT; ++o) sums[o][v] = sums[o][v] * scale;
  }
}
#endif

// OUT outputs of a group of rows into `values`; `weights` of the first, of another matrix than `w` if they were unpacked
template <Kind KIND, int OUT, int VECTORS, typename V>
static void outputs(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, const Group& g,
                    float (*values)[MOST_ROWS], int64_t first) {
  V sums[OUT][VECTORS] = {};
  if constexpr (KIND == SINGLES || KIND == PAIRS)
    add_words<KIND, OUT>(weights, bytes, x.at(g), sums);
#ifdef HAS_BYTES
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
    const Bfloat16* halves = (const Bfloat16*)w.weights + o * w.in;
    const int8_t* codes = (const int8_t*)w.weights + o * w.in;
    if (w.bits == 16)
      for (int64_t i = 0; i < w.in; ++i) to[i] = halves[i];
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
    case PAIRS: return by_words<PAIRS>(w, weights, 2 * w.in, x, row, last, to, first, end);
#ifdef HAS_BYTES
    case CODES_8: return by_words<CODES_8>(w, weights, w.in, x, row, last, to, first, end);
    case CODES_4: return by_words<CODES_4>(w, weights, w.in / 2, x, row, last, to, first, end);
#endif
    default: by_words<SINGLES>(w, weights, 4 * w.in, x, row, last, to, first, end);
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

#ifdef __AMX_BF16__
// OUT tiles of outputs from `first` on, of up to ROWS tiles of rows, `count` in all. packed [rows / TILE, in / 2, TILE, 2]:
// x, of which a tile takes TILE rows of TILE pairs. A tile of weights is TILE outputs of 32 inputs, as they lie.
template <int OUT, int ROWS>
static void by_tile(const Matrix& w, const Bfloat16* packed, int64_t count, const Output& to, int64_t first,
                    bool fetches) {
  const int64_t stride = w.in * 2, group = w.in * TILE;
  const Bfloat16* weights = (const Bfloat16*)w.weights + first * w.in;
  _tile_zero(0);
  if (ROWS > 1) _tile_zero(1);
  if (OUT > 1) _tile_zero(2);
  if (OUT > 1 && ROWS > 1) _tile_zero(3);
  for (int64_t k = 0; k < w.in; k += 32) {
    // Prefetches the next outputs' weights: those of these rows, so many at once, would come too late.
    const char* next = (const char*)(weights + OUT * group) + k * OUT * TILE * 2;
    for (int line = 0; fetches && line < 16 * OUT; ++line) __builtin_prefetch(next + 64 * line);
    _tile_loadd(4, weights + k, stride);
    _tile_loadd(6, packed + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (ROWS > 1) {
      _tile_loadd(7, packed + k * TILE + group, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (OUT > 1) {
      _tile_loadd(5, weights + k + group, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (ROWS > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float totals[OUT][ROWS][TILE][TILE];  // the last two: output, row
  _tile_stored(0, totals[0][0], 64);
  if (ROWS > 1) _tile_stored(1, totals[0][ROWS - 1], 64);
  if (OUT > 1) _tile_stored(2, totals[OUT - 1][0], 64);
  if (OUT > 1 && ROWS > 1) _tile_stored(3, totals[OUT - 1][ROWS - 1], 64);
  for (int o = 0; o < OUT; ++o) {
    Register<64>::Floats bias;
    for (int64_t i = 0; i < TILE; ++i) bias[i] = to.bias(w, first + o * TILE + i);
    for (int64_t start = 0; start < count; start += TILE) {
      Words sums[TILE];  // by output, then by row
      std::memcpy(sums, totals[o][start / TILE], sizeof(sums));
      transpose(sums);
      for (int64_t m = start; m < std::min(count, start + TILE); ++m) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)((Register<64>::Floats)sums[m - start] + bias));
        std::memcpy((Bfloat16*)to.y + m * to.stride + first + o * TILE, &narrow, 32);
      }
    }
  }
}

// Outputs first..end, a multiple of TILE, of all rows
static void by_tiles(const Matrix& w, const Bfloat16* packed, int64_t count, const Output& to, int64_t first,
                     int64_t end) {
  for (; first < end; first += 2 * TILE)
    for (int64_t m = 0; m < count; m += 2 * TILE) {
      const int64_t left = std::min(count - m, 2 * TILE);
      const auto whole = left > TILE ? by_tile<2, 2> : by_tile<2, 1>, half = left > TILE ? by_tile<1, 2> : by_tile<1, 1>;
      (end - first > TILE ? whole : half)(w, packed + m * w.in, left, to.after(m, 0), first, !m);
    }
}

// x [rows, in], rows a stride apart, as [rows / TILE, in / 2, TILE, 2]; the last group is padded with any numbers.
// Threads share the work, and wait for each other.
static void pack_tiles(const Bfloat16* x, int64_t stride, int64_t rows, int64_t in, uint32_t* to) {
#pragma omp for schedule(static)
  for (int64_t m = 0; m < rows; m += TILE)
    for (int64_t k = 0; k < in; k += 2 * TILE) {
      Words pairs[TILE];
      for (int64_t i = 0; i < TILE; ++i) std::memcpy(&pairs[i], x + std::min(m + i, rows - 1) * stride + k, 64);
      transpose(pairs);
      std::memcpy(to + (m * in / 2 + k / 2 * TILE), pairs, sizeof(pairs));
    }
}
#endif

// y [count, out of all] = x [count, in] times the transposed `matrices`, and their biases, next to each other; rows are
// strides apart; `most_threads` at most. x and y are float32, or bfloat16 where `is_narrow`. Threads are woken once for
// all matrices: that takes as long as 1e5 products.
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
    if (is_narrow && (matrices[n].is_transposed || kind_of(matrices[n], true) != PAIRS)) wide.resize(count * in);
  if (!wide.empty())
    for (int64_t m = 0; m < count; ++m)
      for (int64_t k = 0; k < in; ++k) wide[m * in + k] = ((const Bfloat16*)x)[m * x_stride + k];
  const float* inputs = is_narrow ? wide.data() : (const float*)x;
  const int64_t input_stride = is_narrow ? in : x_stride;
  static thread_local Packed own[KINDS];  // whose memory stays
  Packed* packed = own;
  bool has[KINDS] = {};
  for (int64_t n = 0; n < number; ++n) {
    const Kind kind = kind_of(matrices[n], is_narrow);
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
        const Kind kind = kind_of(w, is_narrow);
        const Output to = Output{y, y_stride, (bool)is_narrow}.after(0, column);
        const int64_t last = std::min(count, row + block);
        const int64_t size = w.is_transposed ? COLUMNS : w.out < 4 * threads * CHUNK ? PART : CHUNK;
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
}
