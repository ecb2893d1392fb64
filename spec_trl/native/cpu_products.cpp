// Matrix products of a few rows, over float32, bfloat16, 8-bit or 4-bit weights; x and y in float32 or bfloat16.
// An element of the result is summed in one order, whatever the number of rows or threads: in float32 the sums of every
// eighth or sixteenth product, and these pairwise; in bfloat16 by AVX-512 of pairs, on AMX in the order of its tiles.

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
#ifdef __AVX512F__
constexpr int LANES = 16;
constexpr int MOST_OUT = 4;  // outputs at once, with several rows: as many sums as the registers hold
#else
constexpr int LANES = 8;
constexpr int MOST_OUT = 2;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

constexpr int64_t AHEAD = 8192;           // bytes that are prefetched: some CPUs prefetch too little by themselves
constexpr int64_t ROWS_AHEAD = 8;         // the same, of weights that lie transposed
constexpr int64_t PER_THREAD = 1 << 17;   // weights: with fewer, a second thread saves less than waking it takes
constexpr int64_t BLOCK_BYTES = 1 << 14;  // of weights, which stay in the L1 cache for the next rows
constexpr int64_t COLUMNS = 4 * LANES;    // outputs at once, of weights that lie transposed
constexpr int64_t PACKED_BYTES = 1 << 20;  // of rows of x at once, which stay in the L2 cache for all outputs
constexpr int64_t TILE = 16;              // rows of an AMX tile, and its columns of float32

// Where results go: rows `stride` apart
struct Output {
  void* y;
  int64_t stride;
  bool is_narrow;  // bfloat16
  Output after(int64_t rows, int64_t columns) const {
    return {(char*)y + (rows * stride + columns) * (is_narrow ? 2 : 4), stride, is_narrow};
  }
  void set(int64_t row, int64_t column, float total, float scale, const void* bias) const {
    const int64_t at = row * stride + column;
    if (is_narrow)
      ((Bfloat16*)y)[at] = narrowed(fused(total, scale, bias ? (float)((const Bfloat16*)bias)[column] : 0));
    else
      ((float*)y)[at] = fused(total, scale, bias ? ((const float*)bias)[column] : 0);
  }
};

#ifdef __AVX512F__
static float sum(Vector v) {
  __m512 s = (__m512)v;
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0b01001110));  // the order of `sums_of`
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0b10110001));
  s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0b10110001));
  s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0b01001110));
  return _mm512_cvtss_f32(s);
}

// The sums of 16 vectors, with a third of the additions that take them one by one.
static __m512 sums_of(const Vector* v) {
  __m512 two[8], four[4], eight[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
    four[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = four[2 * i], b = four[2 * i + 1];
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88), _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}
#else
static float sum(Vector v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; ++l) v[l] += v[l + width];
  return v[0];
}
#endif

static Integers words_at(const uint16_t* from) {
#ifdef __AVX512F__
  return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Integers)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return __builtin_convertvector(*(const Shorts*)from, Integers);
#endif
}

static Vector vector_at(const float* from) { return *(const Vector*)from; }
static Vector vector_at(const Bfloat16* from) { return (Vector)(words_at((const uint16_t*)from) << 16); }
static Vector vector_at(const int8_t* from) {
#ifdef __AVX512F__
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(*(const Bytes*)from, Vector);
#endif
}

// The last `count` numbers of a row, and zeros.
template <typename NUMBER>
static Vector rest(const NUMBER* from, int64_t count) {
  Vector padded = {};
  for (int64_t l = 0; l < count; ++l) padded[l] = from[l];
  return padded;
}

// Adds the last `count` products to `total`. Not inline, for that would spill the sums of the caller's loop to memory.
template <typename NUMBER>
__attribute__((noinline)) static Vector with_rest(Vector total, const NUMBER* weights, const float* x, int64_t count) {
  for (int64_t l = 0; l < count; ++l) total[l] = fused<float>(weights[l], x[l], total[l]);
  return total;
}

// Rows of x that a call multiplies
struct Inputs {
  const float* x;  // null: every matrix reads `narrow`
  int64_t stride;
  const float* sums;  // [rows, groups]: of x over each group of 4-bit codes
  int64_t groups;
  const Bfloat16* narrow;  // the same rows; null: x was given in float32
  int64_t narrow_stride;
  Inputs after(int64_t rows) const {
    return {x ? x + rows * stride : x, stride, sums + rows * groups, groups,
            narrow ? narrow + rows * narrow_stride : narrow, narrow_stride};
  }
};

// Whether `by_pair` multiplies, in bfloat16
static bool has_pairs(const Matrix& w) {
#ifdef __AVX512BF16__
  return w.bits == 16 && !w.is_transposed;
#else
  return false;
#endif
}

