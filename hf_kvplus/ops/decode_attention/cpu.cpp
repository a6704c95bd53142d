// Decode attention over pages, for the CPU: every encoded byte is read once, all query heads of a KV head together.
// An online softmax runs over the pages of a split; the splits of a row and head are merged at the end.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "mask.h"
#include "pages.h"
#include "tail.h"

namespace kvplus {

// One view of pages, or the tail.
struct Run {
  std::unique_ptr<Keys> keys;
  std::unique_ptr<Values> values;
  int64_t first_slot, columns, tokens;
  at::Tensor table;  // undefined for the tail, whose columns are pages of their own

  int64_t page(int64_t row, int64_t head, int64_t column) const {
    if (!table.defined()) return column;
    const int64_t offset = row * table.stride(0) + head * table.stride(1) + column * table.stride(2);
    return table.const_data_ptr<int32_t>()[offset];
  }
};

// Walsh-Hadamard transform, orthonormal, of blocks of `size` channels.
inline void rotate(float* x, int64_t dim, int64_t size) {
  const float norm = 1.f / std::sqrt(static_cast<float>(size));
  for (int64_t block = 0; block < dim; block += size)
    for (int64_t half = 1; half < size; half *= 2)
      for (int64_t i = block; i < block + size; i += 2 * half)
        for (int64_t j = i; j < i + half; j++) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b, x[j + half] = a - b;
        }
  for (int64_t d = 0; d < dim; d++) x[d] *= norm;
}

struct Call {
  at::Tensor query, sinks;
  std::vector<Run> runs;
  Mask mask;
  float scale, softcap;
  int64_t rows, heads, kv_heads, group, q_len, dim, value_dim;  // sizes
  int64_t columns = 0, widest = W, splits = 1, scratch_size = 0;
  int64_t key_rotation = 0, value_rotation = 0;

  int64_t queries() const { return group * q_len; }  // rows of the matrices: query `r % q_len` of head `r / q_len`
  int64_t state_size() const { return queries() * (padded(value_dim) + 2); }

  // What a split leaves: sums of weighted values, and the maximum and sum of the weights.
  struct State {
    Matrix out;
    float *top, *total;
  };
  State state(float* memory) const {
    const int64_t n = queries(), width = padded(value_dim);
    return {{memory, n, value_dim, width}, memory + n * width, memory + n * width + n};
  }

  void run_split(int64_t row, int64_t head, int64_t split, const State& state, std::vector<float>& memory) const;
  template <class T>
  void merge(int64_t row, int64_t head, float* states, T* out) const;
  template <class T>
  void load_query(int64_t row, int64_t head, const Matrix& q) const;
};

template <class T>
void Call::load_query(int64_t row, int64_t head, const Matrix& q) const {
  const int64_t step = query.stride(3);
  for (int64_t r = 0; r < q.rows; r++) {
    const T* from = query.const_data_ptr<T>() + row * query.stride(0) + (head * group + r / q_len) * query.stride(1) +
        r % q_len * query.stride(2);
    for (int64_t d = 0; d < dim; d++) q[r][d] = scale * static_cast<float>(from[d * step]);
    std::fill(q[r] + dim, q[r] + q.stride, 0.f);
  }
}

// One page's scores become weights `e^(score - top)`; sums so far are brought to the new `top`.
static void soften(
    const Matrix& scores, int64_t tokens, const Matrix& bias, float softcap, const Call::State& state,
    const Matrix& rotated_out) {
  const int64_t end = padded(tokens);
  for (int64_t r = 0; r < scores.rows; r++) {
    float* s = scores[r];
    if (softcap > 0)
      for (int64_t j = 0; j < end; j += W)
        store(s + j, mul(set1(softcap), tanh(mul(load(s + j), set1(1.f / softcap)))));
    std::fill(s + tokens, s + end, kNegInf);
    F highest = set1(kNegInf);
    if (bias.rows) {
      const float* b = bias[r % bias.rows];
      for (int64_t j = 0; j < end; j += W) {
        const F x = add(load(s + j), load(b + j));
        store(s + j, x);
        highest = max(highest, x);
      }
    } else {
      for (int64_t j = 0; j < end; j += W) highest = max(highest, load(s + j));
    }
    const float top_so_far = state.top[r], new_top = std::max(top_so_far, top(highest));
    if (new_top == kNegInf) {
      std::fill(s, s + end, 0.f);
      continue;
    }
    if (new_top != top_so_far) {
      const float shrink = std::exp(top_so_far - new_top);
      for (const Matrix& sums : {state.out, rotated_out})
        if (sums.rows)
          for (int64_t d = 0; d < sums.stride; d += W) store(sums[r] + d, mul(load(sums[r] + d), set1(shrink)));
      state.total[r] *= shrink;
      state.top[r] = new_top;
    }
    F total = set1(0.f);
    for (int64_t j = 0; j < end; j += W) {
      const F weight = exp(sub(load(s + j), set1(new_top)));
      store(s + j, weight);
      total = add(total, weight);
    }
    state.total[r] += sum(total);
  }
}

