// exp of a Vector of Real numbers; Integers are as many of their width, without a sign. The three are defined before.

#pragma once
#include <cstdint>

#include "cpu_vectors.h"

// exp(x) - 1 = power - 1 + power * rest, with rest = exp(r) - 1 for the remainder r of x by log(2)
static void split_exp(Vector x, Vector& power, Vector& rest) {
  constexpr bool is_wide = sizeof(Real) == 8;
  constexpr Real ROUND = is_wide ? 6755399441055744. : 12582912.f;  // 1.5 * 2^bits: a number that is added to it is rounded
  constexpr Real HIGH = is_wide ? 0x1.62e42fee00000p-1 : 0x1.62e4p-1f;  // of log(2): times n without rounding
  constexpr Real LOW = is_wide ? 0x1.a39ef35793c76p-33 : 0x1.7f7d1cp-20f;
  constexpr int TERMS = is_wide ? 13 : 7;  // of the series; the next one is below the last bit
  const Vector shifted = fused(x, all_of<Vector>((Real)1.4426950408889634), all_of<Vector>(ROUND)), n = shifted - ROUND;
  const Vector r = fused(n, all_of<Vector>(-LOW), fused(n, all_of<Vector>(-HIGH), x));
  Real factorial = 1;
  for (int k = 2; k <= TERMS; ++k) factorial *= k;
  Vector series = all_of<Vector>(1 / factorial);
  for (int k = TERMS; k > 1; --k) series = fused(series, r, all_of<Vector>(1 / (factorial /= k)));
  rest = series * r;
  const Integers exponent = (Integers)shifted - (Integers)all_of<Vector>(ROUND);
  power = (Vector)((exponent + (is_wide ? 1023 : 127)) << (is_wide ? 52 : 23));
}

constexpr Real LEAST = sizeof(Real) == 8 ? -708 : -87;  // exp of less is not a normal number, and 0 here

static Vector exponential(Vector x) {
  Vector power, rest;
  split_exp(x, power, rest);
  return x < LEAST ? Vector{} : fused(power, rest, power);
}