#ifdef __AVX512BF16__
// OUT outputs of ROWS rows of x: each lane sums every sixteenth pair of products
template <int ROWS, int OUT>
static void by_pair(const Matrix& w, const Bfloat16* x, int64_t x_stride, int64_t first, Vector (*sums)[ROWS]) {
  const Bfloat16* weights = (const Bfloat16*)w.weights + first * w.in;
  __m512 totals[OUT][ROWS];
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m) totals[o][m] = _mm512_setzero_ps();
  const auto add = [&](int64_t k, __mmask32 mask) {
    __m512bh inputs[ROWS];
    for (int m = 0; m < ROWS; ++m) inputs[m] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + m * x_stride + k);
    for (int o = 0; o < OUT; ++o) {
      const Bfloat16* at = weights + o * w.in + k;
      __builtin_prefetch((const char*)at + AHEAD);
      const __m512bh weight = (__m512bh)_mm512_maskz_loadu_epi16(mask, at);
      for (int m = 0; m < ROWS; ++m) totals[o][m] = _mm512_dpbf16_ps(totals[o][m], weight, inputs[m]);
    }
  };
  int64_t k = 0;
  for (; k + 32 <= w.in; k += 32) add(k, ~(__mmask32)0);
  if (k < w.in) add(k, ((__mmask32)1 << (w.in - k)) - 1);
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m) sums[o][m] = (Vector)totals[o][m];
}
#endif

// OUT outputs of ROWS rows of x, without scales
template <typename NUMBER, int ROWS, int OUT>
static void by_row(const Matrix& w, const float* x, int64_t x_stride, int64_t first, Vector (*sums)[ROWS]) {
  const NUMBER* weights = (const NUMBER*)w.weights + first * w.in;
  Vector totals[OUT][ROWS] = {};  // in registers, as what `sums` points to would not be
  int64_t k = 0;
  for (; k + LANES <= w.in; k += LANES) {
    Vector inputs[ROWS];
    for (int m = 0; m < ROWS; ++m) inputs[m] = vector_at(x + m * x_stride + k);
    for (int o = 0; o < OUT; ++o) {
      const NUMBER* at = weights + o * w.in + k;
      __builtin_prefetch((const char*)at + AHEAD);
      const Vector weight = vector_at(at);
      for (int m = 0; m < ROWS; ++m) totals[o][m] = fused(weight, inputs[m], totals[o][m]);
    }
  }
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m)
      sums[o][m] = k == w.in ? totals[o][m]
                             : with_rest(totals[o][m], weights + o * w.in + k, x + m * x_stride + k, w.in - k);
}

// `count` outputs from `first` on, up to VECTORS * LANES, of weights that lie [in, out]
template <typename NUMBER, int ROWS, int VECTORS>
static void by_column(const Matrix& w, const float* x, int64_t x_stride, const Output& to, int64_t first,
                      int64_t count) {
  const NUMBER* at = (const NUMBER*)w.weights + first;
  Vector sums[VECTORS][ROWS] = {};
  for (int64_t k = 0; k < w.in; ++k, at += w.out)
    for (int v = 0; v < VECTORS && v * LANES < count; ++v) {
      __builtin_prefetch(at + v * LANES + ROWS_AHEAD * w.out);
      const int64_t left = count - v * LANES;
      const Vector weight = left >= LANES ? vector_at(at + v * LANES) : rest(at + v * LANES, left);
      for (int m = 0; m < ROWS; ++m) sums[v][m] = fused(weight, all_of<Vector>(x[m * x_stride + k]), sums[v][m]);
    }
  for (int64_t o = 0; o < count; ++o)
    for (int m = 0; m < ROWS; ++m) to.set(m, first + o, sums[o / LANES][m][o % LANES], 1, w.bias);
}

static Vector values_of(Integers codes) {
#ifdef __AVX512F__
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Vector)_mm512_permutexvar_ps((__m512i)codes, values);  // looks at the lowest four bits alone
#else
  return __builtin_convertvector(codes & 15, Vector);
#endif
}

