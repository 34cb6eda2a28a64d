#include "operations.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "held_inputs.h"
#include "layer_product.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "threads.h"
#include "weight_arrays.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// The axes of x that indices are broadcast with: all but those of a matrix.
mx::Shape batch_shape(const mx::array& x) { return mx::Shape(x.shape().begin(), x.shape().end() - 2); }

// The place in an array of `shape` of what is at `place` once it is broadcast to `common`.
long place_before_broadcast(long place, const mx::Shape& common, const mx::Shape& shape) {
  long result = 0, step = 1;
  for (size_t behind = 1; behind <= shape.size(); ++behind) {
    const long size = shape[shape.size() - behind], common_size = common[common.size() - behind];
    if (size > 1) result += place % common_size * step;
    place /= common_size;
    step *= size;
  }
  return result;
}

// A matrix of x and the expert that it is multiplied with.
struct Pair {
  long expert;
  long matrix;  // place of it in x
  long result;  // place of the product in the result
};

// The pairs of one expert, whose weights are read once for all of them.
struct ExpertRows {
  const Pair* first;
  long pairs;
  const float* x;
  float* out;
  // Copies of rows that do not lie one behind another, and room for their results.
  std::unique_ptr<float[]> gathered, apart;
};

// Pairs in the order of their experts; an index that is negative comes behind all others, as one too large does.
std::vector<Pair> sorted_pairs(const mx::array& indices, const mx::Shape& matrices, const mx::Shape& common) {
  long count = 1;
  for (const int size : common) count *= size;
  std::vector<Pair> pairs(count);
  for (long at = 0; at < count; ++at) {
    const long expert = indices.data<uint32_t>()[place_before_broadcast(at, common, indices.shape())];
    pairs[at] = {expert, place_before_broadcast(at, common, matrices), at};
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
  return pairs;
}

// Rows by expert; those that lie apart are brought together. x, out: [matrices, rows, inputs or outputs].
std::vector<ExpertRows> rows_by_expert(const std::vector<Pair>& pairs, const float* x, float* out, long rows, const Weights& weights) {
  const long x_size = rows * weights.inputs, out_size = rows * weights.outputs;
  std::vector<ExpertRows> result;
  for (size_t from = 0, to; from < pairs.size(); from = to) {
    const Pair& first = pairs[from];
    bool lie_together = true;
    for (to = from + 1; to < pairs.size() && pairs[to].expert == first.expert; ++to)
      lie_together &= pairs[to].matrix - pairs[to - 1].matrix == 1 && pairs[to].result - pairs[to - 1].result == 1;
    ExpertRows one{&first, long(to - from), x + first.matrix * x_size, out + first.result * out_size, nullptr, nullptr};
    if (!lie_together) {
      one.gathered = std::make_unique_for_overwrite<float[]>(one.pairs * x_size);
      one.apart = std::make_unique_for_overwrite<float[]>(one.pairs * out_size);
      for (long at = 0; at < one.pairs; ++at)
        std::memcpy(one.gathered.get() + at * x_size, x + one.first[at].matrix * x_size, sizeof(float) * x_size);
      one.x = one.gathered.get();
      one.out = one.apart.get();
    }
    result.push_back(std::move(one));
  }
  return result;
}

class GatheredProductPrimitive : public mx::UnaryPrimitive {
 public:
  GatheredProductPrimitive(mx::Stream stream, Weights weights, mx::Shape weights_shape, const Kernels* kernels)
      : UnaryPrimitive(stream), weights_(weights), weights_shape_(std::move(weights_shape)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [held = HeldInputs(inputs, stream()), to = mx::array::unsafe_weak_copy(out), weights = weights_, experts = weights_shape_[0],
         kernels = kernels_]() mutable {
          held.gather();
          compute(held, to, weights, experts, *kernels);
        });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdGatheredProduct"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const GatheredProductPrimitive&>(other);
    const auto& its = another.weights_;
    return another.kernels_ == kernels_ && its.format == weights_.format && its.bits == weights_.bits && its.group == weights_.group;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const mx::array& x = inputs[0];
    refuse(x.ndim() < 2 || x.shape(-1) != weights_.inputs || inputs[2].shape() != weights_shape_, kOtherSizes);
    auto groups = weights_shape_;
    groups.back() = int(weights_.inputs / weights_.group);
    for (size_t at = 3; at < inputs.size(); ++at) refuse(inputs[at].shape() != groups, kOtherSizes);
    auto shape = mx::broadcast_shapes(batch_shape(x), inputs[1].shape());
    shape.push_back(x.shape(-2));
    shape.push_back(int(weights_.outputs));
    return {shape};
  }

 private:
  static void compute(const HeldInputs& held, mx::array& out, Weights weights, long experts, const Kernels& kernels) {
    set_addresses(weights, held, 2);
    const mx::array& x = held[0];
    const long matrix_rows = x.shape(-2), outputs = weights.outputs, out_size = matrix_rows * outputs;
    if (weights.inputs == 0) std::fill_n(out.data<float>(), out.size(), 0.0f);  // sums of nothing
    auto pairs = sorted_pairs(held[1], batch_shape(x), batch_shape(out));
    // An exception would be lost where the result is read without mx.eval; what is not a number ends the row that it belongs to.
    for (; !pairs.empty() && pairs.back().expert >= experts; pairs.pop_back())
      std::fill_n(out.data<float>() + pairs.back().result * out_size, out_size, std::numeric_limits<float>::quiet_NaN());
    if (weights.inputs == 0 || pairs.empty()) return;
    const float* rows_of_x = x.data<float>();
    std::unique_ptr<float[]> arranged;
    if (kernels.arranges_rows(weights)) {
      arranged = std::make_unique_for_overwrite<float[]>(x.size());
      kernels.arrange_rows(rows_of_x, long(x.size()), arranged.get());
      rows_of_x = arranged.get();
    }
    const auto by_expert = rows_by_expert(pairs, rows_of_x, out.data<float>(), matrix_rows, weights);
    const auto kernel = kernels.find_product(weights.format, weights.bits);
    const long packed_bytes = held[2].nbytes() / experts;
    const long scale_bytes = weights.scales == nullptr ? 0 : held[3].nbytes() / experts;
    const long stretches = (outputs + kStretchOutputs - 1) / kStretchOutputs;  // of each expert
    share(long(by_expert.size()) * stretches, 1, [&](long begin, long end, int) {
      for (long at = begin; at < end; ++at) {
        const ExpertRows& one = by_expert[at / stretches];
        const long from = at % stretches * kStretchOutputs, to = std::min(from + kStretchOutputs, outputs);
        const long rows = one.pairs * matrix_rows, expert = one.first->expert;
        Weights its = weights;
        its.packed = static_cast<const char*>(weights.packed) + expert * packed_bytes;
        if (its.scales != nullptr) its.scales = static_cast<const char*>(weights.scales) + expert * scale_bytes;
        if (its.biases != nullptr) its.biases = static_cast<const char*>(weights.biases) + expert * scale_bytes;
        kernel(one.x, rows, its, one.out, from, to, scratch(kernels.product_scratch_bytes(rows, weights.inputs)));
        if (one.apart == nullptr) continue;
        for (long row = 0; row < rows; ++row) {
          const long result = one.first[row / matrix_rows].result * matrix_rows + row % matrix_rows;
          std::memcpy(
              out.data<float>() + result * outputs + from, one.apart.get() + row * outputs + from, sizeof(float) * (to - from));
        }
      }
    });
  }

  Weights weights_;          // an expert's, without addresses, which are the inputs'
  mx::Shape weights_shape_;  // [experts, outputs, ..]
  const Kernels* kernels_;   // those of when the graph was built
};

}  // namespace

mx::array gathered_product(
    const mx::array& x,
    const mx::array& weights,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const mx::array& indices,
    const std::string& mode,
    int group,
    int bits) {
  const Weights what = described(weights, 3, scales, biases, mode, group, bits);
  const Kernels* kernels = chosen_kernels();
  refuse(kernels == nullptr || kernels->find_product(what.format, what.bits) == nullptr, "no kernel computes this here");
  refuse(!is_of_16_or_32_bits(x.dtype()), "rows are float32, float16 or bfloat16");
  refuse(x.ndim() < 2 || x.shape(-1) != what.inputs, "rows are as long as the weights'");
  refuse(indices.dtype() != mx::uint32 && indices.dtype() != mx::int32, "indices are uint32 or int32");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs = {mx::astype(x, mx::float32, stream), indices, weights};
  if (scales) inputs.push_back(*scales);
  if (biases) inputs.push_back(*biases);
  auto primitive = std::make_shared<GatheredProductPrimitive>(stream, what, weights.shape(), kernels);
  auto shape = primitive->output_shapes(inputs)[0];
  const mx::array result(std::move(shape), mx::float32, std::move(primitive), std::move(inputs));
  return mx::astype(result, x.dtype(), stream);
}

}  // namespace machd
