// Matrix products of a few rows in float32, over float32, 8-bit or 4-bit weights.
//
// An element of the result is summed in one order, whatever the number of rows or threads: eight or sixteen sums of
// every eighth or sixteenth product, and these one after the other. So a verification of several tokens computes for a
// token what a step of one token does, bit for bit. The compiler must not reorder (no -ffast-math).

#include <algorithm>
#include <cstdint>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

constexpr int64_t AHEAD = 8192;           // bytes that are fetched ahead: some CPUs fetch too little by themselves
constexpr int64_t PER_THREAD = 1 << 17;   // weights: with fewer, a second thread saves less than waking it takes
constexpr int64_t BLOCK_BYTES = 1 << 17;  // of weights, which stay in the L2 cache for the next rows

// weights, by their bits:
//   32: float32 [out, in]
//   8: int8 codes [out, in], with scales [out]: weight = scale * code
//   4: codes [out, in / 64, 16] uint16, in which nibble j of word l is input 16 j + l of its 64, with scales and zeros
//      [out, in / group]: weight = scale * (code - zero)
struct Matrix {
  const void* weights;
  const float* scales;
  const uint8_t* zeros;
  const float* bias;  // [out], or null
  int64_t out, in, bits, group;
};

static float sum(Vector v) {
  float total = v[0];
  for (int l = 1; l < LANES; ++l) total += v[l];
  return total;
}

static Vector vector_at(const float* from) { return *(const Vector*)from; }
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
  Vector found = {};
  for (int64_t l = 0; l < count; ++l) found[l] = from[l];
  return found;
}

// OUT outputs of ROWS rows of x, without scales
template <typename NUMBER, int ROWS, int OUT>
static void by_row(const Matrix& w, const float* x, int64_t x_stride, int64_t first, Vector (*sums)[ROWS]) {
  const NUMBER* weights = (const NUMBER*)w.weights + first * w.in;
  int64_t k = 0;
  for (; k + LANES <= w.in; k += LANES) {
    Vector given[ROWS];
    for (int m = 0; m < ROWS; ++m) given[m] = vector_at(x + m * x_stride + k);
    for (int o = 0; o < OUT; ++o) {
      const NUMBER* at = weights + o * w.in + k;
      __builtin_prefetch((const char*)at + AHEAD);
      const Vector weight = vector_at(at);
      for (int m = 0; m < ROWS; ++m) sums[o][m] += weight * given[m];
    }
  }
  for (int o = 0; o < OUT && k < w.in; ++o)
    for (int m = 0; m < ROWS; ++m)
      sums[o][m] += rest(weights + o * w.in + k, w.in - k) * rest(x + m * x_stride + k, w.in - k);
}

static Vector values_of(Words codes) {
#ifdef __AVX512F__
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Vector)_mm512_permutexvar_ps((__m512i)codes, values);  // looks at the lowest four bits alone
#else
  return __builtin_convertvector(codes & 15, Vector);
#endif
}

static Words words_at(const uint16_t* codes) {
#ifdef __AVX512F__
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)codes));
#else
  return __builtin_convertvector(*(const Halves*)codes, Words);
#endif
}

// x_sums [rows, in / group]: of x over each group
template <int ROWS, int OUT>
static void by_group(const Matrix& w, const float* x, int64_t x_stride, const float* x_sums, int64_t first,
                     Vector (*sums)[ROWS]) {
  float zeros[OUT][ROWS] = {};  // what they take away
  const int64_t groups = w.in / w.group;
  const uint16_t* codes = (const uint16_t*)w.weights + first * w.in / 4;
  for (int64_t g = 0; g < groups; ++g) {
    Vector part[OUT][ROWS] = {};
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 64)
      for (int half = 0; half < 16; half += LANES) {
        Words words[OUT];
        for (int o = 0; o < OUT; ++o) {
          const uint16_t* at = codes + (o * w.in + k) / 4 + half;
          __builtin_prefetch((const char*)at + AHEAD);
          words[o] = words_at(at);
        }
        for (int j = 0; j < 4; ++j) {
          Vector given[ROWS];
          for (int m = 0; m < ROWS; ++m) given[m] = vector_at(x + m * x_stride + k + 16 * j + half);
          for (int o = 0; o < OUT; ++o) {
            const Vector weight = values_of(words[o] >> (4 * j));
            for (int m = 0; m < ROWS; ++m) part[o][m] += weight * given[m];
          }
        }
      }
    for (int o = 0; o < OUT; ++o) {
      const int64_t at = (first + o) * groups + g;
      const float zero = w.scales[at] * w.zeros[at];
      for (int m = 0; m < ROWS; ++m) {
        sums[o][m] += part[o][m] * w.scales[at];
        zeros[o][m] = __builtin_fmaf(x_sums[m * groups + g], zero, zeros[o][m]);
      }
    }
  }
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m) sums[o][m][0] -= zeros[o][m];
}

