// The operations of a decoder layer between its matrix products, in float32. Rows are `[rows, size]`, and contiguous.
// A number is computed in one order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_structs.h"
#include "cpu_vectors.h"

using Real = float;
constexpr int64_t LANES = WIDEST / sizeof(Real);
typedef Real Vector __attribute__((vector_size(WIDEST), aligned(sizeof(Real)), may_alias));
typedef uint32_t Integers __attribute__((vector_size(WIDEST)));

#include "cpu_exp.h"

// 1 / sqrt(mean of squares + eps)
static float factor_of(const float* x, int64_t size, double eps) {
  Vector squares = {}, last = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares = fused(*(const Vector*)(x + i), *(const Vector*)(x + i), squares);
  std::memcpy(&last, x + i, (size - i) * sizeof(float));
  squares = fused(last, last, squares);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) squares[l] += squares[l + half];
  return 1 / std::sqrt(squares[0] / size + (float)eps);
}

// x + residual into total (null: x alone, and no total), and its norm times weight into out; all rows are contiguous
extern "C" void rms_norm(const float* x, const float* residual, const float* weight, float* total, float* out,
                         int64_t rows, int64_t size, double eps, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * size;
    float* to = out + row * size;
    if (residual) {
      float* __restrict sum = total + row * size;
      for (int64_t i = 0; i < size; ++i) sum[i] = from[i] + residual[row * size + i];
      from = sum;
    }
    const float factor = factor_of(from, size, eps);
    for (int64_t i = 0; i < size; ++i) to[i] = weight[i] * (from[i] * factor);
  }
}

// silu(gate) * up; rows of gate and up are `strides` apart, those of out are contiguous
extern "C" void silu_multiply(const float* gate, const float* up, float* out, int64_t rows, int64_t size,
                              const int64_t* strides, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float *x = gate + row * strides[0], *y = up + row * strides[1];
    float* to = out + row * size;
    const auto product = [](Vector a, Vector b) {
      return a / (1 + exponential(-a > -LEAST ? all_of<Vector>(-LEAST) : -a)) * b;
    };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) *(Vector*)(to + i) = product(*(const Vector*)(x + i), *(const Vector*)(y + i));
    Vector a = {}, b = {};
    std::memcpy(&a, x + i, (size - i) * sizeof(float));
    std::memcpy(&b, y + i, (size - i) * sizeof(float));
    a = product(a, b);
    std::memcpy(to + i, &a, (size - i) * sizeof(float));
  }
}

struct Heads {
  int64_t rows, count, heads, kv_heads, head_size;
  int64_t query[3], key[3], value[3];  // strides of rows, tokens, heads
  int64_t cosine[2], sine[2];          // strides of rows, tokens
  int64_t to_row[2], to_column[2];     // strides of rows, tokens
  int64_t keys[3], values[3];          // strides of rows, heads, columns
  int64_t threads;
};

// One head of one token: normed (null: not), then rotated by its position.
static void rotate(const float* from, float* to, const float* weight, const float* cosine, const float* sine,
                   int64_t size, double eps) {
  const int64_t half = size / 2;
  const float factor = weight ? factor_of(from, size, eps) : 1;
  auto normed = [&](int64_t i) { return weight ? weight[i] * (from[i] * factor) : from[i]; };
  for (int64_t i = 0; i < half; ++i) {
    const float low = normed(i), high = normed(half + i);
    to[i] = fused(low, cosine[i], -(high * sine[i]));
    to[half + i] = fused(high, cosine[half + i], low * sine[half + i]);
  }
}

// queries, keys, values [rows, count, heads, head_size]; to_rows and to_columns [rows, count], where the cache's
// buffers are written; rotated queries to out [rows, heads, count, head_size]
extern "C" void rotate_and_write(const float* query, const float* key, const float* value, const float* cosine,
                                 const float* sine, float* keys, float* values, const int64_t* to_rows,
                                 const int64_t* to_columns, const float* query_weight, const float* key_weight,
                                 float* out, const Heads* heads, double eps) {
  const Heads s = *heads;
#pragma omp parallel for num_threads(s.threads) if (s.threads > 1)
  for (int64_t token = 0; token < s.rows * s.count; ++token) {
    const int64_t row = token / s.count, step = token % s.count;
    const float* c = cosine + row * s.cosine[0] + step * s.cosine[1];
    const float* d = sine + row * s.sine[0] + step * s.sine[1];
    const int64_t to_row = to_rows[row * s.to_row[0] + step * s.to_row[1]];
    const int64_t column = to_columns[row * s.to_column[0] + step * s.to_column[1]];
    for (int64_t h = 0; h < s.heads; ++h) {
      const float* from = query + row * s.query[0] + step * s.query[1] + h * s.query[2];
      rotate(from, out + ((row * s.heads + h) * s.count + step) * s.head_size, query_weight, c, d, s.head_size, eps);
    }
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      float* to = keys + to_row * s.keys[0] + h * s.keys[1] + column * s.keys[2];
      rotate(key + row * s.key[0] + step * s.key[1] + h * s.key[2], to, key_weight, c, d, s.head_size, eps);
      const float* from = value + row * s.value[0] + step * s.value[1] + h * s.value[2];
      float* stored = values + to_row * s.values[0] + h * s.values[1] + column * s.values[2];
      for (int64_t i = 0; i < s.head_size; ++i) stored[i] = from[i];
    }
  }
}

