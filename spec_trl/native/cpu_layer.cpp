// The operations of a decoder layer between its matrix products, and the whole layer. Compiled for one type of numbers,
// SCALAR: float or Bfloat16. Under autocast products take and give SCALAR, and the residual stream, the weights of norms
// and angles are WIDE. Sums are in float32; a result is rounded to the type that the family gives it. Rows are
// `[rows, size]`, and contiguous. A number is computed in one order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "cpu_bfloat16.h"
#include "cpu_structs.h"
#include "cpu_vectors.h"

#ifndef WIDE
#define WIDE SCALAR
#endif
using Wide = WIDE;
using Real = float;
constexpr int64_t LANES = WIDEST / sizeof(Real);
constexpr int64_t MOST_TOKENS = 256;      // at once, whose memory stays: 50 MiB in bfloat16 for 7 B parameters
constexpr int64_t PER_THREAD = 1 << 17;   // products in `down`: with fewer, a second thread saves less than waking it takes
constexpr int64_t MOST_TURNS = 1 << 10;   // of a thread that waits, before it lets others run: some 50 microseconds
constexpr bool IS_NARROW = std::is_same_v<SCALAR, Bfloat16>;
typedef Real Vector __attribute__((vector_size(WIDEST), aligned(sizeof(Real)), may_alias));
typedef uint32_t Integers __attribute__((vector_size(WIDEST)));

#include "cpu_exp.h"
#include "cpu_scalars.h"

template <typename T>
static Vector rounded(Vector value) {
  if constexpr (std::is_same_v<T, Bfloat16>) return (Vector)(to_upper_half(value) << 16);
  return value;
}

// The numbers of a row of `size` from i on, and zeros.
template <typename T>
static inline Vector at(const T* row, int64_t i, int64_t size) {
  if (i + LANES <= size) return load(row + i);
  T padded[LANES] = {};
  std::memcpy(padded, row + i, (size - i) * sizeof(T));
  return load(padded);
}

template <typename T>
static inline void put(T* row, int64_t i, int64_t size, Vector value) {
  if (i + LANES <= size) return store(row + i, value);
  T padded[LANES];
  store(padded, value);
  std::memcpy(row + i, padded, (size - i) * sizeof(T));
}

template <typename T>
static void add(const T* a, const Wide* b, Wide* to, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) put(to, i, size, at(a, i, size) + at(b, i, size));
}

// 1 / sqrt(mean of squares + eps)
template <typename T>
static float factor_of(const T* x, int64_t size, double eps) {
  Vector squares = {};
  for (int64_t i = 0; i < size; i += LANES) squares = fused(at(x, i, size), at(x, i, size), squares);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) squares[l] += squares[l + half];
  return 1 / std::sqrt(squares[0] / size + (float)eps);
}

struct Norm {
  const Wide* weight;  // null: there is no such norm
  double eps;
  double shift;  // is added to weights, in float32; negative: it is not, and rows are rounded before they are weighted
};

template <typename T>
static Vector normed(const T* x, const Wide* weight, double shift, float factor, int64_t i, int64_t size) {
  const Vector row = at(x, i, size) * factor, weights = at(weight, i, size);
  return shift < 0 ? rounded<Wide>(weights * rounded<T>(row)) : rounded<T>(row * (weights + (Real)shift));
}

template <typename T, typename OUT>
static void norm_row(const Norm& n, const T* x, OUT* out, int64_t size) {  // which may be the same
  const float factor = factor_of(x, size, n.eps);
  for (int64_t i = 0; i < size; i += LANES) put(out, i, size, normed(x, n.weight, n.shift, factor, i, size));
}

// See `rms_norm`. All threads of a team call it.
template <typename T>
static void norm_rows(const T* x, const Norm* branch, const Wide* residual, Wide* total, const Norm* norm, SCALAR* out,
                      int64_t rows, int64_t size) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * size;
    if (!residual) {
      norm_row(*norm, from, out + row * size, size);
      continue;
    }
    Wide* sum = total + row * size;
    if (branch) {
      norm_row(*branch, from, sum, size);
      add(sum, residual + row * size, sum, size);
    } else {
      add(from, residual + row * size, sum, size);
    }
    if (norm) norm_row(*norm, sum, out + row * size, size);
  }
}

// x, normed by `branch` (null: not), + residual into total (null: x alone, and no total), and its norm (null: none)
// into out; all rows are contiguous
extern "C" void rms_norm(const SCALAR* x, const Norm* branch, const Wide* residual, Wide* total, const Norm* norm,
                         SCALAR* out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  norm_rows(x, branch, residual, total, norm, out, rows, size);
}

