// Readers of the tail: native, token-major, a strided view of a larger buffer.
#pragma once

#include "reader.h"

namespace kvplus {

constexpr int64_t kTailPage = 64;

template <class T>
struct Strided {
  const T* data;
  int64_t row, head, token;
  explicit Strided(const at::Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())), row(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  const T* operator()(const Place& at) const {
    return data + at.row * row + at.head * head + at.page * kTailPage * token;
  }
};

template <class T, int ROWS>
inline void dot_rows(const T* key, const float* q, int64_t ldq, int64_t dim, float* out, int64_t ldo) {
  F sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = set1(0.f);
  for (int64_t d = 0; d < dim; d += W) {
    const F x = load(key + d, dim - d);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r] = fma(x, load(q + r * ldq + d), sums[r]);
  }
  for (int r = 0; r < ROWS; r++) out[r * ldo] = sum(sums[r]);
}

template <class T>
struct TailKeys : Keys {
  Strided<T> at_place;
  explicit TailKeys(const at::Tensor& x) : at_place(x) { dim = x.size(3), page_size = kTailPage; }
  void score(const Place& at, const Matrix& q, const Matrix& scores, float*) const override {
    const T* key = at_place(at);
    for (int64_t t = 0; t < at.tokens; t++, key += at_place.token) {
      int64_t r = 0;
      for (; r + kRows <= q.rows; r += kRows)
        dot_rows<T, kRows>(key, q[r], q.stride, dim, scores[r] + t, scores.stride);
      for (; r < q.rows; r++) dot_rows<T, 1>(key, q[r], q.stride, dim, scores[r] + t, scores.stride);
    }
  }
};

template <class T>
struct TailValues : Values {
  Strided<T> at_place;
  explicit TailValues(const at::Tensor& x) : at_place(x) { dim = x.size(3); }
  void collect(const Place& at, const Matrix& weights, const Matrix& out, float*) const override {
    const Lanes<T> m{at_place(at), at_place.token};
    multiply(m, weights, at.tokens, dim, out, true);
  }
};

}  // namespace kvplus
