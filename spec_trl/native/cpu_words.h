// Rows of x as words of four bytes, by lanes: [group of rows][word][lane]. A word has one float32, two bfloat16, or four
// codes of 8 bits, to which x is rounded by row. And where results go.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_bfloat16.h"
#include "cpu_structs.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"
#ifdef __AVX2__
#define HAS_BYTES 1  // sums of products of bytes
#endif

constexpr int MOST_VECTORS = WIDEST == 32 ? 2 : 4;  // of rows at once
constexpr int64_t MOST_ROWS = MOST_VECTORS * WIDEST / 4;

template <int64_t BYTES>
struct Register {
  typedef float Floats __attribute__((vector_size(BYTES)));
  typedef int32_t Integers __attribute__((vector_size(BYTES)));
};

template <typename T>
static inline __attribute__((always_inline)) T read(const void* from) {  // at any address
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A value that the compiler does not read from memory again, once for every use.
template <typename V>
static inline __attribute__((always_inline)) V in_register(V value) {
#ifdef __AVX512F__
  asm("" : "+v"(value));
#elif defined(__AVX2__)
  asm("" : "+x"(value));
#endif
  return value;
}

// What is narrow: the numbers of x, y and dense weights of 16 bits
#ifdef HALVES
using Narrow = _Float16;
#else
using Narrow = Bfloat16;
#endif
constexpr bool HAS_PAIRS = std::is_same_v<Narrow, Bfloat16>;  // numbers that are halves of a float32

// Where results go: rows `stride` apart
struct Output {
  void* y;
  int64_t stride;
  bool is_narrow;
  Output after(int64_t rows, int64_t columns) const {
    return {(char*)y + (rows * stride + columns) * (is_narrow ? 2 : 4), stride, is_narrow};
  }
  float bias(const Matrix& w, int64_t column) const {
    if (!w.bias) return 0;
    return is_narrow ? (float)((const Narrow*)w.bias)[column] : ((const float*)w.bias)[column];
  }
  void set(int64_t row, int64_t column, float value) const {
    const int64_t at = row * stride + column;
    if (is_narrow)
      ((Narrow*)y)[at] = narrowed<Narrow>(value);
    else
      ((float*)y)[at] = value;
  }
};

enum Kind { SINGLES, PAIRS, CODES_8, CODES_4, KINDS };  // what is in a word; the codes of 4 bits have their own order

static Kind kind_of(const Matrix& w) {
#ifdef HAS_BYTES
  if (w.bits == 4) return CODES_4;
  if (w.bits == 8) return CODES_8;
#endif
  return w.bits == 16 && HAS_PAIRS ? PAIRS : SINGLES;
}

// Rows of x that are multiplied at once
struct Group {
  int64_t first, rows, lanes;
};

static Group group_at(int64_t first, int64_t count) {
  const int64_t rows = std::min(count - first, MOST_ROWS);
  int64_t lanes = 4;
  while (lanes < rows) lanes *= 2;
  return {first, rows, lanes};
}

// x [rows, words of 4 bytes], the last word padded with zeros, as [group][word][lane]
struct Packed {
  int64_t bytes, words;  // of a row
  int64_t parts;         // of the inputs, with a scale and a zero of weights
  uint32_t* x;
  float* scales;  // [group][lane]: of codes
  float* sums;    // [group][part][lane]: of codes, with a minus
  uint32_t* at(const Group& g) const { return x + g.first * words; }
};

// The words k..end of the rows of a group: `from` gives a row's bytes.
template <typename From>
static void spread(const Group& g, int64_t bytes, int64_t k, int64_t end, uint32_t* to, From from) {
#ifdef __AVX512F__
  const auto blocks = [&](auto lanes) {  // a constant: copies of its size are single instructions
    constexpr int64_t LANES = lanes, ROWS = std::min<int64_t>(16, LANES);
    for (; k < end; k += 16)
      for (int64_t lane = 0; lane < g.lanes; lane += ROWS) {
        Words lines[16] = {};
        const int64_t left = std::min<int64_t>(64, bytes - 4 * k), rows = std::min(ROWS, g.rows - lane);
        for (int64_t m = 0; m < rows; ++m)
          if (left == 64)
            lines[m] = read<Words>(from(lane + m) + 4 * k);
          else
            std::memcpy(&lines[m], from(lane + m) + 4 * k, left);
        transpose(lines);
        uint32_t* at = to + k * g.lanes + lane;
        if (end - k >= 16)
          for (int64_t i = 0; i < 16; ++i) std::memcpy(at + i * g.lanes, &lines[i], 4 * ROWS);
        else
          for (int64_t i = 0; i < end - k; ++i) std::memcpy(at + i * g.lanes, &lines[i], 4 * ROWS);
      }
  };
  if (g.lanes == 4)
    blocks(std::integral_constant<int64_t, 4>());
  else if (g.lanes == 8)
    blocks(std::integral_constant<int64_t, 8>());
  else
    blocks(std::integral_constant<int64_t, 16>());
#else
  std::fill(to + k * g.lanes, to + end * g.lanes, 0);
  for (int64_t m = 0; m < g.rows; ++m)
    for (int64_t i = k; i < end; ++i)
      std::memcpy(to + i * g.lanes + m, from(m) + 4 * i, std::min<int64_t>(4, bytes - 4 * i));
#endif
}

// The input that position i of a row of codes of 4 bits has: a byte of the weights has inputs 16 apart, a word 32.
static int64_t input_of(int64_t i) {
  const int64_t half = i % 64 / 32, l = i % 32 / 2;
  return i / 64 * 64 + 16 * half + 32 * (i % 2) + l;
}

// The largest code of x. Without an instruction for four products, two of weights of 8 bits must fit 16 bits.
static float most_code(Kind kind) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return 127;
#else
  return kind == CODES_8 ? 64 : 127;
#endif
}

