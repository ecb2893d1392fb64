// Steps of convolutions and recurrences over the next tokens of each row. Compiled for one element type SCALAR.
//
// A call begins at the rows' states and runs `tokens` tokens, or of row b the first lengths[b]. It writes outputs unless
// `out` is null, and the states if `writes`. A number is summed in one order, whatever other rows and tokens a call has,
// and whether it writes: a verification, its commit and steps one by one have equal bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

using Real = SCALAR;
#include "cpu_vectors.h"

constexpr int64_t LANES = WIDEST / sizeof(Real);
typedef Real Vector __attribute__((vector_size(WIDEST), aligned(sizeof(Real)), may_alias));
typedef std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t> Integers __attribute__((vector_size(WIDEST)));

#include "cpu_exp.h"

struct Part {  // a tensor, and the strides of its rows, tokens and heads; numbers of a head lie next to each other
  const Real* data;
  int64_t row, token, head;
  const Real* at(int64_t r, int64_t t, int64_t h = 0) const { return data + r * row + t * token + h * head; }
};

static int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

static Vector load(const Real* from, int64_t count) {
  Vector v = {};
  std::memcpy(&v, from, std::min(count, LANES) * sizeof(Real));
  return v;
}

static Real sum_of(Vector v) {
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) v[l] += v[l + half];
  return v[0];
}

static int64_t count_of(const int64_t* lengths, int64_t row, int64_t tokens) { return lengths ? lengths[row] : tokens; }

struct Convolution {
  int64_t rows, tokens, channels, kernel, silu, threads;
  Part x;              // [rows, tokens, channels], as `out`
  const Real *weight;  // [channels, kernel]
  const Real *bias;    // [channels], or null
  Real *state;         // [rows, kernel, channels]
  Real *out;
};

extern "C" void convolve(const Convolution* call, const int64_t* lengths, int64_t writes) {
  const Convolution s = *call;
#pragma omp parallel for num_threads(s.threads) if (s.threads > 1)
  for (int64_t channel = 0; channel < s.channels; channel += LANES) {
    const int64_t wide = std::min(LANES, s.channels - channel);
    std::vector<Real> weights(s.kernel * LANES);
    for (int64_t l = 0; l < wide; ++l)
      for (int64_t k = 0; k < s.kernel; ++k) weights[k * LANES + l] = s.weight[(channel + l) * s.kernel + k];
    const Vector bias = s.bias ? load(s.bias + channel, wide) : Vector{};
    for (int64_t row = 0; row < s.rows; ++row) {
      const int64_t count = count_of(lengths, row, s.tokens);
      Real* state = s.state + row * s.kernel * s.channels + channel;
      const auto column = [&](int64_t c) {  // of the state and the tokens after it
        return load(c < s.kernel ? state + c * s.channels : s.x.at(row, c - s.kernel) + channel, wide);
      };
      for (int64_t t = 0; s.out && t < count; ++t) {
        Vector sum = bias;
        for (int64_t k = 0; k < s.kernel; ++k) sum = fused(*(Vector*)&weights[k * LANES], column(t + 1 + k), sum);
        const Vector least = Vector{} + LEAST, inverse = exponential(-sum > -least ? -least : -sum);
        if (s.silu) sum = sum / (1 + inverse);
        std::memcpy(s.out + (row * s.tokens + t) * s.channels + channel, &sum, wide * sizeof(Real));
      }
      for (int64_t k = 0; writes && count && k < s.kernel; ++k) {
        const Vector moved = column(count + k);
        std::memcpy(state + k * s.channels, &moved, wide * sizeof(Real));
      }
    }
  }
}

struct DeltaRule {
  int64_t rows, tokens, heads, key_heads, key_size, size, norms, by_channel, threads;
  Part query, key, value;  // [rows, tokens, heads or key_heads, size or key_size]
  Part decay, beta;        // [rows, tokens, heads], and of decay key_size with `by_channel`
  Real *state;             // [rows, heads, key_size, size]
  Real *out;               // [rows, tokens, heads, size]
};

// Keys or queries of a token, of length 1 with `norms`, times `scale`.
static void prepare(const Real* from, Real* to, int64_t size, bool norms, Real scale) {
  Vector squares = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector v = load(from + i, size - i);
    squares = fused(v, v, squares);
  }
  const Real factor = norms ? 1 / std::sqrt(sum_of(squares) + (Real)1e-6) : 1;
  for (int64_t i = 0; i < size; i += LANES) *(Vector*)(to + i) = load(from + i, size - i) * factor * scale;
}

