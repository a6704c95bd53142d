// Readers of sealed pages, one struct per layout (docs/layouts.md). To add a layout: a struct, and a line in `open`.
#pragma once

#include <string>

#include "reader.h"

namespace kvplus {

inline void scale_columns(const Matrix& m, int64_t columns, const Half* scale) {
  for (int64_t j = 0; j < columns; j += W) {
    const F factor = load(scale + j, columns - j);
    for (int64_t r = 0; r < m.rows; r++) store(m[r] + j, mul(load(m[r] + j), factor));
  }
}

// --- native, fp8, int8 ----------------------------------------------------------------------------------------------

template <class T>
struct PlainKeys : Keys {
  const T* data;
  explicit PlainKeys(const at::Tensor& pages) : data(static_cast<const T*>(pages.const_data_ptr())) {
    dim = pages.size(1), page_size = pages.size(2);
  }
  void score(const Place& at, const Matrix& q, const Matrix& scores, float*) const override {
    const Lanes<T> m{data + at.page * dim * page_size, page_size};
    multiply(m, q, dim, page_size, scores, false);
  }
};

template <class T>
struct PlainValues : Values {
  const T* data;
  int64_t page_size;
  explicit PlainValues(const at::Tensor& pages) : data(static_cast<const T*>(pages.const_data_ptr())) {
    page_size = pages.size(1), dim = pages.size(2);
  }
  void collect(const Place& at, const Matrix& weights, const Matrix& out, float*) const override {
    const Lanes<T> m{data + at.page * dim * page_size, dim};
    multiply(m, weights, page_size, dim, out, true);
  }
};

struct Int8Keys : PlainKeys<int8_t> {
  const Half* scale;
  Int8Keys(const at::Tensor& pages, const at::Tensor& scales)
      : PlainKeys(pages), scale(scales.const_data_ptr<Half>()) {}
  void score(const Place& at, const Matrix& q, const Matrix& scores, float* scratch) const override {
    PlainKeys::score(at, q, scores, scratch);
    scale_columns(scores, page_size, scale + at.page * page_size);
  }
};

struct Int8Values : PlainValues<int8_t> {
  const Half* scale;
  Int8Values(const at::Tensor& pages, const at::Tensor& scales)
      : PlainValues(pages), scale(scales.const_data_ptr<Half>()) {}
  void collect(const Place& at, const Matrix& weights, const Matrix& out, float* scratch) const override {
    scale_columns(weights, page_size, scale + at.page * page_size);
    PlainValues::collect(at, weights, out, scratch);
  }
};

// --- int4, int2 -----------------------------------------------------------------------------------------------------

// x[c, l] = code[c, l] * scale[c, g] + zero[c, g], g the group of lane l. Scales go into the weights of a product,
// zeros become one number per group.
template <int BITS>
struct Packed {
  static constexpr int unit = 8 / BITS;
  const uint8_t* data;
  const Half *scale, *zero;
  int64_t rows, lanes, groups, group;

  Packed(const at::Tensor& pages, const at::Tensor& scales, const at::Tensor& zeros)
      : data(pages.const_data_ptr<uint8_t>()),
        scale(scales.const_data_ptr<Half>()),
        zero(zeros.const_data_ptr<Half>()),
        rows(pages.size(1)),
        lanes(pages.size(2) * unit),
        groups(scales.numel() / std::max<int64_t>(scales.size(0), 1) / rows),
        group(groups > 1 ? 32 : lanes) {}

  bool split_groups() const { return groups > 1 && lanes / unit % W; }  // a vector may lie in two groups

  int64_t scratch(int64_t n) const {
    return groups * (3 * padded(rows) + n * (padded(rows) + 1)) + (split_groups() ? rows * padded(lanes) : 0);
  }

  // out[r, l] (+)= sum over c of a[r, c] * x[c, l] of a page
  void multiply_page(int64_t page, const Matrix& a, const Matrix& out, bool accumulate, float* memory) const {
    if (groups == 1) return multiply_one_group(page, a, out, accumulate, memory);
    if (!accumulate) std::fill_n(out.data, out.rows * out.stride, 0.f);
    const int64_t width = padded(rows), n = a.rows;
    float *scales = memory, *zeros = scales + groups * width, *rest = zeros + groups * width;
    by_group(scale + page * rows * groups, scales, rest);
    by_group(zero + page * rows * groups, zeros, rest);
    const uint8_t* codes = data + page * rows * (lanes / unit);
    if (split_groups()) {
      const int64_t stride = padded(lanes);
      decode(codes, scales, zeros, rest, stride);
      return multiply(Lanes<float>{rest, stride}, a, rows, lanes, out, true);
    }
    float* bias = rest + groups * n * width;
    for (int64_t g = 0; g < groups; g++) {
      for (int64_t r = 0; r < n; r++) {
        F total = set1(0.f);
        for (int64_t c = 0; c < width; c += W) {
          const F x = load(a[r] + c);
          store(rest + (g * n + r) * width + c, mul(x, load(scales + g * width + c)));
          total = fma(x, load(zeros + g * width + c), total);
        }
        const F offset = set1(sum(total));
        for (int64_t l = g * group, end = std::min(lanes, l + group); l < end; l += W)
          store(out[r] + l, add(load(out[r] + l, end - l), offset), end - l);
      }
    }
    const Matrix weights{rest, n, rows, width};
    multiply(Codes<BITS, BITS == 2>{codes, lanes / unit, group, n * width}, weights, rows, lanes, out, true);
  }