template <int ROWS, int OUT>
static void outputs(const Matrix& w, const float* x, int64_t x_stride, const float* x_sums, float* y, int64_t y_stride,
                    int64_t first) {
  Vector sums[OUT][ROWS] = {};
  if (w.bits == 4)
    by_group<ROWS, OUT>(w, x, x_stride, x_sums, first, sums);
  else if (w.bits == 8)
    by_row<int8_t, ROWS, OUT>(w, x, x_stride, first, sums);
  else
    by_row<float, ROWS, OUT>(w, x, x_stride, first, sums);
  for (int o = 0; o < OUT; ++o)
    for (int m = 0; m < ROWS; ++m)
      y[m * y_stride + first + o] =  // explicit: the compiler would round once here and twice elsewhere
          __builtin_fmaf(sum(sums[o][m]), w.bits == 8 ? w.scales[first + o] : 1, w.bias ? w.bias[first + o] : 0);
}

template <int ROWS>
static void rows(const Matrix& w, const float* x, int64_t x_stride, const float* x_sums, float* y, int64_t y_stride,
                 int64_t first, int64_t end) {
  constexpr int OUT = ROWS > 1 ? 2 : 4;  // as many sums as the registers hold
  for (; first + OUT <= end; first += OUT) outputs<ROWS, OUT>(w, x, x_stride, x_sums, y, y_stride, first);
  for (; first < end; ++first) outputs<ROWS, 1>(w, x, x_stride, x_sums, y, y_stride, first);
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

// y [count, out of all] = x [count, in] times the transposed `matrices`, and their biases, next to each other; rows are
// strides apart; `most_threads` at most. Threads are woken once for all matrices: that takes as long as 1e5 products.
extern "C" void multiply(const Matrix* matrices, int64_t number, const float* x, int64_t x_stride, int64_t count,
                         float* y, int64_t y_stride, int64_t most_threads) {
  int64_t weights = 0;
  std::vector<std::vector<float>> x_sums;
  for (int64_t n = 0; n < number; ++n) {
    weights += matrices[n].out * matrices[n].in;
    x_sums.push_back(group_sums(matrices[n], x, x_stride, count));
  }
  const int64_t threads = std::min(most_threads, 1 + weights / PER_THREAD);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t n = 0, column = 0; n < number; column += matrices[n++].out) {
    const Matrix w = matrices[n];
    const int64_t groups = x_sums[n].size() / count;
    const int64_t block = std::max<int64_t>(4, std::min(BLOCK_BYTES * 8 / (w.in * w.bits), (w.out / threads + 4) / 4 * 4));
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < w.out; first += block) {
      const int64_t end = std::min(w.out, first + block);
      for (int64_t m = 0; m < count; m += 4) {
        const float *from = x + m * x_stride, *sums = x_sums[n].data() + m * groups;
        float* to = y + m * y_stride + column;
        switch (std::min<int64_t>(4, count - m)) {
          case 1: rows<1>(w, from, x_stride, sums, to, y_stride, first, end); break;
          case 2: rows<2>(w, from, x_stride, sums, to, y_stride, first, end); break;
          case 3: rows<3>(w, from, x_stride, sums, to, y_stride, first, end); break;
          default: rows<4>(w, from, x_stride, sums, to, y_stride, first, end);
        }
      }
    }
  }
}
