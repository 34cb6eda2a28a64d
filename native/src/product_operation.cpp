#include "operations.h"

#include <algorithm>

#include "held_inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

constexpr const char* kOtherSizes = "this graph was compiled for other sizes";

bool is_plain(const Weights& w) {
  return w.format == Format::kFloat32 || w.format == Format::kFloat16 || w.format == Format::kBfloat16;
}

mx::Shape packed_shape(const Weights& w) {
  return {int(w.outputs), int(is_plain(w) ? w.inputs : w.inputs * w.bits / 32)};
}

mx::Shape groups_shape(const Weights& w) {
  return {int(w.outputs), int(w.inputs / w.group)};
}

// Outputs that a thread takes at once: few enough that two threads end together, many enough that taking them costs nothing.
constexpr long kStretchOutputs = 32;

class ProductPrimitive : public mx::UnaryPrimitive {
 public:
  ProductPrimitive(mx::Stream stream, Weights weights, const Kernels* kernels)
      : UnaryPrimitive(stream), weights_(weights), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    HeldInputs held(inputs, stream());
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const bool is_arranged = kernels_->arranges_rows(weights_);
    mx::array arranged(is_arranged ? inputs[0].shape() : mx::Shape{0}, mx::float32, nullptr, {});
    arranged.set_data(mx::allocator::malloc(arranged.nbytes()));
    encoder.dispatch([held = std::move(held),
                      rows_arranged = mx::array::unsafe_weak_copy(arranged),
                      to = mx::array::unsafe_weak_copy(out),
                      weights = weights_,
                      kernels = kernels_]() mutable {
      held.gather();
      weights.packed = held[1].data<char>();
      weights.scales = held.size() > 2 ? held[2].data<char>() : nullptr;
      weights.biases = held.size() > 3 ? held[3].data<char>() : nullptr;
      float* result = to.data<float>();
      if (weights.inputs == 0) {  // sums of nothing
        std::fill_n(result, to.size(), 0.0f);
        return;
      }
      const auto kernel = kernels->find_product(weights.format, weights.bits);
      const float* x = held[0].data<float>();
      if (rows_arranged.size() > 0) {
        kernels->arrange_rows(x, long(rows_arranged.size()), rows_arranged.data<float>());
        x = rows_arranged.data<float>();
      }
      const long rows = long(to.size()) / weights.outputs;
      const long bytes = kernels->product_scratch_bytes(rows, weights.inputs);
      share(weights.outputs, kStretchOutputs, [&](long begin, long end, int) {
        kernel(x, rows, weights, result, begin, end, scratch(bytes));
      });
    });
    encoder.add_temporary(std::move(arranged));
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdProduct"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const ProductPrimitive&>(other);
    const auto& its = another.weights_;
    return another.kernels_ == kernels_ && its.format == weights_.format && its.bits == weights_.bits &&
        its.group == weights_.group;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    // A graph that was compiled without shapes comes here with other ones; the sizes here stay those it was traced with.
    refuse(inputs[0].shape(-1) != weights_.inputs, kOtherSizes);
    for (size_t at = 1; at < inputs.size(); ++at)
      refuse(inputs[at].shape() != (at == 1 ? packed_shape(weights_) : groups_shape(weights_)), kOtherSizes);
    auto shape = inputs[0].shape();
    shape.back() = int(weights_.outputs);
    return {shape};
  }

 private:
  Weights weights_;         // without addresses, which are the inputs'
  const Kernels* kernels_;  // those of when the graph was built
};

Weights described(
    const mx::array& weights,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const std::string& mode,
    int group,
    int bits) {
  Weights result{};
  refuse(weights.ndim() != 2, "weights have two axes");
  result.outputs = weights.shape(0);
  if (mode == "plain") {
    const auto type = weights.dtype();
    refuse(!is_of_16_or_32_bits(type), "plain weights are float32, float16 or bfloat16");
    refuse(scales.has_value() || biases.has_value(), "plain weights have no scales");
    result.format = type == mx::float32 ? Format::kFloat32 : type == mx::float16 ? Format::kFloat16 : Format::kBfloat16;
    result.bits = 8 * int(type.size());
    result.group = 1;
    result.inputs = weights.shape(1);
    return result;
  }
  refuse(weights.dtype() != mx::uint32, "packed weights are uint32");
  refuse(!scales.has_value(), "packed weights have scales");
  refuse(bits < 2 || bits > 8 || group < 16 || group > 128 || 128 % group, "no kernel has these bits or this group");
  result.bits = bits;
  result.group = group;
  refuse(long(weights.shape(1)) * 32 % bits, "packed weights end within a weight");
  result.inputs = long(weights.shape(1)) * 32 / bits;
  const mx::Shape groups = groups_shape(result);
  refuse(result.inputs % group || scales->shape() != groups, "scales have one entry for each group");
  if (mode == "affine") {
    refuse(group < 32, "affine groups have 32 weights at least");
    result.format = Format::kAffine;
    const auto type = scales->dtype();
    refuse(!is_of_16_or_32_bits(type), "scales are float32, float16 or bfloat16");
    refuse(!biases.has_value() || biases->dtype() != type || biases->shape() != groups, "biases are like scales");
    result.scale_type = type == mx::float32 ? ScaleType::kFloat32 : type == mx::float16 ? ScaleType::kFloat16 : ScaleType::kBfloat16;
    return result;
  }
  refuse(biases.has_value() || scales->dtype() != mx::uint8, "scales of this mode are uint8, and it has no biases");
  if (mode == "mxfp4" && bits == 4) result.format = Format::kMxfp4;
  else if (mode == "mxfp8" && bits == 8) result.format = Format::kMxfp8;
  else if (mode == "nvfp4" && bits == 4) result.format = Format::kNvfp4;
  else throw std::invalid_argument("no kernel has this mode with these bits");
  return result;
}

}  // namespace

mx::array product(
    const mx::array& x,
    const mx::array& weights,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const std::string& mode,
    int group,
    int bits) {
  const Weights what = described(weights, scales, biases, mode, group, bits);
  const Kernels* kernels = chosen_kernels();
  refuse(kernels == nullptr || kernels->find_product(what.format, what.bits) == nullptr, "no kernel computes this here");
  refuse(!is_of_16_or_32_bits(x.dtype()), "rows are float32, float16 or bfloat16");
  refuse(x.ndim() < 1 || x.shape(-1) != what.inputs, "rows are as long as the weights'");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  // Weights come as they are: mx::contiguous would copy a part of a larger array each time, whose rows lie one after another.
  std::vector<mx::array> inputs = {mx::contiguous(mx::astype(x, mx::float32, stream), false, stream), weights};
  if (scales) inputs.push_back(*scales);
  if (biases) inputs.push_back(*biases);
  auto shape = x.shape();
  shape.back() = int(what.outputs);
  const mx::array result(shape, mx::float32, std::make_shared<ProductPrimitive>(stream, what, kernels), inputs);
  return mx::astype(result, x.dtype(), stream);
}

}  // namespace machd
