#include "primitives.h"

#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

#include "product.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

const Kernels*& chosen() {
  static const Kernels* kernels = choose_kernels(nullptr);
  return kernels;
}

void refuse(bool is_wrong, const char* what) {
  if (is_wrong) throw std::invalid_argument(what);
}

// Outputs that a thread takes at once: few enough that two threads end together, many enough that taking them costs nothing.
constexpr long kStretchOutputs = 32;

class ProductPrimitive : public mx::UnaryPrimitive {
 public:
  ProductPrimitive(mx::Stream stream, Weights weights) : UnaryPrimitive(stream), weights_(weights) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<mx::array> held;
    for (const auto& one : inputs) held.push_back(mx::array::unsafe_weak_copy(one));
    encoder.dispatch([held = std::move(held), to = mx::array::unsafe_weak_copy(out), weights = weights_]() mutable {
      weights.packed = held[1].data<char>();
      weights.scales = held.size() > 2 ? held[2].data<char>() : nullptr;
      weights.biases = held.size() > 3 ? held[3].data<char>() : nullptr;
      const auto kernels = chosen();
      const auto kernel = kernels->find(weights.format, weights.bits);
      const float* x = held[0].data<float>();
      const long rows = weights.inputs ? long(held[0].size()) / weights.inputs : 0;
      const long bytes = kernels->scratch_bytes(rows, weights.inputs);
      float* result = to.data<float>();
      share(weights.outputs, kStretchOutputs, [&](long begin, long end, int) {
        kernel(x, rows, weights, result, begin, end, scratch(bytes));
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdProduct"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& its = static_cast<const ProductPrimitive&>(other).weights_;
    return its.format == weights_.format && its.bits == weights_.bits && its.group == weights_.group;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    auto shape = inputs[0].shape();
    shape.back() = int(weights_.outputs);
    return {shape};
  }

 private:
  Weights weights_;  // without addresses, which are the inputs'
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
    refuse(type != mx::float32 && type != mx::float16 && type != mx::bfloat16, "plain weights are float32, float16 or bfloat16");
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
  const mx::Shape groups{weights.shape(0), int(result.inputs / group)};
  refuse(result.inputs % group || scales->shape() != groups, "scales have one entry for each group");
  if (mode == "affine") {
    result.format = Format::kAffine;
    const auto type = scales->dtype();
    refuse(type != mx::float32 && type != mx::float16 && type != mx::bfloat16, "scales are float32, float16 or bfloat16");
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
  refuse(chosen() == nullptr || chosen()->find(what.format, what.bits) == nullptr, "no kernel computes this here");
  refuse(x.ndim() < 1 || x.shape(-1) != what.inputs, "rows are as long as the weights'");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs = {mx::contiguous(mx::astype(x, mx::float32, stream), false, stream), mx::contiguous(weights, false, stream)};
  if (scales) inputs.push_back(mx::contiguous(*scales, false, stream));
  if (biases) inputs.push_back(mx::contiguous(*biases, false, stream));
  auto shape = x.shape();
  shape.back() = int(what.outputs);
  const mx::array result(shape, mx::float32, std::make_shared<ProductPrimitive>(stream, what), inputs);
  return mx::astype(result, x.dtype(), stream);
}

std::string instruction_set() { return chosen() == nullptr ? "" : chosen()->name; }

void use_instruction_set(const std::string& name) { chosen() = choose_kernels(name.c_str()); }

}  // namespace machd