// S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q
extern "C" void delta_rule(const DeltaRule* call, const int64_t* lengths, int64_t writes) {
  const DeltaRule s = *call;
  constexpr int64_t PARTS = 4, WIDTH = PARTS * LANES;  // columns of a state that stay in a core's nearest cache
  const int64_t wide = padded(s.key_size);
#pragma omp parallel for num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < s.rows * s.heads; ++task) {
    const int64_t row = task / s.heads, head = task % s.heads, key_head = head / (s.heads / s.key_heads);
    const int64_t count = count_of(lengths, row, s.tokens);
    if (count == 0) continue;
    static thread_local std::vector<Real> prepared, columns;
    prepared.resize(3 * count * wide);
    columns.resize(s.key_size * WIDTH);
    Real *queries = prepared.data(), *keys = queries + count * wide, *decays = keys + count * wide;
    for (int64_t t = 0; t < count; ++t) {
      prepare(s.query.at(row, t, key_head), queries + t * wide, s.key_size, s.norms, 1 / std::sqrt((Real)s.key_size));
      prepare(s.key.at(row, t, key_head), keys + t * wide, s.key_size, s.norms, 1);
      const Real* g = s.decay.at(row, t, head);
      for (int64_t i = 0; i < wide; i += LANES)
        *(Vector*)(decays + t * wide + i) = exponential(s.by_channel ? load(g + i, s.key_size - i) : Vector{} + *g);
    }
    for (int64_t first = 0; first < s.size; first += WIDTH) {
      const int64_t used = std::min(WIDTH, s.size - first), bytes = used * sizeof(Real);
      Real* state = s.state + task * s.key_size * s.size + first;
      Vector(*local)[PARTS] = (Vector(*)[PARTS])columns.data();
      for (int64_t k = 0; k < s.key_size; ++k) std::memcpy(local[k], state + k * s.size, bytes);
      for (int64_t t = 0; t < count; ++t) {
        const Real *query = queries + t * wide, *key = keys + t * wide, *decay = decays + t * wide;
        Vector sums[PARTS] = {}, values[PARTS] = {};
        for (int64_t k = 0; k < s.key_size; ++k)
          for (int64_t j = 0; j < PARTS; ++j) {
            local[k][j] *= decay[k];
            sums[j] = fused(local[k][j], all_of<Vector>(key[k]), sums[j]);
          }
        std::memcpy(values, s.value.at(row, t, head) + first, bytes);
        for (int64_t j = 0; j < PARTS; ++j) {
          values[j] = (values[j] - sums[j]) * *s.beta.at(row, t, head);
          sums[j] = Vector{};
        }
        for (int64_t k = 0; k < s.key_size; ++k)
          for (int64_t j = 0; j < PARTS; ++j) {
            local[k][j] = fused(values[j], all_of<Vector>(key[k]), local[k][j]);
            sums[j] = fused(local[k][j], all_of<Vector>(query[k]), sums[j]);
          }
        if (s.out) std::memcpy(s.out + ((row * s.tokens + t) * s.heads + head) * s.size + first, sums, bytes);
      }
      for (int64_t k = 0; writes && k < s.key_size; ++k) std::memcpy(state + k * s.size, local[k], bytes);
    }
  }
}

struct Mamba {
  int64_t rows, tokens, heads, groups, size, numbers, by_number, softplus, threads;
  Part x, gate;           // [rows, tokens, heads, size]; no gate: null
  Part dt;                // [rows, tokens, heads]
  Part B, C;              // [rows, tokens, groups, numbers]
  const Real *A;          // [heads], or with `by_number` [heads, numbers]
  const Real *D, *bias;   // [heads], or null; `bias` is that of dt
  Real *state;            // [rows, heads, size, numbers]
  Real *out;              // [rows, tokens, heads, size]
};

// s <- exp(dt A) s + dt B x; y = C s + D x. Mamba 1 has heads of size 1 and a rate for each number of a state.
extern "C" void mamba(const Mamba* call, const int64_t* lengths, int64_t writes) {
  const Mamba s = *call;
  const int64_t wide = padded(s.numbers);
#pragma omp parallel for num_threads(s.threads) if (s.threads > 1)
  for (int64_t task = 0; task < s.rows * s.heads; ++task) {
    const int64_t row = task / s.heads, head = task % s.heads, group = head / (s.heads / s.groups);
    const int64_t count = count_of(lengths, row, s.tokens);
    if (count == 0) continue;
    static thread_local std::vector<Real> memory;
    memory.resize((s.size + 3) * wide);
    Real *decays = memory.data(), *B = decays + wide, *C = B + wide, *local = C + wide;
    Real* state = s.state + task * s.size * s.numbers;
    for (int64_t p = 0; p < s.size; ++p)
      for (int64_t i = 0; i < wide; i += LANES)
        *(Vector*)(local + p * wide + i) = load(state + p * s.numbers + i, s.numbers - i);
    for (int64_t t = 0; t < count; ++t) {
      Real dt = *s.dt.at(row, t, head) + (s.bias ? s.bias[head] : 0);
      if (s.softplus && dt <= 20) dt = std::log1p(std::exp(dt));
      for (int64_t i = 0; i < wide; i += LANES) {
        const Vector A = s.by_number ? load(s.A + head * s.numbers + i, s.numbers - i) : Vector{} + s.A[head];
        *(Vector*)(decays + i) = exponential(A * dt);
        *(Vector*)(B + i) = load(s.B.at(row, t, group) + i, s.numbers - i) * dt;
        *(Vector*)(C + i) = load(s.C.at(row, t, group) + i, s.numbers - i);
      }
      const Real* x = s.x.at(row, t, head);
      for (int64_t p = 0; p < s.size; ++p) {
        Vector sum = {};
        for (int64_t i = 0; i < wide; i += LANES) {
          Vector& numbers = *(Vector*)(local + p * wide + i);
          numbers *= *(Vector*)(decays + i);
          numbers = fused(*(Vector*)(B + i), all_of<Vector>(x[p]), numbers);
          sum = fused(numbers, *(Vector*)(C + i), sum);
        }
        if (!s.out) continue;
        Real y = sum_of(sum);
        if (s.D) y = fused(s.D[head], x[p], y);
        if (s.gate.data) {
          const Real gate = s.gate.at(row, t, head)[p];
          y *= gate / (1 + std::exp(-gate));
        }
        s.out[((row * s.tokens + t) * s.heads + head) * s.size + p] = y;
      }
    }
    for (int64_t p = 0; writes && p < s.size; ++p)
      std::memcpy(state + p * s.numbers, local + p * wide, s.numbers * sizeof(Real));
  }
}