void Call::run_split(int64_t row, int64_t head, int64_t split, const State& state, std::vector<float>& memory) const {
  const int64_t n = queries(), q_width = padded(dim), out_width = padded(value_dim);
  const int64_t key_rows = key_rotation ? n : 0, value_rows = value_rotation ? n : 0, mask_rows = mask.rows();
  memory.resize((n + key_rows) * q_width + value_rows * out_width + (n + mask_rows) * widest + scratch_size);
  float* free = memory.data();
  const auto take = [&](int64_t rows, int64_t columns) {
    Matrix m{free, rows, columns, padded(columns)};
    free += rows * m.stride;
    return m;
  };
  const Matrix q = take(n, dim), rotated_q = take(key_rows, dim), rotated_out = take(value_rows, value_dim);
  const Matrix scores = take(n, widest), bias = take(mask_rows, widest);
  float* scratch = free;

  by_dtype(query, "query", [&](auto t) { load_query<decltype(t)>(row, head, q); });
  if (key_rotation) {
    std::copy_n(q.data, n * q_width, rotated_q.data);
    for (int64_t r = 0; r < n; r++) rotate(rotated_q[r], dim, key_rotation);
  }
  std::fill_n(state.out.data, n * out_width, 0.f);
  std::fill_n(rotated_out.data, value_rows * out_width, 0.f);
  std::fill_n(bias.data, mask_rows * widest, 0.f);
  std::fill_n(state.top, n, kNegInf);
  std::fill_n(state.total, n, 0.f);

  int64_t begin = columns * split / splits, end = columns * (split + 1) / splits;
  for (const Run& run : runs) {
    for (int64_t column = std::max<int64_t>(begin, 0); column < std::min(end, run.columns); column++) {
      const int64_t page = run.page(row, head, column), size = run.keys->page_size;
      if (page < 0) continue;
      const Place place{row, head, page, std::min(size, run.tokens - column * size)};
      if (mask_rows && !mask.fill(row, head, run.first_slot + column * size, place.tokens, bias)) continue;
      run.keys->score(place, run.keys->rotation ? rotated_q : q, scores, scratch);
      soften(scores, place.tokens, bias, softcap, state, rotated_out);
      run.values->collect(place, scores, run.values->rotation ? rotated_out : state.out, scratch);
    }
    begin -= run.columns, end -= run.columns;
  }
  for (int64_t r = 0; r < value_rows; r++) {
    rotate(rotated_out[r], value_dim, value_rotation);
    for (int64_t d = 0; d < value_dim; d++) state.out[r][d] += rotated_out[r][d];
  }
}

template <class T>
void Call::merge(int64_t row, int64_t head, float* states, T* out) const {
  std::vector<float> sums(value_dim);
  for (int64_t r = 0; r < queries(); r++) {
    const int64_t query_head = head * group + r / q_len;
    const float sink = sinks.defined() ? sinks.const_data_ptr<float>()[query_head] : kNegInf;
    float top = sink, total = 0.f;
    for (int64_t s = 0; s < splits; s++) top = std::max(top, state(states + s * state_size()).top[r]);
    if (sinks.defined()) total = std::exp(sink - top);
    std::fill(sums.begin(), sums.end(), 0.f);
    for (int64_t s = 0; s < splits; s++) {
      const State part = state(states + s * state_size());
      if (part.top[r] == kNegInf) continue;
      const float weight = std::exp(part.top[r] - top);
      total += weight * part.total[r];
      for (int64_t d = 0; d < value_dim; d++) sums[d] += weight * part.out[r][d];
    }
    const float norm = total == 0.f ? 0.f : 1.f / total;
    T* to = out + ((row * q_len + r % q_len) * heads + query_head) * value_dim;
    for (int64_t d = 0; d < value_dim; d++) to[d] = static_cast<T>(sums[d] * norm);
  }
}