// x_sums [rows, in / group]: of x over each group
template <int ROWS, int OUT>
static void by_group(const Matrix& w, const float* x, int64_t x_stride, const float* x_sums, int64_t first,
                     Vector (*sums)[ROWS]) {
  float zeros[OUT][ROWS] = {};  // sums of x * scale * zero, which are subtracted
  const int64_t groups = w.in / w.group;
  const uint16_t* codes = (const uint16_t*)w.weights + first * w.in / 4;
  for (int64_t g = 0; g < groups; ++g) {
    Vector part[OUT][ROWS] = {};
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 64)
      for (int half = 0; half < 16; half += LANES) {
        Integers words[OUT];
        for (int o = 0; o < OUT; ++o) {
          const uint16_t* at = codes + (o * w.in + k) / 4 + half;
          __builtin_prefetch((const char*)at + AHEAD);
          words[o] = words_at(at);
        }
        for (int j = 0; j < 4; ++j) {
          Vector inputs[ROWS];
          for (int m = 0; m < ROWS; ++m) inputs[m] = vector_at(x + m * x_stride + k + 16 * j + half);
          for (int o = 0; o < OUT; ++o) {
            const Vector weight = values_of(words[o] >> (4 * j));
            for (int m = 0; m < ROWS; ++m) part[o][m] = fused(weight, inputs[m], part[o][m]);
          }
        }
      }
    for (int o = 0; o < OUT; ++o) {
      const int64_t at = (first + o) * groups + g;
      const float zero = w.scales[at] * w.zeros[at];
      for (int m = 0; m < ROWS; ++m) {
        sums[o][m] = fused(part[o][m], all_of<Vector>(w.scales[at]), sums[o][m]);
        zeros[o][m] = fused(x_sums[m * groups + g], zero, zeros[o][m]);
      }
    }
  }
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m) sums[o][m][0] -= zeros[o][m];
}

template <int ROWS, int OUT>
static void outputs(const Matrix& w, const Inputs& from, const Output& to, int64_t first) {
  Vector sums[OUT][ROWS] = {};
  switch (w.bits) {
    case 4: by_group<ROWS, OUT>(w, from.x, from.stride, from.sums, first, sums); break;
    case 8: by_row<int8_t, ROWS, OUT>(w, from.x, from.stride, first, sums); break;
    case 16:
#ifdef __AVX512BF16__
      if (from.narrow) {
        by_pair<ROWS, OUT>(w, from.narrow, from.narrow_stride, first, sums);
        break;
      }
#endif
      by_row<Bfloat16, ROWS, OUT>(w, from.x, from.stride, first, sums);
      break;
    default: by_row<float, ROWS, OUT>(w, from.x, from.stride, first, sums);
  }
#ifdef __AVX512F__
  if (ROWS == 4 && OUT == 4) {
    Vector by_row[16];
    for (int i = 0; i < 16; ++i) by_row[i] = sums[i % OUT][i / OUT % ROWS];
    const __m128 scales = w.bits == 8 ? _mm_loadu_ps(w.scales + first) : _mm_set1_ps(1);
    __m128 bias = _mm_setzero_ps();
    if (w.bias && !to.is_narrow) bias = _mm_loadu_ps((const float*)w.bias + first);
    if (w.bias && to.is_narrow)
      bias = (__m128)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)((const Bfloat16*)w.bias + first))), 16);
    const Vector totals =
        (Vector)_mm512_fmadd_ps(sums_of(by_row), _mm512_broadcast_f32x4(scales), _mm512_broadcast_f32x4(bias));
    for (int m = 0; m < ROWS; ++m) {
      const int64_t at = m * to.stride + first;
      if (!to.is_narrow)
        std::memcpy((float*)to.y + at, (const float*)&totals + 4 * m, 16);
      else
        for (int o = 0; o < OUT; ++o) ((Bfloat16*)to.y)[at + o] = narrowed(totals[4 * m + o]);
    }
    return;
  }
#endif
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m)
      to.set(m, first + o, sum(sums[o][m]), w.bits == 8 ? w.scales[first + o] : 1, w.bias);
}

template <int ROWS>
static void rows(const Matrix& w, const Inputs& from, const Output& to, int64_t first, int64_t end) {
  constexpr int OUT = ROWS > 1 ? MOST_OUT : 4;
  for (; w.is_transposed && first < end; first += COLUMNS) {
    const int64_t count = std::min(COLUMNS, end - first);
    if (w.bits == 16)
      by_column<Bfloat16, ROWS, COLUMNS / LANES>(w, from.x, from.stride, to, first, count);
    else
      by_column<float, ROWS, COLUMNS / LANES>(w, from.x, from.stride, to, first, count);
  }
  for (; first + OUT <= end; first += OUT) outputs<ROWS, OUT>(w, from, to, first);
  for (; first < end; ++first) outputs<ROWS, 1>(w, from, to, first);
}

// Sums of x over each group of the inputs, [count, in / group]
static std::vector<float> group_sums(const Matrix& w, const float* x, int64_t x_stride, int64_t count) {
  const int64_t groups = w.bits == 4 ? w.in / w.group : 0;
  std::vector<float> sums(count * groups);
  for (int64_t m = 0; m < count; ++m)
    for (int64_t g = 0; g < groups; ++g) {
      Vector total = {};
      for (int64_t k = g * w.group; k < (g + 1) * w.group; k += LANES) total += vector_at(x + m * x_stride + k);
      sums[m * groups + g] = sum(total);
    }
  return sums;
}

