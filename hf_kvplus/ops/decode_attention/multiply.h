// Small matrix products straight from encoded rows: the one loop in which decoding spends its time.
#pragma once

#include "simd.h"

namespace kvplus {

// A row-major matrix of floats whose rows start `stride` apart.
struct Matrix {
  float* data;
  int64_t rows, columns, stride;
  float* operator[](int64_t r) const { return data + r * stride; }
};

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// Encoded rows: row `c` is a channel of a page of keys or a token of one of values, its lanes are tokens or channels.
// A read yields `unit` vectors: a byte that holds `unit` codes serves as many lanes, a `unit`-th of the row apart.
// Where `grouped`, weights differ between groups of lanes, `weights(lane)` floats apart.
template <class T>
struct Lanes {
  static constexpr int unit = 1;
  static constexpr bool grouped = false;
  const T* data;
  int64_t stride;
  void read(int64_t c, int64_t j, F* out) const { out[0] = load(data + c * stride + j); }
  void read(int64_t c, int64_t j, int64_t n, F* out) const { out[0] = load(data + c * stride + j, n); }
};

template <int BITS, bool GROUPED>
struct Codes {
  static constexpr int unit = 8 / BITS;
  static constexpr bool grouped = GROUPED;
  const uint8_t* data;
  int64_t stride, group, group_step;
  void read(int64_t c, int64_t j, F* out) const { unpack<BITS>(data + c * stride + j, out); }
  void read(int64_t c, int64_t j, int64_t n, F* out) const {
    uint8_t bytes[W] = {};
    std::memcpy(bytes, data + c * stride + j, std::min<int64_t>(n, W));
    unpack<BITS>(bytes, out);
  }
  int64_t weights(int64_t lane) const { return lane / group * group_step; }
};

constexpr int kRows = 4, kVectors = W == 16 ? 4 : 2;  // accumulators that fit the registers

template <int ROWS, int STEPS, class M>
inline void multiply_block(
    const M& m, const float* a, int64_t lda, int64_t count, int64_t j, int64_t n, int64_t span, float* out, int64_t ldo,
    bool accumulate, const float* offset) {
  constexpr int V = STEPS * M::unit;
  F sums[ROWS][V];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = set1(offset ? offset[r] : 0.f);
  const float* from[V];
  for (int v = 0; v < V; v++) {
    from[v] = a;
    if constexpr (M::grouped) from[v] += m.weights(v % M::unit * span + j + v / M::unit * W);
  }
  for (int64_t c = 0; c < count; c++) {
    F x[V];
    if (STEPS > 1 || n >= W) {
#pragma GCC unroll 16
      for (int s = 0; s < STEPS; s++) m.read(c, j + s * W, x + s * M::unit);
    } else {
      m.read(c, j, n, x);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const F weight = set1(from[0][r * lda + c]);
#pragma GCC unroll 16
      for (int v = 0; v < V; v++)
        sums[r][v] = fma(M::grouped ? set1(from[v][r * lda + c]) : weight, x[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      float* p = out + r * ldo + (v % M::unit) * span + j + (v / M::unit) * W;
      const int64_t lanes = STEPS > 1 ? W : n;
      store(p, accumulate ? add(load(p, lanes), sums[r][v]) : sums[r][v], lanes);
    }
}

template <int ROWS, class M>
inline void multiply_rows(
    const M& m, const float* a, int64_t lda, int64_t count, int64_t span, float* out, int64_t ldo, bool accumulate,
    const float* offset) {
  constexpr int STEPS = std::max(1, kVectors / M::unit);
  int64_t j = 0;
  if constexpr (STEPS > 1)
    for (; j + STEPS * W <= span; j += STEPS * W)
      multiply_block<ROWS, STEPS>(m, a, lda, count, j, W, span, out, ldo, accumulate, offset);
  for (; j < span; j += W)
    multiply_block<ROWS, 1>(m, a, lda, count, j, std::min<int64_t>(W, span - j), span, out, ldo, accumulate, offset);
}

// out[r, l] (+)= offset[r] + sum over c < count of a[r, c] * m[c, l], for `lanes` values of l; no `offset` is zeros.
template <class M>
void multiply(
    const M& m, const Matrix& a, int64_t count, int64_t lanes, const Matrix& out, bool accumulate,
    const float* offset = nullptr) {
  const int64_t blocks = (a.rows + kRows - 1) / kRows, span = lanes / M::unit;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t r = a.rows * b / blocks;
    const float* own = offset ? offset + r : nullptr;
    switch (a.rows * (b + 1) / blocks - r) {
      case 1: multiply_rows<1>(m, a[r], a.stride, count, span, out[r], out.stride, accumulate, own); break;
      case 2: multiply_rows<2>(m, a[r], a.stride, count, span, out[r], out.stride, accumulate, own); break;
      case 3: multiply_rows<3>(m, a[r], a.stride, count, span, out[r], out.stride, accumulate, own); break;
      default: multiply_rows<4>(m, a[r], a.stride, count, span, out[r], out.stride, accumulate, own); break;
    }
  }
}

}  // namespace kvplus
