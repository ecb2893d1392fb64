// Vectors of a register, and their fused multiply-add. The compiler neither fuses nor reorders by itself
// (-ffp-contract=off, no -ffast-math): it would do so in one inlined copy of a function, and not in another.

#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t WIDEST = 64;  // bytes of a register
#elif defined(__AVX__)
constexpr int64_t WIDEST = 32;
#else
constexpr int64_t WIDEST = 16;
#endif

// a * b + c, rounded once
template <typename V>
static inline __attribute__((always_inline)) V fused(V a, V b, V c) {
  if constexpr (std::is_arithmetic_v<V>) {
    return std::fma(a, b, c);
  } else {
    constexpr bool is_wide = sizeof(a[0]) == 8;
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64 && is_wide) return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
    if constexpr (sizeof(V) == 64 && !is_wide) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#ifdef __FMA__
    if constexpr (sizeof(V) == 32 && is_wide) return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
    if constexpr (sizeof(V) == 32 && !is_wide) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
    if constexpr (sizeof(V) == 16 && is_wide) return (V)_mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c);
    if constexpr (sizeof(V) == 16 && !is_wide) return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
    for (std::size_t l = 0; l < sizeof(V) / sizeof(a[0]); ++l) c[l] = std::fma(a[l], b[l], c[l]);
    return c;
  }
}

// A number in all lanes: to subtract zeros costs no instruction, to add them would, since it changes -0.
template <typename V, typename Number>
static inline __attribute__((always_inline)) V all_of(Number number) {
  return number - V{};
}

template <int64_t BYTES, typename I, std::size_t... LANE>
static inline __attribute__((always_inline)) auto half_of(I v, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(v, v, (BYTES / 4 + LANE)...);
}

// The sum of the parts of a register that are `BYTES` long
template <int64_t BYTES, typename I>
static inline __attribute__((always_inline)) auto folded(I v) {
  if constexpr (sizeof(I) == BYTES) {
    return v;
  } else {
    constexpr auto lanes = std::make_index_sequence<sizeof(I) / 8>();
    return folded<BYTES>(half_of<0>(v, lanes) + half_of<sizeof(I) / 2>(v, lanes));
  }
}