// Whether many rows too are multiplied as fast as by torch in bfloat16: by tiles, or where the CPU has no instructions.
extern "C" int64_t reads_prompts() {
#if defined(__AVX512BF16__) || !defined(__x86_64__)
  return has_tiles();
#else
  return 1;
#endif
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
    Vector bias = {};
    if (w.bias) bias = vector_at((const Bfloat16*)w.bias + first + o * TILE);
    for (int64_t start = 0; start < count; start += TILE) {
      Words sums[TILE];  // by output, then by row
      std::memcpy(sums, totals[o][start / TILE], sizeof(sums));
      transpose(sums);
      for (int64_t m = start; m < std::min(count, start + TILE); ++m) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)((Vector)sums[m - start] + bias));
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
static void pack(const Bfloat16* x, int64_t stride, int64_t rows, int64_t in, uint32_t* to) {
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
  bool tiles = false;
#ifdef __AMX_BF16__
  tiles = is_narrow && in % 32 == 0 && has_tiles();
  for (int64_t n = 0; n < number; ++n) tiles = tiles && matrices[n].bits == 16 && !matrices[n].is_transposed;
#endif
  const bool widens = is_narrow && !std::all_of(matrices, matrices + number, has_pairs);
  std::vector<float> wide(widens ? count * in : 0);
  for (int64_t m = 0; widens && m < count; ++m)
    for (int64_t k = 0; k < in; ++k) wide[m * in + k] = ((const Bfloat16*)x)[m * x_stride + k];
  const float* inputs = is_narrow ? wide.data() : (const float*)x;
  const int64_t input_stride = is_narrow ? in : x_stride;
  int64_t weights = 0;
  std::vector<std::vector<float>> x_sums;
  for (int64_t n = 0; n < number; ++n) {
    weights += matrices[n].out * in;
    x_sums.push_back(group_sums(matrices[n], inputs, input_stride, count));
  }
  const int64_t threads = std::min(most_threads, 1 + weights / PER_THREAD);
  const int64_t most_rows = std::max(PACKED_BYTES / (in * 2) / (2 * TILE), (int64_t)1) * 2 * TILE;
  std::vector<uint32_t> packed(tiles ? (std::min(count, most_rows) + TILE) * in / 2 : 0);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#ifdef __AMX_BF16__
    std::optional<Tiles> shapes;
    if (tiles) shapes.emplace(TILE);
    for (int64_t row = 0; tiles && row < count; row += most_rows) {
      const int64_t many = std::min(count - row, most_rows);
      pack((const Bfloat16*)x + row * x_stride, x_stride, many, in, packed.data());
      for (int64_t n = 0, column = 0; n < number; column += matrices[n++].out) {
        const Matrix& w = matrices[n];
        const Output to = Output{y, y_stride, true}.after(row, column);
#pragma omp for schedule(static) nowait
        for (int64_t pair = 0; pair < w.out / (2 * TILE); ++pair)
          by_tiles(w, (const Bfloat16*)packed.data(), many, to, pair * 2 * TILE, (pair + 1) * 2 * TILE);
#pragma omp single nowait
        by_tiles(w, (const Bfloat16*)packed.data(), many, to, w.out / (2 * TILE) * 2 * TILE, w.out / TILE * TILE);
      }
#pragma omp barrier
    }
    shapes.reset();
#endif
    for (int64_t n = 0, column = 0; n < number; column += matrices[n++].out) {
      const Matrix w = matrices[n];
      const int64_t unit = w.is_transposed ? COLUMNS : MOST_OUT;
      const Inputs from = {inputs, input_stride, x_sums[n].data(), (int64_t)x_sums[n].size() / count,
                           is_narrow ? (const Bfloat16*)x : nullptr, x_stride};
      const int64_t share = (w.out / threads + unit) / unit * unit;
      const int64_t block = std::max(unit, std::min(BLOCK_BYTES * 8 / (in * w.bits), share) / unit * unit);
#pragma omp for schedule(static) nowait
      for (int64_t first = tiles ? w.out / TILE * TILE : 0; first < w.out; first += block) {
        const int64_t end = std::min(w.out, first + block);
        for (int64_t m = 0; m < count; m += 4) {
          const Output to = Output{y, y_stride, (bool)is_narrow}.after(m, column);
          constexpr decltype(&rows<1>) of[] = {rows<1>, rows<2>, rows<3>, rows<4>};
          of[std::min<int64_t>(4, count - m) - 1](w, from.after(m), to, first, end);
        }
      }
    }
  }
}