static at::Tensor innermost_dense(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Schema and meaning: cpu.py, and decode_attention in __init__.py.
at::Tensor decode_attention(
    const at::Tensor& query, at::TensorList tables, at::TensorList parts, std::vector<std::string> layouts,
    at::IntArrayRef rotations, const at::Tensor& tail_keys, const at::Tensor& tail_values,
    const std::optional<at::Tensor>& mask, double scale, std::optional<double> softcap,
    const std::optional<at::Tensor>& sinks) {
  const int64_t heads = query.size(1), kv_heads = tail_keys.size(1), q_len = query.size(2);
  Call call{query, sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor(), {},
            Mask(mask, q_len, heads / kv_heads, kv_heads), static_cast<float>(scale),
            static_cast<float>(softcap.value_or(0)), query.size(0), heads, kv_heads, heads / kv_heads, q_len,
            query.size(3), tail_values.size(3)};

  TORCH_CHECK_VALUE(tail_keys.size(0) == call.rows && tail_keys.sizes().slice(0, 3) == tail_values.sizes().slice(0, 3),
                    "`tail_keys` is ", tail_keys.sizes(), " and `tail_values` is ", tail_values.sizes(),
                    ", expected as many rows as `query` has (", call.rows, "), and as many heads and tokens in both.");
  TORCH_CHECK_VALUE(!sinks || sinks->numel() == heads, "`sinks` is ", sinks ? sinks->numel() : 0,
                    " numbers, expected one for each of the ", heads, " heads.");

  int64_t slots = 0;
  const auto append = [&](std::unique_ptr<Keys> keys, std::unique_ptr<Values> values, int64_t columns, int64_t tokens,
                          const at::Tensor& table) {
    TORCH_CHECK_VALUE(keys->dim == call.dim && values->dim == call.value_dim,
                      "`query` and `tail_values` have ", call.dim,
                      " and ", call.value_dim, " channels, the pages ", keys->dim, " and ", values->dim, ".");
    call.widest = std::max(call.widest, padded(keys->page_size));
    call.scratch_size = std::max({call.scratch_size, keys->scratch(call.queries()), values->scratch(call.queries())});
    call.columns += columns;
    call.runs.push_back({std::move(keys), std::move(values), slots, columns, tokens, table});
    slots += tokens;
  };
  const at::Tensor* part = parts.begin();
  for (size_t i = 0; i < tables.size(); i++) {
    auto keys = open_keys(layouts[2 * i], part);
    auto values = open_values(layouts[2 * i + 1], part);
    for (auto [rotation, of_all] : {std::pair{&(keys->rotation = rotations[2 * i]), &call.key_rotation},
                                    std::pair{&(values->rotation = rotations[2 * i + 1]), &call.value_rotation}})
      if (*rotation) *of_all = *rotation;  // it follows from the width: one for all views
    const int64_t columns = tables[i].size(2), page_size = keys->page_size;
    append(std::move(keys), std::move(values), columns, columns * page_size, tables[i]);
  }
  TORCH_CHECK(part == parts.end(), "more parts than the layouts have");
  const at::Tensor k = innermost_dense(tail_keys), v = innermost_dense(tail_values);
  if (const int64_t tokens = k.size(2)) {
    auto keys = by_dtype(k, "tail_keys", [&](auto t) -> std::unique_ptr<Keys> {
      return std::make_unique<TailKeys<decltype(t)>>(k);
    });
    auto values = by_dtype(v, "tail_values", [&](auto t) -> std::unique_ptr<Values> {
      return std::make_unique<TailValues<decltype(t)>>(v);
    });
    append(std::move(keys), std::move(values), (tokens + kTailPage - 1) / kTailPage, tokens, at::Tensor());
  }

  // A few pieces of work for each thread, which takes the next one when it is done: rows differ in length.
  const int64_t pairs = call.rows * kv_heads, threads = at::get_num_threads();
  const int64_t work = pairs * call.queries() * slots * (call.dim + call.value_dim);
  const bool parallel = work >= 1 << 20 && threads > 1;
  if (parallel && pairs) call.splits = std::clamp<int64_t>((4 * threads + pairs - 1) / pairs, 1, slots / 256 + 1);

  const int64_t pieces = pairs * call.splits, size = call.state_size();
  const at::Tensor states = at::empty({pieces * size}, at::kFloat);
  const at::Tensor out = at::empty({call.rows, q_len, heads, call.value_dim}, query.options());
  float* memory = states.data_ptr<float>();
  std::atomic<int64_t> next{0};
  at::parallel_for(0, parallel ? threads : 1, 1, [&](int64_t, int64_t) {
    std::vector<float> scratch;
    for (int64_t i; (i = next++) < pieces;) {
      const int64_t pair = i / call.splits;
      call.run_split(pair / kv_heads, pair % kv_heads, i % call.splits, call.state(memory + i * size), scratch);
    }
  });
  by_dtype(out, "query", [&](auto t) {
    using T = decltype(t);
    for (int64_t pair = 0; pair < pairs; pair++)
      call.merge<T>(pair / kv_heads, pair % kv_heads, memory + pair * call.splits * size, out.data_ptr<T>());
  });
  return out;
}

TORCH_LIBRARY_IMPL(hf_kvplus, CPU, m) { m.impl("decode_attention", decode_attention); }

}  // namespace kvplus
