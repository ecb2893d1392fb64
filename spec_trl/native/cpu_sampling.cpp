// Draws tokens from logits by Gumbel noise, without storing the noise, and computes log-probabilities. Rows of logits are
// float32. A number depends on its row alone: parts of a row have one size, whatever the number of rows and threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu_vectors.h"

using Real = float;
constexpr int64_t LANES = WIDEST / sizeof(Real);
constexpr int64_t PART = 8192;  // words that a thread takes at once
typedef Real Vector __attribute__((vector_size(WIDEST), aligned(sizeof(Real)), may_alias));
typedef uint32_t Integers __attribute__((vector_size(WIDEST), aligned(4), may_alias));
typedef int32_t Signed __attribute__((vector_size(WIDEST)));

#include "cpu_exp.h"

// log(x) of normal numbers: 2 atanh(s) of s = (m - 1) / (m + 1) with x = m 2^e and m between 0.7 and 1.42
static Vector logarithm(Vector x) {
  const Signed bits = (Signed)x, exponent = (bits - 0x3f3504f3) >> 23;
  const Vector f = (Vector)(bits - (exponent << 23)) - 1, s = f / (f + 2), square = s * s;
  Vector series = all_of<Vector>(2 / 9.f);
  for (const Real term : {2 / 7.f, 2 / 5.f, 2 / 3.f}) series = fused(series, square, all_of<Vector>(term));
  const Vector e = __builtin_convertvector(exponent, Vector), rest = fused(series * square, s, s + s);
  return fused(e, all_of<Vector>(0x1.62e4p-1f), fused(e, all_of<Vector>(0x1.7f7d1cp-20f), rest));
}

// Standard Gumbel noise of words first, first + 1, ... under a key; see `gumbel_noise` in noise.py.
static Vector noise_at(int64_t key, int64_t first) {
  constexpr uint32_t COUNTER = 0x9E3779B1;
  Integers x;
  for (int64_t l = 0; l < LANES; ++l) x[l] = l;
  x = (x + (uint32_t)first) * COUNTER ^ (uint32_t)key;
  x *= 0x85EBCA6Bu;
  x = (x ^ x >> 15) + (uint32_t)(key >> 32);
  x *= 0xC2B2AE35u;
  x = (x ^ x >> 13) + (uint32_t)key;
  x *= 0x27D4EB2Fu;
  x = (x ^ x >> 16) & 0x7fffffff;
  const Real to_unit = 0x1p-31 * (1 - 0x1p-24);
  const Vector u = (__builtin_convertvector((Signed)x, Vector) + 0.5f) * to_unit, w = 1 - u;
  const Vector log1p = logarithm(w) - (u - (1 - w)) / w;  // of -u, by what w rounds away
  return -logarithm(-log1p);
}

static int64_t parts_of(int64_t words) { return (words + PART - 1) / PART; }

// Noise [rows, words] of `keys` [rows]
extern "C" void gumbel_noise(const int64_t* keys, int64_t rows, int64_t words, float* out, int64_t threads) {
  const int64_t parts = parts_of(words);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * words > PART)
  for (int64_t task = 0; task < rows * parts; ++task) {
    const int64_t row = task / parts, first = task % parts * PART, end = std::min(words, first + PART);
    for (int64_t i = first; i < end; i += LANES) {
      const Vector noise = noise_at(keys[row], i);
      std::memcpy(out + row * words + i, &noise, std::min(LANES, end - i) * sizeof(Real));
    }
  }
}

struct Best {
  float score;
  int64_t token;
};

// Tokens [rows] of the largest logit plus noise, the first of equal ones, and these sums, which are NaN if one is
extern "C" void draw(const float* logits, const int64_t* keys, int64_t rows, int64_t words, int64_t* tokens,
                     float* scores, int64_t threads) {
  const int64_t parts = parts_of(words);
  std::vector<Best> found(rows * parts);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * words > PART)
  for (int64_t task = 0; task < rows * parts; ++task) {
    const int64_t row = task / parts, first = task % parts * PART, end = std::min(words, first + PART);
    const float* from = logits + row * words;
    constexpr Real LOWEST = -std::numeric_limits<Real>::infinity();
    Vector most = all_of<Vector>(LOWEST), broken = {};
    Signed at = {};
    for (int64_t i = first; i < end; i += LANES) {
      Vector given = all_of<Vector>(LOWEST);
      std::memcpy(&given, from + i, std::min(LANES, end - i) * sizeof(Real));
      const Vector score = given + noise_at(keys[row], i);
      const Signed is_more = score > most;
      most = is_more ? score : most;
      at = is_more ? Signed{} + (int32_t)i : at;
      broken = score == score ? broken : score;
    }
    Best best = {LOWEST, first};
    for (int64_t l = 0; l < LANES; ++l) {
      const Best other = {most[l], at[l] + l};
      if (other.score > best.score || (other.score == best.score && other.score > LOWEST && other.token < best.token))
        best = other;
      if (broken[l] != broken[l]) best.score = broken[l];
      if (best.score != best.score) break;
    }
    found[task] = best;
  }
  for (int64_t row = 0; row < rows; ++row) {
    Best best = found[row * parts];
    for (int64_t part = 1; part < parts && best.score == best.score; ++part) {
      const Best& other = found[row * parts + part];
      if (!(other.score <= best.score)) best = other;
    }
    tokens[row] = best.token;
    scores[row] = best.score;
  }
}

// log softmax(logits) [rows, words] at `tokens` [rows]
extern "C" void logprobs(const float* logits, const int64_t* tokens, int64_t rows, int64_t words, float* out,
                         int64_t threads) {
  const int64_t parts = parts_of(words);
  std::vector<double> found(rows * parts);
  std::vector<float> highest(rows * parts);
  const auto each_part = [&](auto compute) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * words > PART)
    for (int64_t task = 0; task < rows * parts; ++task) {
      const int64_t row = task / parts, first = task % parts * PART, end = std::min(words, first + PART);
      compute(task, row, first, end);
    }
  };
  each_part([&](int64_t task, int64_t row, int64_t first, int64_t end) {
    float most = -std::numeric_limits<float>::infinity();
    bool is_broken = false;
    for (int64_t i = first; i < end; ++i) {
      const float value = logits[row * words + i];
      most = value > most ? value : most;
      is_broken |= value != value;
    }
    highest[task] = is_broken ? std::numeric_limits<float>::quiet_NaN() : most;
  });
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t part = 1; part < parts; ++part) {
      float& most = highest[row * parts];
      const float other = highest[row * parts + part];
      if (most == most && !(other <= most)) most = other;
    }
  each_part([&](int64_t task, int64_t row, int64_t first, int64_t end) {
    const float most = highest[row * parts];
    Vector sums = {};
    for (int64_t i = first; i < end; i += LANES) {
      Vector given = all_of<Vector>(-std::numeric_limits<Real>::infinity());
      std::memcpy(&given, logits + row * words + i, std::min(LANES, end - i) * sizeof(Real));
      sums += exponential(given - most);
    }
    double total = 0;
    for (int64_t l = 0; l < LANES; ++l) total += sums[l];
    found[task] = total;
  });
  for (int64_t row = 0; row < rows; ++row) {
    double total = 0;
    for (int64_t part = 0; part < parts; ++part) total += found[row * parts + part];
    const double token = logits[row * words + tokens[row]];
    out[row] = (float)(token - highest[row * parts] - std::log(total));
  }
}
