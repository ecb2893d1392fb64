// Products with dense weights, [out, in]. The lanes of a register are inputs, as weights and x lie in memory. An element
// of the result is summed by lanes, then over them in a tree, whatever the number of rows, outputs or threads.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_words.h"

constexpr int64_t LANES = WIDEST / 4;
constexpr int OUTPUTS_AT_ONCE = 4;                  // that share a load of x
constexpr int ROWS_AT_ONCE = WIDEST == 64 ? 6 : 3;  // that share a load of weights: the sums fit the registers
typedef Register<WIDEST>::Floats Sums;

static inline __attribute__((always_inline)) Sums widened(const float* from) {
  return read<Sums>(from);
}

static inline __attribute__((always_inline)) Sums widened(const Bfloat16* from) {
#if defined(__AVX512F__)
  return (Sums)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (Sums)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  Sums values;
  for (int64_t l = 0; l < LANES; ++l) values[l] = from[l];
  return values;
#endif
}

#ifdef HALVES
static inline __attribute__((always_inline)) Sums widened(const _Float16* from) {
#if defined(__AVX512F__)
  return (Sums)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Sums)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Sums values;
  for (int64_t l = 0; l < LANES; ++l) values[l] = from[l];
  return values;
#endif
}
#endif

// Weights that are multiplied as float32, as x lies
template <typename NUMBER>
struct Singles {
  typedef NUMBER Weight;
  typedef float X;
  static constexpr int64_t STEP = LANES;
  static inline __attribute__((always_inline)) Sums load(const Weight* from) { return in_register(widened(from)); }
  static inline __attribute__((always_inline)) Sums plus(Sums sum, Sums weights, Sums x) { return fused(weights, x, sum); }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16, in the CPU's order
struct Pairs {
  typedef Bfloat16 Weight, X;
  static constexpr int64_t STEP = 2 * LANES;
  static inline __attribute__((always_inline)) Sums load(const Weight* from) { return in_register(read<Sums>(from)); }
  static inline __attribute__((always_inline)) Sums plus(Sums sum, Sums weights, Sums x) {
    return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
  }
};
#endif

#if defined(HALVES)
typedef Singles<_Float16> Dense16;
#elif defined(__AVX512BF16__)
typedef Pairs Dense16;
#else
typedef Singles<Bfloat16> Dense16;
#endif
constexpr bool READS_NARROW = std::is_same_v<Dense16::X, Narrow>;  // x in 16 bits, as it lies

// `count` numbers at most, then zeros
template <typename T>
struct Rest {
  T values[2 * LANES] = {};
  Rest(const T* from, int64_t count) { std::copy(from, from + count, values); }
};

typedef Register<16>::Floats Four;

// The lanes' totals of four registers
static inline __attribute__((always_inline)) Four totals_of(Sums a, Sums b, Sums c, Sums d) {
  const Four p = folded<16>(a), q = folded<16>(b), r = folded<16>(c), s = folded<16>(d);
  const Four first = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  const Four second = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(first, second, 0, 1, 4, 5) + __builtin_shufflevector(first, second, 2, 3, 6, 7);
}

// OUT outputs from `first` on, whose weights begin at `weights`, of ROWS rows of x
template <typename KIND, int OUT, int ROWS>
static void dots(const Matrix& w, const typename KIND::Weight* weights, const typename KIND::X* x, int64_t x_stride,
                 const Output& to, int64_t first) {
  Sums sums[OUT][ROWS] = {};
  int64_t k = 0;
  for (; k + KIND::STEP <= w.in; k += KIND::STEP) {
    Sums own[OUT];
    for (int o = 0; o < OUT; ++o) {
      __builtin_prefetch(weights + (OUT + o) * w.in + k);
      own[o] = KIND::load(weights + o * w.in + k);
    }
    for (int m = 0; m < ROWS; ++m) {
      const Sums inputs = in_register(read<Sums>(x + m * x_stride + k));
      for (int o = 0; o < OUT; ++o) sums[o][m] = KIND::plus(sums[o][m], own[o], inputs);
    }
  }
  for (int o = 0; k < w.in && o < OUT; ++o) {
    const Rest<typename KIND::Weight> of_output(weights + o * w.in + k, w.in - k);
    const Sums own = KIND::load(of_output.values);
    for (int m = 0; m < ROWS; ++m) {
      const Rest<typename KIND::X> of_row(x + m * x_stride + k, w.in - k);
      sums[o][m] = KIND::plus(sums[o][m], own, read<Sums>(of_row.values));
    }
  }
  Four bias;
  for (int o = 0; o < 4; ++o) bias[o] = o < OUT ? to.bias(w, first + o) : 0;
  for (int m = 0; m < ROWS; ++m) {
    constexpr int LAST = OUT - 1;  // of one output, whose total is computed four times
    const Four totals = totals_of(sums[0][m], sums[LAST / 3][m], sums[2 * LAST / 3][m], sums[LAST][m]) + bias;
    to.template set<OUT>(m, first, totals);
  }
}

template <typename KIND, int ROWS>
static void dots_of(const Matrix& w, const typename KIND::Weight* weights, const typename KIND::X* x, int64_t x_stride,
                    const Output& to, int64_t first, int64_t end) {
  constexpr int OUT = OUTPUTS_AT_ONCE;
  for (; first + OUT <= end; first += OUT, weights += OUT * w.in)
    dots<KIND, OUT, ROWS>(w, weights, x, x_stride, to, first);
  for (; first < end; ++first, weights += w.in) dots<KIND, 1, ROWS>(w, weights, x, x_stride, to, first);
}

// Outputs first..end, whose weights begin at `weights`, of `count` rows of x
template <typename KIND>
static void by_inputs(const Matrix& w, const void* weights, const void* x, int64_t x_stride, int64_t count,
                      const Output& to, int64_t first, int64_t end) {
  constexpr decltype(&dots_of<KIND, 1>) of_rows[] = {dots_of<KIND, 1>, dots_of<KIND, 2>, dots_of<KIND, 3>,
                                                     dots_of<KIND, 4>, dots_of<KIND, 5>, dots_of<KIND, 6>};
  int64_t blocks = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int64_t m = 0, rows; m < count; m += rows) {
    rows = (count - m + blocks - 1) / blocks--;  // all about equal
    of_rows[rows - 1](w, (const typename KIND::Weight*)weights, (const typename KIND::X*)x + m * x_stride, x_stride,
                      to.after(m, 0), first, end);
  }
}