// See `gate_multiply`. All threads of a team call it.
static void gate_rows(const SCALAR* gate, const SCALAR* up, SCALAR* out, int64_t rows, int64_t size,
                      const int64_t* strides, int64_t is_gelu) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; i += LANES) {
      const Vector a = at(gate + row * strides[0], i, size), b = at(up + row * strides[1], i, size);
      // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), and 1.59... = 2 sqrt(2 / pi)
      const Vector power = is_gelu ? -1.5957691216057308f * (a + 0.044715f * a * a * a) : -a;
      const Vector inverse = exponential(power > -LEAST ? all_of<Vector>(-LEAST) : power);
      put(out + row * size, i, size, rounded<SCALAR>(a / (1 + inverse)) * b);
    }
}

// silu(gate) * up, or tanh-GELU of gate; rows of gate and up are `strides` apart, those of out are contiguous
extern "C" void gate_multiply(const SCALAR* gate, const SCALAR* up, SCALAR* out, int64_t rows, int64_t size,
                              const int64_t* strides, int64_t is_gelu, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  gate_rows(gate, up, out, rows, size, strides, is_gelu);
}

struct Heads {
  int64_t rows, count, heads, kv_heads, head_size, half;  // `half` of what is rotated, at a head's begin
  int64_t query[3], key[3], value[3];  // strides of rows, tokens, heads
  int64_t cosine[2], sine[2];          // strides of rows, tokens
  int64_t to_row[2], to_column[2];     // strides of rows, tokens
  int64_t keys[3], values[3];          // strides of rows, heads, columns
  int64_t threads, has_wide_angles;    // float32, whatever SCALAR is: then the sum of products is rounded, they are not
};

// One head of one token: normed (no weight: not), then rotated by its position (no angles: not, and not normed).
template <typename Angle>
static void rotate(const SCALAR* from, SCALAR* to, const Norm& n, const Angle* cosine, const Angle* sine,
                   int64_t size, int64_t half) {
  if (!cosine) {
    std::memcpy(to, from, size * sizeof(SCALAR));
    return;
  }
  const float factor = n.weight ? factor_of(from, size, n.eps) : 1;
  const auto part = [&](int64_t start, int64_t i, int64_t end) {
    const SCALAR* x = from + start;
    return n.weight ? normed(x, n.weight + start, n.shift, factor, i, end) : at(x, i, end);
  };
  const int64_t rest = size - 2 * half;
  for (int64_t i = 0; i < rest; i += LANES) put(to + 2 * half, i, rest, part(2 * half, i, rest));
  for (int64_t i = 0; i < half; i += LANES) {
    const Vector low = part(0, i, half), high = part(half, i, half);
    const Vector turned = rounded<Angle>(high * at(sine, i, half));
    const Vector turned_low = rounded<Angle>(low * at(sine + half, i, half));
    if constexpr (std::is_same_v<Angle, Bfloat16>) {
      put(to, i, half, rounded<Angle>(low * at(cosine, i, half)) - turned);
      put(to + half, i, half, rounded<Angle>(high * at(cosine + half, i, half)) + turned_low);
    } else {
      put(to, i, half, fused(low, at(cosine, i, half), -turned));
      put(to + half, i, half, fused(high, at(cosine + half, i, half), turned_low));
    }
  }
}

// queries, keys, values [rows, count, heads, head_size]; to_rows and to_columns [rows, count], where the cache's
// buffers are written; rotated queries to out [rows, heads, count, head_size]. All threads of a team call it.
template <typename Angle>
static void rotate_all(const SCALAR* query, const SCALAR* key, const SCALAR* value, const Angle* cosine,
                       const Angle* sine, SCALAR* keys, SCALAR* values, const int64_t* to_rows,
                       const int64_t* to_columns, const Norm* of_queries, const Norm* of_keys, SCALAR* out,
                       const Heads& s) {
#pragma omp for schedule(static) nowait
  for (int64_t token = 0; token < s.rows * s.count; ++token) {
    const int64_t row = token / s.count, step = token % s.count;
    const Angle* c = cosine ? cosine + row * s.cosine[0] + step * s.cosine[1] : nullptr;
    const Angle* d = cosine ? sine + row * s.sine[0] + step * s.sine[1] : nullptr;
    const int64_t to_row = to_rows[row * s.to_row[0] + step * s.to_row[1]];
    const int64_t column = to_columns[row * s.to_column[0] + step * s.to_column[1]];
    for (int64_t h = 0; h < s.heads; ++h) {
      const SCALAR* from = query + row * s.query[0] + step * s.query[1] + h * s.query[2];
      rotate(from, out + ((row * s.heads + h) * s.count + step) * s.head_size, *of_queries, c, d, s.head_size, s.half);
    }
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      SCALAR* to = keys + to_row * s.keys[0] + h * s.keys[1] + column * s.keys[2];
      rotate(key + row * s.key[0] + step * s.key[1] + h * s.key[2], to, *of_keys, c, d, s.head_size, s.half);
      const SCALAR* from = value + row * s.value[0] + step * s.value[1] + h * s.value[2];
      SCALAR* stored = values + to_row * s.values[0] + h * s.values[1] + column * s.values[2];
      for (int64_t i = 0; i < s.head_size; ++i) stored[i] = from[i];
    }
  }
}

