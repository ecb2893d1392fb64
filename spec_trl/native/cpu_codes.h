// Sums of products of codes: weights of 8 or 4 bits, and rows of x rounded to 8 bits (`cpu_words.h`).

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu_vectors.h"
#include "cpu_words.h"

#ifdef HAS_BYTES
// total + the products of four codes without a sign with four of x, in each lane
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

// Adds the scaled sums of OUT outputs from `first` on, of part `part` of their inputs.
template <int BITS, int OUT, int VECTORS, typename V, typename I>
static inline __attribute__((always_inline)) void add_part(const Matrix& w, const Packed& x, const Group& g,
                                                           int64_t first, int64_t part, const I (*totals)[VECTORS],
                                                           V (*sums)[VECTORS]) {
  const float* of_x = x.sums + g.first * x.parts + part * g.lanes;
  for (int o = 0; o < OUT; ++o) {
    const int64_t place = (first + o) * x.parts + part;
    const V zero = all_of<V>(BITS == 8 ? 128.f : (float)w.zeros[place]), scale = all_of<V>(w.scales[place]);
    for (int v = 0; v < VECTORS; ++v) {
      const V product = fused(zero, read<V>(of_x + v * sizeof(V) / 4), __builtin_convertvector(totals[o][v], V));
      sums[o][v] = fused(product, scale, sums[o][v]);
    }
  }
}

// Sums of OUT outputs, whose codes begin at `codes`, for lanes of x; scales and zeros change every `w.in / x.parts`
// inputs. Not inline, for then `sums` would take the registers of x.
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
    add_part<BITS, OUT>(w, x, g, first, part, totals, sums);
  }
  for (int v = 0; v < VECTORS; ++v) {
    const V scale = read<V>(x.scales + g.first + v * LANES);
    for (int o = 0; o < OUT; ++o) sums[o][v] = sums[o][v] * scale;
  }
}

// Words of a register from FIRST on, each TIMES times
template <int64_t FIRST, int64_t TIMES, typename I, std::size_t... LANE>
static inline __attribute__((always_inline)) auto repeated(I words, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(words, words, (FIRST + LANE / TIMES)...);
}

template <typename F, std::size_t... J>
static inline __attribute__((always_inline)) void for_each(F f, std::index_sequence<J...>) {
  (f(std::integral_constant<int64_t, J>()), ...);
}

// The same for fewer rows than a register has lanes: it takes several words of each row at once. The sums, of integers,
// are those of any other order.
template <int BITS, int OUT, typename V>
static __attribute__((noinline)) void add_codes_of_few(const Matrix& w, const char* codes, const Packed& x,
                                                       const Group& g, int64_t first, V (*sums)[1]) {
  typedef Register<WIDEST>::Integers Integers;
  constexpr int64_t LANES = sizeof(V) / 4, ALL = WIDEST / 4, EACH = ALL / LANES;  // words of a row in a register
  constexpr int64_t CODES = BITS == 8 ? ALL : 8, TIMES = CODES / EACH;            // words of codes at once
  constexpr auto lanes = std::make_index_sequence<ALL>();
  const int64_t bytes = w.in * BITS / 8, steps = x.words / x.parts;
  const char* next = codes + OUT * bytes;
  for (int64_t part = 0; part < x.parts; ++part) {
    Integers totals[OUT] = {};
    const auto add = [&](const uint32_t* words, const char* from, int64_t stride) __attribute__((always_inline)) {
      Integers inputs[TIMES], others[TIMES];
      for (int j = 0; j < TIMES; ++j) {
        inputs[j] = in_register(read<Integers>(words + j * ALL));
        if (BITS == 4) others[j] = in_register(read<Integers>(words + 8 * LANES + j * ALL));
      }
      for (int o = 0; o < OUT; ++o) {
        const auto given = read<typename Register<4 * CODES>::Integers>(from + o * stride);
        const auto both = in_register(BITS == 8 ? given ^ (int32_t)0x80808080 : given);
        for_each([&](auto j) __attribute__((always_inline)) {
          const Integers some = repeated<j * EACH, LANES>(both, lanes);
          totals[o] = plus_codes(totals[o], inputs[j], BITS == 8 ? some : some & 0x0f0f0f0f);
          if (BITS == 4) totals[o] = plus_codes(totals[o], others[j], some >> 4 & 0x0f0f0f0f);
        }, std::make_index_sequence<TIMES>());
      }
    };
    int64_t k = part * steps;
    const int64_t end = k + steps, words_at_once = CODES * 8 / BITS;
    for (; k + words_at_once <= end; k += words_at_once) {
      const int64_t at = k * BITS / 2;
      if (at % 64 == 0)
        for (int o = 0; o < OUT; ++o) __builtin_prefetch(next + at * OUT + 64 * o);
      add(x.at(g) + k * LANES, codes + at, bytes);
    }
    if (BITS == 8 && k < end) {
      uint32_t words[CODES * LANES] = {}, left[OUT][CODES] = {};
      std::memcpy(words, x.at(g) + k * LANES, (end - k) * LANES * 4);
      for (int o = 0; o < OUT; ++o) std::memcpy(left[o], codes + o * bytes + 4 * k, 4 * (end - k));
      add(words, (const char*)left, sizeof left[0]);
    }
    typename Register<sizeof(V)>::Integers few[OUT][1];
    for (int o = 0; o < OUT; ++o) few[o][0] = folded<sizeof(V)>(totals[o]);
    add_part<BITS, OUT>(w, x, g, first, part, few, sums);
  }
  const V scale = read<V>(x.scales + g.first);
  for (int o = 0; o < OUT; ++o) sums[o][0] = sums[o][0] * scale;
}
#endif
