// Products in bfloat16 by the tile registers of Intel's AMX, in the order of its tiles.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_words.h"

constexpr int64_t TILE = 16;               // rows of a tile, and its columns of float32
constexpr int64_t PACKED_BYTES = 1 << 20;  // of rows of x at once, a part of the L2 cache

static bool by_tile_registers(const Product& p) {
#if defined(__AMX_BF16__) && !defined(HALVES)
  bool are_dense = true;
  for (int64_t n = 0; n < p.number; ++n)
    are_dense = are_dense && p.matrices[n].bits == 16 && !p.matrices[n].is_transposed;
  return are_dense && p.matrices->in % 32 == 0 && has_tiles();
#endif
  return false;
}

static int64_t rows_of_tiles(const Product& p) {
  return std::max(PACKED_BYTES / (p.matrices->in * 2) / (2 * TILE), (int64_t)1) * 2 * TILE;
}

#ifdef __AMX_BF16__
// OUT tiles of outputs from `first` on, of up to ROWS tiles of rows, `count` in all. packed [rows / TILE, in / 2, TILE, 2]:
// x, of which a tile takes TILE rows of TILE pairs. A tile of weights is TILE outputs of 32 inputs, as they lie.
template <int OUT, int ROWS>
static void by_tile(const Matrix& w, const Bfloat16* packed, int64_t count, const Output& to, int64_t first,
                    bool fetches) {
  const int64_t stride = w.in * 2, group = w.in * TILE;
  const Bfloat16* weights = (const Bfloat16*)w.weights + first * w.in;
  _tile_zero(0);
  if (ROWS > 1) _tile_zero(1);
  if (OUT > 1) _tile_zero(2);
  if (OUT > 1 && ROWS > 1) _tile_zero(3);
  for (int64_t k = 0; k < w.in; k += 32) {
    // Prefetches the next outputs' weights: those of these rows, so many at once, would come too late.
    const char* next = (const char*)(weights + OUT * group) + k * OUT * TILE * 2;
    for (int line = 0; fetches && line < 16 * OUT; ++line) __builtin_prefetch(next + 64 * line);
    _tile_loadd(4, weights + k, stride);
    _tile_loadd(6, packed + k * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (ROWS > 1) {
      _tile_loadd(7, packed + k * TILE + group, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (OUT > 1) {
      _tile_loadd(5, weights + k + group, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (ROWS > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float totals[OUT][ROWS][TILE][TILE];  // the last two: output, row
  _tile_stored(0, totals[0][0], 64);
  if (ROWS > 1) _tile_stored(1, totals[0][ROWS - 1], 64);
  if (OUT > 1) _tile_stored(2, totals[OUT - 1][0], 64);
  if (OUT > 1 && ROWS > 1) _tile_stored(3, totals[OUT - 1][ROWS - 1], 64);
  for (int o = 0; o < OUT; ++o) {
    Register<64>::Floats bias;
    for (int64_t i = 0; i < TILE; ++i) bias[i] = to.bias(w, first + o * TILE + i);
    for (int64_t start = 0; start < count; start += TILE) {
      Words sums[TILE];  // by output, then by row
      std::memcpy(sums, totals[o][start / TILE], sizeof(sums));
      transpose(sums);
      for (int64_t m = start; m < std::min(count, start + TILE); ++m) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)((Register<64>::Floats)sums[m - start] + bias));
        std::memcpy((Bfloat16*)to.y + m * to.stride + first + o * TILE, &narrow, 32);
      }
    }
  }
}

// Outputs first..end, a multiple of TILE, of all rows
static void by_tiles(const Matrix& w, const Bfloat16* packed, int64_t count, const Output& to, int64_t first,
                     int64_t end) {
  for (; first < end; first += 2 * TILE)
    for (int64_t m = 0; m < count; m += 2 * TILE) {
      const int64_t left = std::min(count - m, 2 * TILE);
      const auto whole = left > TILE ? by_tile<2, 2> : by_tile<2, 1>, half = left > TILE ? by_tile<1, 2> : by_tile<1, 1>;
      (end - first > TILE ? whole : half)(w, packed + m * w.in, left, to.after(m, 0), first, !m);
    }
}

// x [rows, in], rows a stride apart, as [rows / TILE, in / 2, TILE, 2]; the last group is padded with any numbers.
// Threads share the work, and wait for each other.
static void pack_tiles(const Bfloat16* x, int64_t stride, int64_t rows, int64_t in, uint32_t* to) {
#pragma omp for schedule(static)
  for (int64_t m = 0; m < rows; m += TILE)
    for (int64_t k = 0; k < in; k += 2 * TILE) {
      Words pairs[TILE];
      for (int64_t i = 0; i < TILE; ++i) std::memcpy(&pairs[i], x + std::min(m + i, rows - 1) * stride + k, 64);
      transpose(pairs);
      std::memcpy(to + (m * in / 2 + k / 2 * TILE), pairs, sizeof(pairs));
    }
}

// All outputs but the last, fewer than TILE, of each matrix. All threads of a team call it. packed: for `rows_of_tiles`.
static void run_tiles(const Product& p, uint32_t* packed) {
  const Tiles shapes(TILE);
  const int64_t in = p.matrices->in, most_rows = rows_of_tiles(p);
  for (int64_t row = 0; row < p.count; row += most_rows) {
    const int64_t many = std::min(p.count - row, most_rows);
    pack_tiles((const Bfloat16*)p.x + row * p.x_stride, p.x_stride, many, in, packed);
    for (int64_t n = 0, column = 0; n < p.number; column += p.matrices[n++].out) {
      const Matrix& w = p.matrices[n];
      const Output to = Output{p.y, p.y_stride, true}.after(row, column);
#pragma omp for schedule(static) nowait
      for (int64_t pair = 0; pair < w.out / (2 * TILE); ++pair)
        by_tiles(w, (const Bfloat16*)packed, many, to, pair * 2 * TILE, (pair + 1) * 2 * TILE);
#pragma omp single nowait
      by_tiles(w, (const Bfloat16*)packed, many, to, w.out / (2 * TILE) * 2 * TILE, w.out / TILE * TILE);
    }
#pragma omp barrier
  }
}
#endif