static void rotate_in_team(const SCALAR* query, const SCALAR* key, const SCALAR* value, const void* cosine,
                           const void* sine, SCALAR* keys, SCALAR* values, const int64_t* to_rows,
                           const int64_t* to_columns, const Norm* of_queries, const Norm* of_keys, SCALAR* out,
                           const Heads* heads) {
  const auto rotate_by = [&](auto angle) {
    using Angles = const decltype(angle)*;
    rotate_all(query, key, value, (Angles)cosine, (Angles)sine, keys, values, to_rows, to_columns, of_queries, of_keys,
               out, *heads);
  };
  heads->has_wide_angles ? rotate_by(float{}) : rotate_by(SCALAR{});
}

extern "C" void rotate_and_write(const SCALAR* query, const SCALAR* key, const SCALAR* value, const void* cosine,
                                 const void* sine, SCALAR* keys, SCALAR* values, const int64_t* to_rows,
                                 const int64_t* to_columns, const Norm* of_queries, const Norm* of_keys, SCALAR* out,
                                 const Heads* heads) {
#pragma omp parallel num_threads(heads->threads) if (heads->threads > 1)
  rotate_in_team(query, key, value, cosine, sine, keys, values, to_rows, to_columns, of_queries, of_keys, out, heads);
}

typedef void Attend(const SCALAR* queries, const SCALAR* keys, const SCALAR* values, const int64_t* spans,
                    const float* sinks, SCALAR* output, const Sizes*, double scale, double softcap);

struct Layer {
  // Siblings, which one call multiplies, are neighbours. Of joined ones the first is the whole, and others are empty.
  Matrix query, key, value, attention_out, gate, up, down;
  // `of_heads` and `of_product` are given to the last products of attention and the MLP, whose results the norms
  // `after_` them take
  Norm before_attention, of_queries, of_keys, of_heads, after_attention, before_mlp, of_product, after_mlp;
  double scale, softcap;  // of attention; 0: no cap
  int64_t is_gelu;        // or SiLU
  int64_t rotates;        // queries and keys
  int64_t norms_all;      // heads of a token together, before they are rotated
};

// Tensors of one call: `hidden`, [tokens, hidden], is updated in place; attention reads the rows of a cache from
// `first_row` on
struct Call {
  Wide* hidden;
  const int64_t *to_rows, *to_columns;
  int64_t span_width, rows, count, heads, kv_heads, head_size, half, first_row;
  int64_t cosine_strides[2], sine_strides[2], to_row_strides[2], to_column_strides[2], key_strides[3];
  int64_t threads, has_wide_angles;
  const Products* products;
  Attend* attend_in_team;
};

static const Norm* given(const Norm& n) { return n.weight ? &n : nullptr; }

// A layer's products, and what its steps write, [tokens, ...]: memory that the next layer overwrites
struct Steps {
  int64_t tokens, hidden, inner, queries, keys, width;
  Wide* residual;
  SCALAR *normed, *projected, *rotated, *attended, *gated, *product;  // gated: [tokens, 2, inner]
  Product projections, attention_out, gates, down;

  static int64_t numbers(const Layer& l, const Call& c) {  // of a token
    return l.query.in + 3 * c.heads * c.head_size + 2 * c.kv_heads * c.head_size + 3 * l.down.in;
  }

