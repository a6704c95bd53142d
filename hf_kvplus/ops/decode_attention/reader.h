// What reads the tokens of one run: sealed pages (pages.h) or the tail (tail.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "multiply.h"

namespace kvplus {

struct Place {
  int64_t row, head;  // sequence and KV head
  int64_t page;       // number of a sealed page, or column of the tail
  int64_t tokens;     // of this page, from its first
};

// Keys of one view (or of the tail).
struct Keys {
  int64_t page_size = 0, dim = 0, rotation = 0;
  virtual ~Keys() = default;
  virtual int64_t scratch(int64_t) const { return 0; }  // floats needed for so many rows
  // scores[r, t] = q[r] . key[t]
  virtual void score(const Place& place, const Matrix& q, const Matrix& scores, float* scratch) const = 0;
};

// Values of one view (or of the tail).
struct Values {
  int64_t dim = 0, rotation = 0;
  virtual ~Values() = default;
  virtual int64_t scratch(int64_t) const { return 0; }
  // out[r] += sum over t of weights[r, t] * value[t]; may overwrite `weights`
  virtual void collect(const Place& place, const Matrix& weights, const Matrix& out, float* scratch) const = 0;
};

// `make(T{})` for the floating-point type T of `x`.
template <class Make>
auto by_dtype(const at::Tensor& x, const char* what, Make make) {
  switch (x.scalar_type()) {
    case at::kFloat: return make(float{});
    case at::kHalf: return make(Half{});
    case at::kBFloat16: return make(BFloat16{});
    default: TORCH_CHECK_VALUE(false, "`", what, "` is ", x.scalar_type(), ", expected float32, bfloat16 or float16.");
  }
}

}  // namespace kvplus
