// What a decoder layer does between its matrix products, in float32. Rows are `[rows, size]`, their elements next to
// each other.

#include <cmath>
#include <cstdint>

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
    float squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += from[i] * from[i];
    const float factor = 1 / std::sqrt(squares / size + (float)eps);
    for (int64_t i = 0; i < size; ++i) to[i] = weight[i] * (from[i] * factor);
  }
}

// silu(gate) * up; rows of gate and up are `strides` apart, those of out are contiguous
extern "C" void silu_multiply(const float* gate, const float* up, float* out, int64_t rows, int64_t size,
                              const int64_t* strides, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const float *x = gate + row * strides[0], *y = up + row * strides[1];
    float* __restrict to = out + row * size;
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] / (1 + std::exp(-x[i])) * y[i];
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
  float factor = 1;
  if (weight) {
    float squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += from[i] * from[i];
    factor = 1 / std::sqrt(squares / size + (float)eps);
  }
  auto normed = [&](int64_t i) { return weight ? weight[i] * (from[i] * factor) : from[i]; };
  for (int64_t i = 0; i < half; ++i) {
    const float low = normed(i), high = normed(half + i);
    to[i] = low * cosine[i] - high * sine[i];
    to[half + i] = high * cosine[half + i] + low * sine[half + i];
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
