// Numbers of any type in memory as a Vector of LANES Real numbers. Vector, Integers, Real and LANES are defined before.

#pragma once
#include <cstdint>
#include <type_traits>

#include "cpu_bfloat16.h"
#include "cpu_vectors.h"

typedef uint16_t Narrow __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

template <typename T>
static Vector load(const T* from) {
  if constexpr (std::is_same_v<T, Real>) {
    return *(const Vector*)from;
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    return (Vector)(__builtin_convertvector(*(const Narrow*)from, Integers) << 16);
  } else {
    typedef T Halves __attribute__((vector_size(LANES * sizeof(T)), aligned(sizeof(T)), may_alias));
    return __builtin_convertvector(*(const Halves*)from, Vector);
  }
}

static Integers to_upper_half(Vector value) {  // to the nearest, ties to even
  const Integers bits = (Integers)value;
  return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : Integers{} + 0x7fc0;
}

template <typename T>
static void store(T* to, Vector value) {
  if constexpr (std::is_same_v<T, Real>)
    *(Vector*)to = value;
  else if constexpr (std::is_same_v<T, Bfloat16>)
    *(Narrow*)to = __builtin_convertvector(to_upper_half(value), Narrow);
  else
    for (int64_t l = 0; l < LANES; ++l) to[l] = (T)value[l];
}