typedef void Multiply(const Matrix*, int64_t number, const void* x, int64_t x_stride, int64_t count, void* y,
                      int64_t y_stride, int64_t threads, int64_t is_narrow);
typedef void Attend(const float* queries, const float* keys, const float* values, const int64_t* spans,
                    const float* sinks, float* output, const Sizes*, double scale, double softcap);

struct Norm {
  const float* weight;  // null: there is no such norm
  double eps;
};

struct Layer {
  Matrix query, key, value, attention_out, gate, up, down;  // siblings, which one call multiplies, are neighbours
  Norm before_attention, of_queries, of_keys, after_attention, before_mlp, after_product;
  double scale;  // of attention
};

// Tensors of one call: `hidden`, [tokens, hidden], is updated in place; `keys` and `values` are the whole buffers, of
// which attention reads the rows from `first_row` on; spans as in cpu_attention.cpp
struct Call {
  float* hidden;
  const float *cosine, *sine;
  float *keys, *values;
  const int64_t *to_rows, *to_columns, *spans;
  int64_t span_width, rows, count, heads, kv_heads, head_size, first_row;
  int64_t cosine_strides[2], sine_strides[2], to_row_strides[2], to_column_strides[2], key_strides[3];
  int64_t threads;
  Multiply* multiply;
  Attend* attend;
};

static int64_t threads_for(int64_t elements, int64_t most) { return std::min(most, 1 + (elements >> 15)); }

static void norm(const Norm& n, const float* x, const float* residual, float* total, float* out, int64_t rows,
                 int64_t size, int64_t threads) {
  rms_norm(x, residual, n.weight, total, out, rows, size, n.eps, threads_for(rows * size, threads));
}

extern "C" void decoder_layer(const Layer* layer, const Call* call) {
  const Layer& l = *layer;
  const Call& c = *call;
  const int64_t tokens = c.rows * c.count, hidden = l.query.in, inner = l.gate.out, most = c.threads;
  const int64_t queries = l.query.out, keys = l.key.out, width = queries + 2 * keys;
  static thread_local std::vector<float> scratch;
  scratch.resize(tokens * (2 * hidden + width + 2 * queries + 3 * inner));
  float *residual = scratch.data(), *normed = residual + tokens * hidden, *projected = normed + tokens * hidden;
  float *rotated = projected + tokens * width, *attended = rotated + tokens * queries;
  float *gated = attended + tokens * queries, *product = gated + 2 * tokens * inner;  // gated: [tokens, 2, inner]

  norm(l.before_attention, c.hidden, nullptr, nullptr, normed, tokens, hidden, most);
  c.multiply(&l.query, 3, normed, hidden, tokens, projected, width, most, 0);

  Heads heads = {c.rows, c.count, c.heads, c.kv_heads, c.head_size};
  for (int64_t* strides : {heads.query, heads.key, heads.value}) {
    strides[0] = c.count * width;
    strides[1] = width;
    strides[2] = c.head_size;
  }
  std::copy_n(c.cosine_strides, 2, heads.cosine);
  std::copy_n(c.sine_strides, 2, heads.sine);
  std::copy_n(c.to_row_strides, 2, heads.to_row);
  std::copy_n(c.to_column_strides, 2, heads.to_column);
  std::copy_n(c.key_strides, 3, heads.keys);
  std::copy_n(c.key_strides, 3, heads.values);
  heads.threads = threads_for(tokens * queries, most);
  rotate_and_write(projected, projected + queries, projected + queries + keys, c.cosine, c.sine, c.keys, c.values,
                   c.to_rows, c.to_columns, l.of_queries.weight, l.of_keys.weight, rotated, &heads, l.of_queries.eps);

  Sizes sizes = {c.rows, c.kv_heads, c.heads / c.kv_heads, c.count};
  sizes.query_strides[0] = queries * c.count;
  sizes.query_strides[1] = c.count * c.head_size;
  sizes.query_strides[2] = c.head_size;
  std::copy_n(c.key_strides, 3, sizes.key_strides);
  sizes.span_width = c.span_width;
  sizes.threads = most;
  const int64_t start = c.first_row * c.key_strides[0];
  c.attend(rotated, c.keys + start, c.values + start, c.spans, nullptr, attended, &sizes, l.scale, 0);

  if (l.after_attention.weight)
    norm(l.after_attention, attended, nullptr, nullptr, attended, tokens, queries, most);
  c.multiply(&l.attention_out, 1, attended, queries, tokens, normed, hidden, most, 0);
  norm(l.before_mlp, normed, c.hidden, residual, normed, tokens, hidden, most);
  c.multiply(&l.gate, 2, normed, hidden, tokens, gated, 2 * inner, most, 0);
  const int64_t strides[2] = {2 * inner, 2 * inner};
  silu_multiply(gated, gated + inner, product, tokens, inner, strides, threads_for(tokens * inner, most));
  if (l.after_product.weight) norm(l.after_product, product, nullptr, nullptr, product, tokens, inner, most);
  c.multiply(&l.down, 1, product, inner, tokens, normed, hidden, most, 0);
  for (int64_t i = 0; i < tokens * hidden; ++i) c.hidden[i] = residual[i] + normed[i];
}