  Steps(const Layer& l, const Call& c, Wide* sums, SCALAR* memory)
      : tokens(c.rows * c.count), hidden(l.query.in), inner(l.down.in), residual(sums), normed(memory) {
    queries = c.heads * c.head_size;
    keys = c.kv_heads * c.head_size;
    width = queries + 2 * keys;
    projected = normed + tokens * hidden;
    rotated = projected + tokens * width;
    attended = rotated + tokens * queries;
    gated = attended + tokens * queries;
    product = gated + 2 * tokens * inner;
    // Without a norm, products read the residual stream, which is SCALAR then.
    const void* input = l.before_attention.weight ? (const void*)normed : c.hidden;
    const void* of_mlp = l.before_mlp.weight ? (const void*)normed : residual;
    projections = {&l.query, l.key.weights ? 3 : 1, input, hidden, tokens, projected, width};
    attention_out = {&l.attention_out, 1, attended, queries, tokens, normed, hidden};
    gates = {&l.gate, l.up.weights ? 2 : 1, of_mlp, hidden, tokens, gated, 2 * inner};
    down = {&l.down, 1, product, inner, tokens, normed, hidden};
    for (Product* each : {&projections, &attention_out, &gates, &down}) {
      each->is_narrow = IS_NARROW;
      each->threads = c.threads;
      c.products->prepare(each);
    }
  }
};

// A thread of a team, which shares `arrivals`
struct Member {
  const Products& products;
  int64_t* arrivals;
  int64_t met = 0, piece = 0;
  const Product* next = nullptr;

  // Returns when all threads are here. One that waits reads the weights ahead that it will multiply in `following`, or
  // null: memory would do nothing meanwhile.
  void meet(const Product* following) {
    const int64_t team = omp_get_num_threads();
    if (team == 1) return;
    if (following != next) piece = 0;
    next = following;
    const int64_t all = ++met * team;
    __atomic_fetch_add(arrivals, 1, __ATOMIC_ACQ_REL);
    for (int64_t turn = 0; __atomic_load_n(arrivals, __ATOMIC_ACQUIRE) < all; ++turn) {
      if (next && products.fetch(*next, piece))
        ++piece;
      else if (turn > MOST_TURNS)
        std::this_thread::yield();  // to the thread that it waits for
#ifdef __x86_64__
      else
        __builtin_ia32_pause();
#endif
    }
  }

  void multiply(const Product& p, const Product* following) {
    products.pack(p);
    meet(&p);
    products.run(p);
    meet(following);
  }
};

static void decoder_layer(const Layer& l, SCALAR* all_keys, SCALAR* all_values, const int64_t* spans,
                          const void* cosine, const void* sine, const Call& c, const Steps& s,
                          const Product* following, Member& team) {
  const auto norm = [&](const Norm& n, const auto* x, SCALAR* out, int64_t size) {
    norm_rows(x, nullptr, nullptr, nullptr, &n, out, s.tokens, size);
  };

  if (l.before_attention.weight) norm(l.before_attention, c.hidden, s.normed, s.hidden);
  team.meet(&s.projections);
  team.multiply(s.projections, &s.attention_out);
  if (l.norms_all) {
    const auto norm_parts = [&](const Norm& n, SCALAR* part, int64_t size) {
#pragma omp for schedule(static) nowait
      for (int64_t token = 0; token < s.tokens; ++token) norm_row(n, part + token * s.width, part + token * s.width, size);
    };
    norm_parts(l.of_queries, s.projected, s.queries);
    norm_parts(l.of_keys, s.projected + s.queries, s.keys);
  }

  static const Norm none = {};
  Heads heads = {c.rows, c.count, c.heads, c.kv_heads, c.head_size, c.half};
  for (int64_t* strides : {heads.query, heads.key, heads.value}) {
    strides[0] = c.count * s.width;
    strides[1] = s.width;
    strides[2] = c.head_size;
  }
  std::copy_n(c.cosine_strides, 2, heads.cosine);
  std::copy_n(c.sine_strides, 2, heads.sine);
  std::copy_n(c.to_row_strides, 2, heads.to_row);
  std::copy_n(c.to_column_strides, 2, heads.to_column);
  std::copy_n(c.key_strides, 3, heads.keys);
  std::copy_n(c.key_strides, 3, heads.values);
  heads.has_wide_angles = c.has_wide_angles;
  rotate_in_team(s.projected, s.projected + s.queries, s.projected + s.queries + s.keys, l.rotates ? cosine : nullptr,
                 sine, all_keys, all_values, c.to_rows, c.to_columns, l.norms_all ? &none : &l.of_queries,
                 l.norms_all ? &none : &l.of_keys, s.rotated, &heads);
  team.meet(&s.attention_out);

  Sizes sizes = {c.rows, c.kv_heads, c.heads / c.kv_heads, c.count};
  sizes.query_strides[0] = s.queries * c.count;
  sizes.query_strides[1] = c.count * c.head_size;
  sizes.query_strides[2] = c.head_size;
  std::copy_n(c.key_strides, 3, sizes.key_strides);
  sizes.span_width = c.span_width;
  const int64_t start = c.first_row * c.key_strides[0];
  c.attend_in_team(s.rotated, all_keys + start, all_values + start, spans, nullptr, s.attended, &sizes, l.scale,
                   l.softcap);
  team.meet(&s.attention_out);

  if (l.of_heads.weight) {
    norm(l.of_heads, s.attended, s.attended, s.queries);
    team.meet(&s.attention_out);
  }
  team.multiply(s.attention_out, &s.gates);
  norm_rows(s.normed, given(l.after_attention), c.hidden, s.residual, given(l.before_mlp), s.normed, s.tokens, s.hidden);
  team.meet(&s.gates);
  team.multiply(s.gates, &s.down);
  const int64_t strides[2] = {2 * s.inner, 2 * s.inner};
  gate_rows(s.gated, s.gated + s.inner, s.product, s.tokens, s.inner, strides, l.is_gelu);
  if (l.of_product.weight) norm(l.of_product, s.product, s.product, s.inner);
  team.meet(&s.down);
  team.multiply(s.down, following);
  norm_rows(s.normed, given(l.after_mlp), s.residual, c.hidden, nullptr, nullptr, s.tokens, s.hidden);
}