// Codes of a row of x, and their scale: x = scale * code
static float round_to_codes(const float* x, int64_t in, float most_code, int8_t* codes) {
  uint32_t most = 0;
  for (int64_t i = 0; i < in; ++i) most = std::max(most, read<uint32_t>(x + i) & 0x7fffffff);
  const float largest = read<float>(&most), inverse = largest > 0 ? most_code / largest : 0;
  for (int64_t i = 0; i < in; ++i) {
    const float shifted = x[i] * inverse + 12582912.f;  // 1.5 * 2^23: a number that is added to it is rounded
    codes[i] = (int8_t)read<int32_t>(&shifted);
  }
  return largest / most_code;
}

// Memory of packed rows of a kind
struct Buffers {
  std::vector<uint32_t> x;
  std::vector<float> scales, sums;

  Packed packed(Kind kind, const Matrix& w) {
    const int64_t bytes = kind == SINGLES ? 4 * w.in : kind == PAIRS ? 2 * w.in : w.in;
    const int64_t parts = kind == CODES_4 ? w.in / w.group : 1;
    return {bytes, (bytes + 3) / 4, parts, x.data(), scales.data(), sums.data()};
  }

  void grow(Kind kind, const Matrix& w, int64_t count) {
    const Group last = group_at((count - 1) / MOST_ROWS * MOST_ROWS, count);
    const int64_t lanes = last.first + last.lanes;
    const Packed to = packed(kind, w);
    const auto grow = [](auto& of, int64_t size) { of.resize(std::max<int64_t>(of.size(), size)); };
    grow(x, lanes * to.words);
    if (kind < CODES_8) return;
    grow(scales, lanes);
    grow(sums, lanes * to.parts);
  }
};

// Rows of a group as codes; `x` in float32.
static void pack_codes(const Packed& to, Kind kind, const float* x, int64_t stride, const Group& g) {
  const int64_t in = to.bytes, each = in / to.parts;
  std::vector<int8_t> codes(g.rows * in), plain(in);
  for (int64_t row = 0; row < g.rows; ++row) {
    int8_t* own = codes.data() + row * in;
    to.scales[g.first + row] = round_to_codes(x + (g.first + row) * stride, in, most_code(kind), plain.data());
    for (int64_t i = 0; i < in; ++i) own[i] = plain[kind == CODES_8 ? i : input_of(i)];
    for (int64_t p = 0; p < to.parts; ++p) {
      int32_t sum = 0;
      for (int64_t i = p * each; i < (p + 1) * each; ++i) sum += own[i];
      to.sums[g.first * to.parts + p * g.lanes + row] = -sum;
    }
  }
  spread(g, in, 0, to.words, to.at(g), [&](int64_t row) { return (char*)&codes[row * in]; });
}
