// Products of few rows with dense weights of 16 bits. The lanes of a register are outputs: a square of weights is
// transposed in registers, and multiplied by words of x. An element is summed as by `add_words`, whose lanes are rows: even
// and odd words of its inputs, each in turn, then both sums. In float32 this was slower than `add_words` on a Zen 5.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_words.h"

constexpr int64_t FEW = 4;    // rows; with more lanes of rows take no longer
constexpr int64_t AHEAD = 4;  // squares from a square to the one that it prefetches: with 2 a Zen 5 waits, 8 gain nothing
constexpr int64_t SIDE = WIDEST / 4;  // outputs of a square, and words of each
typedef Register<WIDEST>::Floats Floats;

// total + the products of words of two factors, one of them the same for all lanes
template <Kind KIND, typename V>
static inline __attribute__((always_inline)) V plus(V total, V lanes, uint32_t word) {
  if constexpr (KIND == SINGLES) {
    return fused(all_of<V>(read<float>(&word)), lanes, total);
  } else {
#ifdef __AVX512BF16__
    if constexpr (sizeof(V) == 64)
      return (V)_mm512_dpbf16_ps((__m512)total, (__m512bh)lanes, (__m512bh)_mm512_set1_epi32(word));
    if constexpr (sizeof(V) == 32)
      return (V)_mm256_dpbf16_ps((__m256)total, (__m256bh)lanes, (__m256bh)_mm256_set1_epi32(word));
    if constexpr (sizeof(V) == 16)
      return (V)_mm_dpbf16_ps((__m128)total, (__m128bh)lanes, (__m128bh)_mm_set1_epi32(word));
#endif
    typedef typename Register<sizeof(V)>::Integers Integers;
    const Integers both = (int32_t)word - Integers{}, upper = Integers{} + (int32_t)0xffff0000;
    total = fused((V)(both << 16), (V)((Integers)lanes << 16), total);
    return fused((V)(both & upper), (V)((Integers)lanes & upper), total);
  }
}

// SIDE words of weights. A float16 becomes a word of its own; all others lie as words.
template <typename NUMBER>
static inline __attribute__((always_inline)) Floats words_at(const void* from) {
#ifdef HALVES
  if constexpr (std::is_same_v<NUMBER, _Float16>) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#else
    Floats words;
    for (int64_t l = 0; l < SIDE; ++l) words[l] = ((const _Float16*)from)[l];
    return words;
#endif
  }
#endif
  return read<Floats>(from);
}

template <int64_t HALF = SIDE / 2>
static inline __attribute__((always_inline)) void transpose_square(Floats* lines) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < SIDE; ++i)
    if (!(i & HALF)) {
      const Floats first = lines[i], second = lines[i + HALF];
      lines[i] = halves<HALF, false>(first, second, std::make_index_sequence<SIDE>());
      lines[i + HALF] = halves<HALF, true>(first, second, std::make_index_sequence<SIDE>());
    }
  if constexpr (HALF > 1) transpose_square<HALF / 2>(lines);
}

// `count` numbers of a row of y, side by side
static inline void store(const Output& to, int64_t row, int64_t column, int64_t count, Floats value) {
  void* at = to.after(row, column).y;
  if (!to.is_narrow) {
    if (count >= SIDE) std::memcpy(at, &value, WIDEST);
    else std::memcpy(at, &value, 4 * count);
    return;
  }
#if defined(HALVES) && defined(__AVX512F__)
  const auto narrow = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(HALVES)
  _Float16 narrow[SIDE];
  for (int64_t l = 0; l < SIDE; ++l) narrow[l] = value[l];
#else
  typedef uint32_t Bits __attribute__((vector_size(WIDEST)));
  typedef uint16_t Narrows __attribute__((vector_size(WIDEST / 2)));
  const Bits bits = (Bits)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const auto narrow = __builtin_convertvector(value == value ? rounded : bits >> 16 | 64, Narrows);
#endif
  if (count >= SIDE) std::memcpy(at, &narrow, WIDEST / 2);
  else std::memcpy(at, &narrow, 2 * count);
}

// Up to SIDE outputs from `first` on, whose weights begin at `weights`, rows of `bytes`, of ROWS rows in lanes of four
template <Kind KIND, typename NUMBER, int ROWS>
static void square_of_few(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, const Group& g,
                          const Output& to, int64_t first, int64_t count) {
  constexpr int64_t EACH = sizeof(NUMBER);
  const int64_t whole = bytes / EACH;  // words
  const uint32_t* inputs = x.at(g);
  const char* lines[SIDE];
  for (int64_t i = 0; i < SIDE; ++i) lines[i] = weights + std::min(i, count - 1) * bytes;
  Floats totals[2][ROWS] = {};  // of even and of odd words
  const auto add = [&](Floats words, int64_t k) __attribute__((always_inline)) {
    for (int m = 0; m < ROWS; ++m) totals[k % 2][m] = plus<KIND>(totals[k % 2][m], words, inputs[k * 4 + m]);
  };
  int64_t k = 0;
  for (; k + SIDE <= whole; k += SIDE) {
    const int64_t ahead = k + AHEAD * SIDE, next = ahead < whole ? ahead * EACH : (ahead - whole) * EACH + SIDE * bytes;
    Floats square[SIDE];
#pragma GCC unroll 16
    for (int64_t i = 0; i < SIDE; ++i) {
      __builtin_prefetch(weights + i * bytes + next);
      square[i] = words_at<NUMBER>(lines[i] + k * EACH);
    }
    transpose_square(square);
#pragma GCC unroll 16
    for (int64_t j = 0; j < SIDE; ++j) add(square[j], k + j);
  }
  if (k < x.words) {
    Floats square[SIDE];
    for (int64_t i = 0; i < SIDE; ++i) {
      char rest[WIDEST] = {};
      std::memcpy(rest, lines[i] + k * EACH, bytes - k * EACH);
      square[i] = words_at<NUMBER>(rest);
    }
    transpose_square(square);
    for (int64_t j = 0; j < x.words - k; ++j) add(square[j], k + j);
  }
  Floats bias = {};
  for (int64_t i = 0; w.bias && i < count; ++i) bias[i] = to.bias(w, first + i);
  for (int m = 0; m < ROWS; ++m) store(to, g.first + m, first, count, totals[0][m] + totals[1][m] + bias);
}

// Outputs first..end
template <Kind KIND, typename NUMBER>
static void by_outputs(const Matrix& w, const char* weights, int64_t bytes, const Packed& x, const Group& g,
                       const Output& to, int64_t first, int64_t end) {
  constexpr decltype(&square_of_few<KIND, NUMBER, 1>) of_rows[FEW] = {
      square_of_few<KIND, NUMBER, 1>, square_of_few<KIND, NUMBER, 2>, square_of_few<KIND, NUMBER, 3>,
      square_of_few<KIND, NUMBER, 4>};
  for (; first < end; first += SIDE, weights += SIDE * bytes)
    of_rows[g.rows - 1](w, weights, bytes, x, g, to, first, std::min(SIDE, end - first));
}
