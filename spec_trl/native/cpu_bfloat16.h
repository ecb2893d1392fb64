// The upper half of a float32.

#pragma once
#include <cstdint>
#include <cstring>

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

// To the nearest, ties to even
template <typename T>
static inline T narrowed(float value) {
  return (T)value;
}

template <>
inline Bfloat16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return {(uint16_t)(bits >> 16 | 64)};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
