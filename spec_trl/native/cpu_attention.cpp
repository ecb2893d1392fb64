// Attention over a ragged K/V cache. Compiled for one element type SCALAR and one HEAD_SIZE.
//
// A query is summed in one order, whatever other queries, rows and columns a call has: its columns ascend, in blocks
// that begin at multiples of BLOCK, and a block continues the sums of the blocks before it. Columns that a query does
// not see are not added, or in bfloat16 added 0 times.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu_bfloat16.h"
#include "cpu_structs.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"

// Sums are in float32, of double in double.
using Real = std::conditional_t<std::is_same_v<SCALAR, double>, double, float>;
using Integer = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
// Of a register, or the largest power of two that divides a head.
constexpr int64_t LANES = std::min<int64_t>(WIDEST / sizeof(Real), HEAD_SIZE & -HEAD_SIZE);
constexpr int64_t VECTORS = HEAD_SIZE / LANES;
// Whether products multiply pairs of bfloat16 numbers, in tiles of 16 x 64.
#ifdef __AVX512BF16__
constexpr bool PAIRS = std::is_same_v<SCALAR, Bfloat16> && HEAD_SIZE % 64 == 0;
#else
constexpr bool PAIRS = false;
#endif
// Columns whose keys, or values, take a third of the L1 cache at most.
constexpr int64_t BLOCK = PAIRS ? 64 : std::max<int64_t>(1, 16384 / (HEAD_SIZE * sizeof(Real)) / LANES) * LANES;
constexpr int64_t TILE = PAIRS ? 16 : 4;      // queries that share a load of values, and whose sums fit the registers
constexpr int64_t QUERIES = PAIRS ? 64 : 32;  // of a task, which share the work of copying a block
constexpr int64_t FEW = 4;  // with more queries, narrow keys and values are converted once for all of them

typedef Real Vector __attribute__((vector_size(LANES * sizeof(Real)), aligned(sizeof(Real)), may_alias));
typedef Integer Integers __attribute__((vector_size(LANES * sizeof(Real))));

#include "cpu_exp.h"
#include "cpu_scalars.h"

struct alignas(64) Query {
  Vector scaled[VECTORS], sum[VECTORS], total;
  Real most;
  int64_t from, to;  // its columns, the last one excluded
  SCALAR* output;
};

static Vector tanh_of(Vector x) {
  const Vector most = Vector{} + (Real)(sizeof(Real) == 8 ? 20 : 10);  // from there on it is 1
  Vector power, rest;
  x = x > most ? most : x < -most ? -most : x;
  split_exp(x + x, power, rest);
  const Vector e = fused(power, rest, power - 1);
  return e / (e + 2);
}

// The sums of LANES vectors, added in halves.
template <int64_t HALF = LANES / 2>
static inline __attribute__((always_inline)) Vector sums(Vector* parts) {
  if constexpr (HALF == 0) {
    return parts[0];
  } else {
    constexpr auto lanes = std::make_index_sequence<LANES>();
#pragma GCC unroll 16
    for (int64_t i = 0; i < HALF; ++i)
      parts[i] = halves<HALF, false>(parts[i], parts[i + HALF], lanes) +
                 halves<HALF, true>(parts[i], parts[i + HALF], lanes);
    return sums<HALF / 2>(parts);
  }
}

template <int64_t HALF = LANES / 2>
static Real highest_of(Vector v) {
  if constexpr (HALF == 0) {
    return v[0];
  } else {
    const Vector other = halves<HALF, true>(v, v, std::make_index_sequence<LANES>());
    return highest_of<HALF / 2>(v > other ? v : other);
  }
}

// Scores of LANES columns.
template <typename T>
static Vector scores(const Vector* query, const T* keys, int64_t stride) {
  Vector products[LANES] = {};
#pragma GCC unroll 16
  for (int64_t i = 0; i < LANES; ++i)
#pragma GCC unroll 16
    for (int64_t j = 0; j < VECTORS; ++j)
      products[i] = fused(query[j], load(keys + i * stride + j * LANES), products[i]);
  return sums(products);
}

