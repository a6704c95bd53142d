// Vectors of `W` floats on AVX-512, AVX2, or whatever the compiler makes of plain loops.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvplus {

using c10::BFloat16;
using c10::Float8_e4m3fn;
using c10::Float8_e5m2;
using c10::Half;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr int W = 16;
using F = __m512;
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float top(F x) { return _mm512_reduce_max_ps(x); }
inline F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F ldexp(F x, F n) { return _mm512_scalef_ps(x, n); }
inline F zero_up_to(F limit, F x, F y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLE_UQ), y); }
inline F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline F load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F load(const Float8_e5m2* p) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8));
}
// As float16 with the same exponent bits the number is 2^-8 of what it should be; the one NaN becomes float16's.
inline F load(const Float8_e4m3fn* p) {
  const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16(-0x8000));
  return mul(_mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(magnitude, nan), sign)), set1(256.f));
}
// Codes of `BITS` bits: one vector per place in the byte.
template <int BITS>
inline void unpack(const uint8_t* p, F* out) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  // A table of 16 floats, indexed by the lowest four bits: one instruction in place of a mask and a conversion.
  constexpr int top = (1 << BITS) - 1;
  const __m512 table = _mm512_setr_ps(
      0 & top, 1 & top, 2 & top, 3 & top, 4 & top, 5 & top, 6 & top, 7 & top, 8 & top, 9 & top, 10 & top, 11 & top,
      12 & top, 13 & top, 14 & top, 15 & top);
#pragma GCC unroll 4
  for (int i = 0; i < 8 / BITS; i++) out[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, BITS * i), table);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int W = 8;
using F = __m256;
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float top(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F ldexp(F x, F n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return mul(x, _mm256_castsi256_ps(bits));
}
inline F zero_up_to(F limit, F x, F y) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLE_UQ), y); }
inline F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F load(const Float8_e5m2* p) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8));
}
// As float16 with the same exponent bits the number is 2^-8 of what it should be; the one NaN becomes float16's.
inline F load(const Float8_e4m3fn* p) {
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
  const __m128i sign = _mm_and_si128(x, _mm_set1_epi16(-0x8000));
  return mul(_mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(magnitude, nan), sign)), set1(256.f));
}
// Codes of `BITS` bits: one vector per place in the byte.
template <int BITS>
inline void unpack(const uint8_t* p, F* out) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i mask = _mm256_set1_epi32((1 << BITS) - 1);
#pragma GCC unroll 4
  for (int i = 0; i < 8 / BITS; i++)
    out[i] = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes, BITS * i), mask));
}

#else

constexpr int W = 8;
struct F {
  float x[W];
};
template <class Op>
inline F each(Op op) {
  F out;
  for (int i = 0; i < W; i++) out.x[i] = op(i);
  return out;
}
inline F set1(float x) { return each([&](int) { return x; }); }
template <class T>
inline F load(const T* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
// Codes of `BITS` bits: one vector per place in the byte.
template <int BITS>
inline void unpack(const uint8_t* p, F* out) {
  for (int k = 0; k < 8 / BITS; k++) out[k] = each([&](int i) { return float(p[i] >> BITS * k & ((1 << BITS) - 1)); });
}
inline void store(float* p, F x) { std::memcpy(p, x.x, sizeof(x.x)); }
inline F add(F a, F b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline F sub(F a, F b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline F mul(F a, F b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline F div(F a, F b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline F max(F a, F b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
inline F min(F a, F b) { return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
inline F fma(F a, F b, F c) { return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; }); }
inline float sum(F x) {
  float s = 0;
  for (float v : x.x) s += v;
  return s;
}
inline float top(F x) { return *std::max_element(x.x, x.x + W); }
inline F nearest(F x) { return each([&](int i) { return std::nearbyint(x.x[i]); }); }
inline F ldexp(F x, F n) { return each([&](int i) { return std::ldexp(x.x[i], static_cast<int>(n.x[i])); }); }
inline F zero_up_to(F limit, F x, F y) {
  return each([&](int i) { return x.x[i] <= limit.x[i] ? 0.f : y.x[i]; });
}

#endif

// The first `n` elements, zeros behind them; nothing past them is read.
template <class T>
inline F load(const T* p, int64_t n) {
  if (n >= W) return load(p);
  T buffer[W] = {};
  std::memcpy(static_cast<void*>(buffer), p, n * sizeof(T));
  return load(buffer);
}

inline void store(float* p, F x, int64_t n) {
  if (n >= W) return store(p, x);
  float buffer[W];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(float));
}

// e^x for x <= 88, zero up to -87 (so that e^-inf is 0), NaN for NaN; relative error below 2e-7.
inline F exp(F x) {
  const F lowest = set1(-87.f), y = max(lowest, x);
  const F n = nearest(mul(y, set1(1.44269504f)));
  const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), y));
  F p = set1(1.98412698e-4f);
  for (float term : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.f, 1.f})
    p = fma(p, r, set1(term));
  return zero_up_to(lowest, x, ldexp(p, n));
}

inline F tanh(F x) {
  const F e = exp(min(add(x, x), set1(80.f)));
  return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
}

}  // namespace kvplus
