// Attention of a few queries per row over a ragged K/V cache. Compiled for one element type SCALAR and one HEAD_SIZE.
//
// A task is one row and one head of K/V: its columns are read once for all queries of the group, and no others are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// As wide as the widest registers, or as the largest power of two that divides a head.
constexpr int64_t HEAD_BYTES = HEAD_SIZE * sizeof(SCALAR);
constexpr int64_t VECTOR_BYTES = std::min<int64_t>(64, HEAD_BYTES & -HEAD_BYTES);
constexpr int64_t LANES = VECTOR_BYTES / sizeof(SCALAR), VECTORS = HEAD_SIZE / LANES;
constexpr int64_t BLOCK = std::max<int64_t>(1, 16384 / HEAD_BYTES);  // columns that stay in the L1 cache
typedef SCALAR Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(SCALAR)), may_alias));

struct Sizes {
  int64_t rows, kv_heads, groups, count;  // `count` queries per row and head, `groups` heads per head of K/V
  int64_t query_strides[3];               // of rows, heads, queries
  int64_t key_strides[3];                 // of rows, heads, columns; those of the values too
  int64_t threads;
};

// queries [rows, kv_heads * groups, count, HEAD_SIZE], keys and values [rows, kv_heads, columns, HEAD_SIZE];
// spans [rows, count, 2], first and last column of each query; output [rows, count, kv_heads * groups, HEAD_SIZE]
extern "C" void attend(const SCALAR* queries, const SCALAR* keys, const SCALAR* values, const int64_t* spans,
                       SCALAR* output, const Sizes* sizes, double scale) {
  const Sizes s = *sizes;
  const int64_t each = s.groups * s.count;  // queries of a task
#pragma omp parallel for num_threads(s.threads) schedule(dynamic) if (s.threads > 1)
  for (int64_t task = 0; task < s.rows * s.kv_heads; ++task) {
    const int64_t row = task / s.kv_heads, head = task % s.kv_heads;
    const int64_t* own = spans + row * s.count * 2;
    int64_t first = own[0], end = own[1] + 1;
    for (int64_t i = 1; i < s.count; ++i) {
      first = std::min(first, own[2 * i]);
      end = std::max(end, own[2 * i + 1] + 1);
    }
    const int64_t columns = end - first;
    const int64_t start = row * s.key_strides[0] + head * s.key_strides[1] + first * s.key_strides[2];
    auto column = [&](const SCALAR* from, int64_t c) { return (const Vector*)(from + start + c * s.key_strides[2]); };
    static thread_local std::vector<SCALAR> scores;
    scores.resize(each * columns);
    SCALAR* __restrict weights = scores.data();  // [each, columns]

    for (int64_t block = 0; block < columns; block += BLOCK)
      for (int64_t n = 0; n < each; ++n) {
        const Vector* query = (const Vector*)(queries + row * s.query_strides[0] + n % s.count * s.query_strides[2] +
                                              (head * s.groups + n / s.count) * s.query_strides[1]);
        Vector scaled[VECTORS];
        for (int64_t j = 0; j < VECTORS; ++j) scaled[j] = query[j] * (SCALAR)scale;
        for (int64_t c = block; c < std::min(block + BLOCK, columns); ++c) {
          const Vector* key = column(keys, c);
          Vector products = scaled[0] * key[0];
          for (int64_t j = 1; j < VECTORS; ++j) products += scaled[j] * key[j];
          SCALAR sum = 0;
          for (int64_t l = 0; l < LANES; ++l) sum += products[l];
          weights[n * columns + c] = sum;
        }
      }

    for (int64_t n = 0; n < each; ++n) {
      const int64_t from = own[n % s.count * 2] - first, to = own[n % s.count * 2 + 1] + 1 - first;
      SCALAR* __restrict weight = weights + n * columns;
      SCALAR most = std::numeric_limits<SCALAR>::lowest(), total = 0;
      for (int64_t c = from; c < to; ++c) most = std::max(most, weight[c]);
      for (int64_t c = from; c < to; ++c) total += weight[c] = std::exp(weight[c] - most);
      for (int64_t c = from; c < to; ++c) weight[c] /= total;
      std::fill(weight, weight + from, 0);
      std::fill(weight + to, weight + columns, 0);
    }

    for (int64_t block = 0; block < columns; block += BLOCK)
      for (int64_t n = 0; n < each; ++n) {
        const int64_t place = (row * s.count + n % s.count) * s.kv_heads * s.groups + head * s.groups + n / s.count;
        Vector* result = (Vector*)(output + place * HEAD_SIZE);
        const SCALAR* weight = weights + n * columns;
        Vector even[VECTORS] = {}, odd[VECTORS] = {};  // two sums: an addition takes longer than its turn
        int64_t c = block, stop = std::min(block + BLOCK, columns);
        for (; c + 1 < stop; c += 2) {
          const Vector *value = column(values, c), *next = column(values, c + 1);
          for (int64_t j = 0; j < VECTORS; ++j) {
            even[j] += weight[c] * value[j];
            odd[j] += weight[c + 1] * next[j];
          }
        }
        if (c < stop)
          for (int64_t j = 0; j < VECTORS; ++j) even[j] += weight[c] * column(values, c)[j];
        for (int64_t j = 0; j < VECTORS; ++j) result[j] = (block ? result[j] : Vector{}) + even[j] + odd[j];
      }
  }
}