// Adds columns `from` to `to` to the sums of NUMBER queries, `weights` [NUMBER, BLOCK]; VECTORS in groups of four.
template <int64_t NUMBER, int64_t FIRST = 0, typename T>
static void add(Query* queries, const Real (*weights)[BLOCK], const T* values, int64_t stride, int64_t from,
                int64_t to) {
  constexpr int64_t WIDTH = std::min<int64_t>(4, VECTORS - FIRST);
  Vector sum[NUMBER][WIDTH];
  for (int64_t n = 0; n < NUMBER; ++n)
    for (int64_t j = 0; j < WIDTH; ++j) sum[n][j] = queries[n].sum[FIRST + j];
  for (int64_t c = from; c < to; ++c)
    for (int64_t j = 0; j < WIDTH; ++j) {
      const Vector value = load(values + c * stride + (FIRST + j) * LANES);
      for (int64_t n = 0; n < NUMBER; ++n) sum[n][j] = fused(all_of<Vector>(weights[n][c]), value, sum[n][j]);
    }
  for (int64_t n = 0; n < NUMBER; ++n)
    for (int64_t j = 0; j < WIDTH; ++j) queries[n].sum[FIRST + j] = sum[n][j];
  if constexpr (FIRST + WIDTH < VECTORS) add<NUMBER, FIRST + WIDTH>(queries, weights, values, stride, from, to);
}

// Makes the sums those of weights exp(score - most).
static void rescale(Query& query, Real most) {
  const Real factor = exponential(Vector{} + (query.most - most))[0];
  for (int64_t j = 0; j < VECTORS; ++j) query.sum[j] *= factor;
  query.total *= factor;
  query.most = most;
}

// The weights of columns `from` to `to` of a block for one query, by its new maximum; `scores` gives LANES at a column.
template <typename Scores>
static void weigh(Query& query, Real* weights, int64_t from, int64_t to, Real softcap, Scores scores) {
  Vector column, most = Vector{} + query.most;
  for (int64_t l = 0; l < LANES; ++l) column[l] = l;
  const int64_t begin = from / LANES * LANES;
  for (int64_t c = begin; c < to; c += LANES) {
    Vector score = scores(c);
    if (softcap) score = tanh_of(score / softcap) * softcap;
    const Vector at = column + (Real)c;
    score = (at >= (Real)from) & (at < (Real)to) ? score : Vector{} + std::numeric_limits<Real>::lowest();
    most = score > most ? score : most;
    *(Vector*)(weights + c) = score;
  }
  const Real highest = highest_of(most);
  if (highest != query.most) rescale(query, highest);
  for (int64_t c = begin; c < to; c += LANES) {
    Vector& weight = *(Vector*)(weights + c);
    weight = exponential(weight - highest);
    query.total += weight;
  }
}

// Columns up to `end` of a block that begins at `block`, for queries next to each other; keys and values point to
// column `block`, and there are keys of all columns up to the next multiple of LANES.
template <typename T>
static void attend_block(Query* queries, int64_t number, const T* keys, const T* values, int64_t stride, int64_t block,
                         int64_t end, Real softcap) {
  alignas(64) Real weights[TILE][BLOCK];
  for (int64_t n = 0; n < number; n += TILE) {
    const int64_t many = std::min(TILE, number - n);
    int64_t from[TILE], to[TILE], first = 0, last = end;  // columns that all of them see
    for (int64_t i = 0; i < many; ++i) {
      from[i] = std::clamp<int64_t>(queries[n + i].from - block, 0, end);
      to[i] = std::max(std::min(queries[n + i].to - block, end), from[i]);
      if (from[i] < to[i]) weigh(queries[n + i], weights[i], from[i], to[i], softcap,
                                 [&](int64_t c) { return scores(queries[n + i].scaled, keys + c * stride, stride); });
      first = std::max(first, from[i]);
      last = std::min(last, to[i]);
    }
    if (first >= last) first = last = end;
    for (int64_t i = 0; i < many; ++i)
      add<1>(queries + n + i, weights + i, values, stride, from[i], std::min(first, to[i]));
    if (many == 4) add<4>(queries + n, weights, values, stride, first, last);
    if (many == 3) add<3>(queries + n, weights, values, stride, first, last);
    if (many == 2) add<2>(queries + n, weights, values, stride, first, last);
    if (many == 1) add<1>(queries + n, weights, values, stride, first, last);
    for (int64_t i = 0; i < many; ++i) add<1>(queries + n + i, weights + i, values, stride, last, to[i]);
  }
}

