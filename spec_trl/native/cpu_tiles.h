// Products of pairs of bfloat16 numbers, by the tile registers of Intel's AMX or by AVX-512 BF16. An element of a
// result is summed in one order, however many rows there are.

#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Of two vectors in groups of 2 * HALF lanes: the first (SECOND: the second) halves of the groups of `a`, then of `b`.
template <int64_t HALF, bool SECOND, typename V, std::size_t... LANE>
static V halves(V a, V b, std::index_sequence<LANE...>) {
  constexpr auto from = [](int64_t l) {
    return (l % (2 * HALF) < HALF ? l : (int64_t)sizeof...(LANE) + l - HALF) + (SECOND ? HALF : 0);
  };
  return __builtin_shufflevector(a, b, from(LANE)...);
}

#ifdef __AVX512F__
typedef uint32_t Words __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

template <int64_t HALF = 8>
static void transpose(Words* rows) {
  constexpr auto lanes = std::make_index_sequence<16>();
#pragma GCC unroll 16
  for (int64_t i = 0; i < 16; ++i)
    if (!(i & HALF)) {
      const Words first = rows[i], second = rows[i + HALF];
      rows[i] = halves<HALF, false>(first, second, lanes);
      rows[i + HALF] = halves<HALF, true>(first, second, lanes);
    }
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}
#endif

#ifdef __AVX512BF16__
typedef Words Tile[16];  // of pairs: row k holds numbers 2 k and 2 k + 1 of 16 sums

#ifdef __AMX_BF16__
// Asks the system for the tile registers, which a process must do once.
static bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* their data */) == 0;
  return granted;
}

struct Tiles {  // rows and bytes of eight registers while this lives: `rows` of those for sums and a of `multiply`
  alignas(64) uint8_t before[64], shapes[64] = {1};
  const bool used = has_tiles();
  explicit Tiles(int64_t rows) {
    for (int i = 0; i < 8; ++i) shapes[16 + 2 * i] = 64, shapes[48 + i] = i < 5 ? std::min<int64_t>(rows, 16) : 16;
    if (used) _tile_storeconfig(before), _tile_loadconfig(shapes);
  }
  ~Tiles() {
    if (used) _tile_loadconfig(before);
  }
};
#else
static bool has_tiles() { return false; }
struct Tiles {
  explicit Tiles(int64_t) {}
};
#endif

// Adds a [rows, 32 * steps] b, tiles [steps, 4], to sums [rows, 64]; strides in bytes. Up to the next multiple of four
// rows there is memory of both.
static void multiply(float* sums, int64_t sum_stride, const void* a, int64_t a_stride, const Tile* b, int64_t steps,
                     int64_t rows) {
#ifdef __AMX_BF16__
  if (has_tiles()) {
    _tile_loadd(0, sums, sum_stride);
    _tile_loadd(1, sums + 16, sum_stride);
    _tile_loadd(2, sums + 32, sum_stride);
    _tile_loadd(3, sums + 48, sum_stride);
    for (int64_t k = 0; k < steps; ++k, b += 4) {
      _tile_loadd(4, (const char*)a + 64 * k, a_stride);
      _tile_loadd(5, b, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, b + 1, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, b + 2, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, b + 3, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, sum_stride);
    _tile_stored(1, sums + 16, sum_stride);
    _tile_stored(2, sums + 32, sum_stride);
    _tile_stored(3, sums + 48, sum_stride);
    return;
  }
#endif
  for (int64_t row = 0; row < rows; row += 4) {
    __m512 sum[4][4];
    const auto at = [&](int64_t i) { return (float*)((char*)sums + (row + i) * sum_stride); };
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_loadu_ps(at(i) + 16 * j);
    for (int64_t k = 0; k < steps; ++k)
      for (int64_t pair = 0; pair < 16; ++pair)
        for (int i = 0; i < 4; ++i) {
          const int32_t both = *(const int32_t*)((const char*)a + (row + i) * a_stride + 64 * k + 4 * pair);
          for (int j = 0; j < 4; ++j)
            sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)_mm512_set1_epi32(both), (__m512bh)b[4 * k + j][pair]);
        }
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) _mm512_storeu_ps(at(i) + 16 * j, sum[i][j]);
  }
}
#else
[[maybe_unused]] static bool has_tiles() { return false; }
#endif
