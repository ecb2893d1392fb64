// What functions of several files take: the matrix of a product, and the sizes of attention.

#pragma once
#include <cstdint>

// A matrix; its weights, by their bits:
//   32: float32 [out, in]
//   16: bfloat16 or float16 [out, in]
//   8: int8 codes [out, in], with scales [out]: weight = scale * code
//   (these two may lie transposed, [in, out])
//   4: codes [out, in / 64, 16] uint16, in which nibble j of word l is input 16 j + l of its 64, with scales and zeros
//      [out, in / group]: weight = scale * (code - zero)
struct Matrix {
  const void* weights;
  const float* scales;
  const uint8_t* zeros;
  const void* bias;  // [out] in the dtype of y, or null
  int64_t out, in, bits, group, is_transposed;
};

// y [count, out of all] = x [count, in] times the transposed `matrices`, and their biases, next to each other; rows are
// strides apart. x and y are float32, or of 16 bits where `is_narrow`; dense weights have their dtype.
struct Product {
  const Matrix* matrices;
  int64_t number;
  const void* x;
  int64_t x_stride, count;
  void* y;
  int64_t y_stride, is_narrow, threads;  // that multiply: all of a team
  void* memory;
};

// Steps of a product. Between two of them all threads of the team have to meet.
struct Products {
  void (*prepare)(Product*);   // by one thread, whose other products may share the memory
  void (*pack)(const Product&);
  void (*run)(const Product&);
  bool (*fetch)(const Product&, int64_t piece);  // brings a piece of the weights that the thread multiplies first into
                                                 // its cache; false if there is none left
};

struct Sizes {
  int64_t rows, kv_heads, groups, count;  // `count` queries per row and head, `groups` heads per head of K/V
  int64_t query_strides[3];               // of rows, heads, queries
  int64_t key_strides[3];                 // of rows, heads, columns; those of the values too
  int64_t span_width;                     // numbers of a span: 2, 3 or 4
  int64_t threads;
};