#ifdef __AVX512BF16__
// Columns `start` to `end` of a block that begins at `block`, as of `attend_block`; `key` and `value` give a column's.
template <typename Key, typename Value>
static void attend_pairs(Query* queries, int64_t number, Key key, Value value, int64_t block, int64_t start,
                         int64_t end, Real scale, Real softcap) {
  constexpr int64_t STEPS = HEAD_SIZE / 32, SLICES = HEAD_SIZE / 64;
  alignas(64) Tile keys[STEPS][4], values[SLICES][2][4];
  alignas(64) Real weights[16][64];
  alignas(64) Halves rounded[16][4] = {};
  static const uint16_t nothing[HEAD_SIZE] = {};
  for (int64_t c = start / 16 * 16; c < 64; c += 16) {
    const uint16_t* rows[16];
    for (int64_t i = 0; i < 16; ++i) {
      rows[i] = c + i < end ? key(c + i) : nothing;
      for (int64_t j = 0; j < HEAD_SIZE; j += 32) __builtin_prefetch(value(c + i) + j);
    }
    for (int64_t k = 0; k < STEPS; ++k) {
      Words* tile = keys[k][c / 16];
      for (int64_t i = 0; i < 16; ++i) tile[i] = *(const Words*)(rows[i] + 32 * k);
      transpose(tile);
    }
  }
  for (int64_t c = 0; c < 64; c += 2) {
    const auto row = [&](int64_t at) { return at >= start && at < end ? value(at) : nothing; };
    const uint16_t *even = row(c), *odd = row(c + 1);
    for (int64_t j = 0; j < HEAD_SIZE; j += 32) {
      __builtin_prefetch(key(c + 64) + j);
      __builtin_prefetch(key(c + 65) + j);
    }
    const auto words = [](const uint16_t* from) { return __builtin_convertvector(*(const Halves*)from, Words); };
#pragma GCC unroll 4
    for (int64_t j = 0; j < HEAD_SIZE / 16; ++j)
      values[j / 4][c / 32][j % 4][c % 32 / 2] = words(even + 16 * j) | words(odd + 16 * j) << 16;
  }
  for (int64_t n = 0; n < number; n += 16) {
    const int64_t many = std::min<int64_t>(16, number - n);
    int64_t from[16], to[16], first = end, last = 0;
    for (int64_t i = 0; i < many; ++i) {
      from[i] = std::clamp<int64_t>(queries[n + i].from - block, 0, end);
      to[i] = std::max(std::min(queries[n + i].to - block, end), from[i]);
      if (from[i] == to[i]) continue;
      first = std::min(first, from[i]);
      last = std::max(last, to[i]);
    }
    if (first >= last) continue;
    std::fill_n(weights[0], many * 64, 0);
    multiply((float*)weights, sizeof weights[0], queries[n].scaled, sizeof(Query), keys[0], STEPS, many);
    for (int64_t i = 0; i < many; ++i) {
      if (from[i] < to[i])
        weigh(queries[n + i], weights[i], from[i], to[i], softcap,
              [&](int64_t c) { return *(const Vector*)(weights[i] + c) * scale; });
      for (int64_t c = 0; c < 64; c += 16) {
        const bool is_seen = c + 16 > from[i] && c < to[i];
        const __m512 seen = is_seen ? _mm512_load_ps((float*)weights[i] + c) : _mm512_setzero_ps();
        rounded[i][c / 16] = (Halves)_mm512_cvtneps_pbh(seen);
      }
    }
    for (int64_t j = 0; j < SLICES; ++j)
      multiply((float*)(queries[n].sum + 4 * j), sizeof(Query), rounded, sizeof rounded[0], values[j][0], 2, many);
  }
}
#endif

// Queries next to each other whose columns from `split` on lie `shift` further; keys and values point to column 0.
static void attend_run(Query* queries, int64_t number, const SCALAR* keys, const SCALAR* values, int64_t stride,
                       int64_t split, int64_t shift, Real scale, Real softcap) {
#ifdef __AVX512BF16__
  [[maybe_unused]] const std::conditional_t<PAIRS, Tiles, int64_t> tiles(number);
#endif
  alignas(64) Real copies[2][BLOCK * HEAD_SIZE];
  int64_t first = queries[0].from, end = queries[0].to;
  for (int64_t n = 1; n < number; ++n) {
    first = std::min(first, queries[n].from);
    end = std::max(end, queries[n].to);
  }
  const bool is_narrow = sizeof(SCALAR) < sizeof(Real) && number > FEW;
  for (int64_t block = first / BLOCK * BLOCK; block < end; block += BLOCK) {
    const int64_t stop = std::min(BLOCK, end - block), start = std::max<int64_t>(0, first / LANES * LANES - block);
    const auto place = [&](int64_t c) { return (block + c + (block + c < split ? 0 : shift)) * stride; };
#ifdef __AVX512BF16__
    if constexpr (PAIRS) {
      attend_pairs(
          queries, number, [&](int64_t c) { return (const uint16_t*)(keys + place(c)); },
          [&](int64_t c) { return (const uint16_t*)(values + place(c)); }, block, start, stop, scale, softcap);
      continue;
    }
#endif
    if (is_narrow || stop % LANES || (shift && block + stop > split)) {
      std::fill_n(copies[0] + stop * HEAD_SIZE, (-stop & (LANES - 1)) * HEAD_SIZE, 0);
      for (int64_t c = start; c < stop; ++c) {
        const int64_t at = place(c);
        for (int64_t j = 0; j < HEAD_SIZE; j += LANES) {
          *(Vector*)(copies[0] + c * HEAD_SIZE + j) = load(keys + at + j);
          *(Vector*)(copies[1] + c * HEAD_SIZE + j) = load(values + at + j);
        }
      }
      attend_block(queries, number, copies[0], copies[1], HEAD_SIZE, block, stop, softcap);
    } else {
      const int64_t at = block * stride;
      attend_block(queries, number, keys + at, values + at, stride, block, stop, softcap);
    }
  }
}

