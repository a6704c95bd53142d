// The attention mask, a page at a time.
#pragma once

#include "reader.h"

namespace kvplus {

// The additive form of a mask, a page at a time. Rows are queries, of each head where heads differ.
struct Mask {
  at::Tensor mask;
  int64_t q_len, group, kv_heads;
  bool per_head = false;

  Mask(const std::optional<at::Tensor>& given, int64_t q_len, int64_t group, int64_t kv_heads)
      : mask(given.value_or(at::Tensor())), q_len(q_len), group(group), kv_heads(kv_heads) {
    per_head = mask.defined() && group > 1 && mask.size(1) == group * kv_heads;
  }
  int64_t rows() const { return !mask.defined() ? 0 : per_head ? group * q_len : q_len; }

  // Fills `bias` for slots `first` and on; false if it hides all of them.
  bool fill(int64_t row, int64_t head, int64_t first, int64_t count, const Matrix& bias) const {
    if (mask.scalar_type() == at::kBool) return fill_as(mask.const_data_ptr<bool>(), row, head, first, count, bias);
    return by_dtype(mask, "mask", [&](auto t) {
      return fill_as(mask.const_data_ptr<decltype(t)>(), row, head, first, count, bias);
    });
  }

 private:
  template <class T>
  bool fill_as(const T* data, int64_t row, int64_t head, int64_t first, int64_t count, const Matrix& bias) const {
    const auto stride = [&](int64_t dim) { return mask.size(dim) == 1 ? 0 : mask.stride(dim); };
    const int64_t step = mask.stride(3);
    float highest = kNegInf;
    for (int64_t r = 0; r < rows(); r++) {
      const int64_t mask_head = per_head ? head * group + r / q_len : head;
      const T* from = data + row * stride(0) + mask_head * stride(1) + r % q_len * stride(2) + first * step;
      float* to = bias[r];
      for (int64_t t = 0; t < count; t++) {
        if constexpr (std::is_same_v<T, bool>)
          to[t] = from[t * step] ? 0.f : kNegInf;
        else
          to[t] = static_cast<float>(from[t * step]);
        highest = std::max(highest, to[t]);
      }
    }
    return highest != kNegInf;
  }
};

}  // namespace kvplus