 private:
  // As `multiply_page`, where a row has one scale and one zero.
  void multiply_one_group(int64_t page, const Matrix& a, const Matrix& out, bool accumulate, float* memory) const {
    const int64_t width = padded(rows), n = a.rows;
    float* offsets = memory + n * width;
    const Half *scales = scale + page * rows, *zeros = zero + page * rows;
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t end = std::min<int64_t>(kRows, n - r);
      F totals[kRows];
      for (int i = 0; i < kRows; i++) totals[i] = set1(0.f);
      for (int64_t c = 0; c < rows; c += W) {
        const F s = load(scales + c, rows - c), z = load(zeros + c, rows - c);
        for (int64_t i = 0; i < end; i++) {
          const F x = load(a[r + i] + c);
          store(memory + (r + i) * width + c, mul(x, s));
          totals[i] = fma(x, z, totals[i]);
        }
      }
      for (int64_t i = 0; i < end; i++) offsets[r + i] = sum(totals[i]);
    }
    const Codes<BITS, false> codes{data + page * rows * (lanes / unit), lanes / unit, lanes, 0};
    multiply(codes, {memory, n, rows, width}, rows, lanes, out, accumulate, offsets);
  }

  // [rows, groups] as float [groups, padded rows]
  void by_group(const Half* from, float* to, float* memory) const {
    const int64_t width = padded(rows), count = rows * groups;
    std::fill_n(to, groups * width, 0.f);
    float* flat = groups == 1 ? to : memory;
    for (int64_t i = 0; i < count; i += W) store(flat + i, load(from + i, count - i), count - i);
    for (int64_t g = 0; groups > 1 && g < groups; g++)
      for (int64_t c = 0; c < rows; c++) to[g * width + c] = flat[c * groups + g];
  }

  void decode(const uint8_t* codes, const float* scales, const float* zeros, float* out, int64_t stride) const {
    const int64_t span = lanes / unit;
    const Codes<BITS, false> m{codes, span, lanes, 0};
    for (int64_t c = 0; c < rows; c++) {
      float* to = out + c * stride;
      F x[unit];
      for (int64_t j = 0; j < span; j += W) {
        m.read(c, j, span - j, x);
        for (int u = 0; u < unit; u++) store(to + u * span + j, x[u], span - j);
      }
      for (int64_t l = 0; l < lanes; l += W) {
        const int64_t at = l / group * padded(rows) + c;
        store(to + l, fma(load(to + l), set1(scales[at]), set1(zeros[at])));
      }
    }
  }
};

template <int BITS>
struct PackedKeys : Keys {
  Packed<BITS> packed;
  PackedKeys(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& zero) : packed(data, scale, zero) {
    dim = packed.rows, page_size = packed.lanes;
  }
  int64_t scratch(int64_t n) const override { return packed.scratch(n); }
  void score(const Place& at, const Matrix& q, const Matrix& scores, float* memory) const override {
    packed.multiply_page(at.page, q, scores, false, memory);
  }
};

template <int BITS>
struct PackedValues : Values {
  Packed<BITS> packed;
  PackedValues(const at::Tensor& data, const at::Tensor& scale, const at::Tensor& zero) : packed(data, scale, zero) {
    dim = packed.lanes;
  }
  int64_t scratch(int64_t n) const override { return packed.scratch(n); }
  void collect(const Place& at, const Matrix& weights, const Matrix& out, float* memory) const override {
    packed.multiply_page(at.page, weights, out, true, memory);
  }
};

// --- by name --------------------------------------------------------------------------------------------------------

// What reads a view in `layout`. Its parts are taken from `parts`, in the order of docs/layouts.md.
template <class Base, template <class> class Plain, class Int8, class Int4, class Int2>
std::unique_ptr<Base> open(const std::string& layout, const at::Tensor*& parts) {
  const at::Tensor& data = *parts++;
  TORCH_CHECK_VALUE(data.is_contiguous(), "`parts` must be contiguous.");
  const auto plain = [&](auto t) -> std::unique_ptr<Base> { return std::make_unique<Plain<decltype(t)>>(data); };
  if (layout == "native") return by_dtype(data, "parts", plain);
  if (layout == "fp8") return data.scalar_type() == at::kFloat8_e5m2 ? plain(Float8_e5m2{}) : plain(Float8_e4m3fn{});
  const at::Tensor& scale = *parts++;
  if (layout == "int8") return std::make_unique<Int8>(data, scale);
  const at::Tensor& zero = *parts++;
  if (layout == "int4") return std::make_unique<Int4>(data, scale, zero);
  if (layout == "int2") return std::make_unique<Int2>(data, scale, zero);
  TORCH_CHECK_VALUE(false, "`layouts` has '", layout, "', which this kernel does not read.");
}

constexpr auto open_keys = open<Keys, PlainKeys, Int8Keys, PackedKeys<4>, PackedKeys<2>>;
constexpr auto open_values = open<Values, PlainValues, Int8Values, PackedValues<4>, PackedValues<2>>;

}  // namespace kvplus