// queries [rows, kv_heads * groups, count, HEAD_SIZE], keys and values [rows, kv_heads, columns, HEAD_SIZE]; spans
// [rows, count, span_width]: first and last column of a query; of three numbers the third is the row that it reads; of
// four the third is a column from which on columns lie as many further as the fourth says; sinks [kv_heads * groups], or
// null; softcap: 0 for none; output [rows, count, kv_heads * groups, HEAD_SIZE]. All threads of a team call it.
extern "C" void attend_in_team(const SCALAR* queries, const SCALAR* keys, const SCALAR* values, const int64_t* spans,
                       const Real* sinks, SCALAR* output, const Sizes* sizes, double scale, double softcap) {
  const Sizes s = *sizes;
  const int64_t share = std::max<int64_t>(1, QUERIES / s.groups), parts = (s.count + share - 1) / share;
#pragma omp for schedule(dynamic) nowait
  for (int64_t task = 0; task < s.rows * s.kv_heads * parts; ++task) {
    const int64_t row = task / parts / s.kv_heads, kv_head = task / parts % s.kv_heads;
    const int64_t first = (parts - 1 - task % parts) * share, end = std::min(first + share, s.count);  // longest first
    const auto span = [&](int64_t i, int64_t k) { return spans[(row * s.count + i) * s.span_width + k]; };
    const auto moved = [&](int64_t i, int64_t k) { return s.span_width < 4 ? 0 : span(i, k); };
    const auto row_of = [&](int64_t i) { return s.span_width == 3 ? span(i, 2) : row; };
    static thread_local std::vector<Query> run;
    for (int64_t begin = first, next; begin < end; begin = next) {
      const int64_t split = moved(begin, 2), shift = moved(begin, 3), from = row_of(begin);
      const int64_t at = from * s.key_strides[0] + kv_head * s.key_strides[1];
      const auto continues = [&](int64_t i) {
        return moved(i, 2) == split && moved(i, 3) == shift && row_of(i) == from;
      };
      run.clear();
      for (next = begin; next < end && continues(next); ++next)
        for (int64_t head = kv_head * s.groups; head < (kv_head + 1) * s.groups; ++head) {
          Query& query = run.emplace_back();
          const int64_t place = row * s.query_strides[0] + head * s.query_strides[1] + next * s.query_strides[2];
          if constexpr (PAIRS)
            std::memcpy(query.scaled, queries + place, HEAD_SIZE * sizeof(SCALAR));  // scores are scaled instead
          else
            for (int64_t j = 0; j < VECTORS; ++j) query.scaled[j] = load(queries + place + j * LANES) * (Real)scale;
          for (int64_t j = 0; j < VECTORS; ++j) query.sum[j] = Vector{};
          query.total = Vector{};
          query.total[0] = sinks ? 1 : 0;  // a sink's weight, of a value of zeros
          query.most = sinks ? sinks[head] : std::numeric_limits<Real>::lowest();
          query.from = span(next, 0);
          query.to = span(next, 1) + 1;
          query.output = output + ((row * s.count + next) * s.kv_heads * s.groups + head) * HEAD_SIZE;
        }
      const int64_t number = run.size();
      run.resize((number + TILE - 1) / TILE * TILE);
      attend_run(run.data(), number, keys + at, values + at, s.key_strides[2], split, shift, scale, softcap);
      run.resize(number);
      for (const Query& query : run) {
        Real total = 0;
        for (int64_t l = 0; l < LANES; ++l) total += query.total[l];
        for (int64_t j = 0; j < VECTORS; ++j) store(query.output + j * LANES, query.sum[j] / total);
      }
    }
  }
}

extern "C" void attend(const SCALAR* queries, const SCALAR* keys, const SCALAR* values, const int64_t* spans,
                       const Real* sinks, SCALAR* output, const Sizes* sizes, double scale, double softcap) {
#pragma omp parallel num_threads(sizes->threads) if (sizes->threads > 1)
  attend_in_team(queries, keys, values, spans, sinks, output, sizes, scale, softcap);
}