// Layers one after the other; of each: `keys` and `values`, the whole buffers, `spans` as in cpu_attention.cpp, and
// angles. A token sees those before it, so many tokens are computed in parts: some rows, or some tokens of a row.
extern "C" void decoder_layers(const Layer* layers, int64_t number, SCALAR* const* keys, SCALAR* const* values,
                               const int64_t* const* spans, const char* const* cosines, const char* const* sines,
                               const Call* call) {
  static thread_local std::vector<Wide> sums;
  static thread_local std::vector<SCALAR> numbers;
  static thread_local std::vector<Steps> of_layers;
  const Call& c = *call;
  const int64_t rows = std::max<int64_t>(1, MOST_TOKENS / c.count), count = std::min(c.count, MOST_TOKENS);
  const int64_t bytes = c.has_wide_angles ? sizeof(float) : sizeof(SCALAR);  // of an angle
  for (int64_t row = 0; row < c.rows; row += rows)
    for (int64_t start = 0; start < c.count; start += count) {
      Call part = c;
      const int64_t first = row * c.count + start;
      const int64_t cosine = bytes * (row * c.cosine_strides[0] + start * c.cosine_strides[1]);
      const int64_t sine = bytes * (row * c.sine_strides[0] + start * c.sine_strides[1]);
      part.rows = std::min(rows, c.rows - row);
      part.count = std::min(count, c.count - start);
      part.first_row += row;
      part.hidden += first * layers->query.in;
      part.to_rows += row * c.to_row_strides[0] + start * c.to_row_strides[1];
      part.to_columns += row * c.to_column_strides[0] + start * c.to_column_strides[1];
      const int64_t work = part.rows * part.count * layers->down.in * layers->down.out;
      part.threads = std::min(c.threads, 1 + work / PER_THREAD);
      const int64_t tokens = part.rows * part.count;
      for (int64_t i = 0; i < number; ++i) {
        sums.resize(std::max<int64_t>(sums.size(), tokens * layers[i].query.in));
        numbers.resize(std::max<int64_t>(numbers.size(), tokens * Steps::numbers(layers[i], part)));
      }
      of_layers.clear();
      for (int64_t i = 0; i < number; ++i) of_layers.emplace_back(layers[i], part, sums.data(), numbers.data());
      const Steps* steps = of_layers.data();
      int64_t arrivals = 0;
#pragma omp parallel num_threads(part.threads) if (part.threads > 1)
      {
        Member team = {*c.products, &arrivals};
        for (int64_t i = 0; i < number; ++i)
          decoder_layer(layers[i], keys[i], values[i], spans[i] + first * c.span_width, cosines[i] + cosine,
                        sines[i] + sine, part, steps[i],
                        i + 1 < number ? &steps[i + 1].projections : nullptr, team);
      }
    }
}
