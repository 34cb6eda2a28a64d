#include "operations.h"

#include "held_inputs.h"
#include "layer_product.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "weight_arrays.h"

namespace machd {
namespace {

namespace mx = mlx::core;

bool is_plain(const Weights& w) {
  return w.format == Format::kFloat32 || w.format == Format::kFloat16 || w.format == Format::kBfloat16;
}

mx::Shape packed_shape(const Weights& w) {
  return {int(w.outputs), int(is_plain(w) ? w.inputs : w.inputs * w.bits / 32)};
}

mx::Shape groups_shape(const Weights& w) {
  return {int(w.outputs), int(w.inputs / w.group)};
}

class ProductPrimitive : public mx::UnaryPrimitive {
 public:
  ProductPrimitive(mx::Stream stream, Weights weights, const Kernels* kernels)
      : UnaryPrimitive(stream), weights_(weights), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    HeldInputs held(inputs, stream());
    auto& encoder = mx::cpu::get_command_encoder(stream());
    LayerProduct whole{};
    whole.weights = weights_;
    const long rows = long(out.size()) / weights_.outputs;
    mx::array memory({int(layer_product_numbers(whole, rows, *kernels_))}, mx::float32, nullptr, {});
    memory.set_data(mx::allocator::malloc(memory.nbytes()));
    encoder.dispatch([held = std::move(held),
                      memory = mx::array::unsafe_weak_copy(memory),
                      to = mx::array::unsafe_weak_copy(out),
                      rows,
                      whole,
                      kernels = kernels_]() mutable {
      held.gather();
      set_addresses(whole.weights, held, 1);
      compute_layer_product(whole, held[0].data<float>(), rows, memory.data<float>(), to.data<float>(), *kernels);
    });
    encoder.add_temporary(std::move(memory));
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

}  // namespace

mx::array product(
    const mx::array& x,
    const mx::array& weights,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const std::string& mode,
    int group,
    int bits) {
  const Weights what = described(weights, 2, scales, biases, mode, group, bits);
  const Kernels* kernels = chosen_kernels();
  refuse(kernels == nullptr || kernels->find_product(what.format, what.bits) == nullptr, "no kernel computes this here");
  refuse(!is_of_16_or_32_bits(x.dtype()), "rows are float32, float16 or bfloat16");
  refuse(x.ndim() < 1 || x.shape(-1) != what.inputs, "rows are as long as the weights'");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  std::vector<mx::array> inputs = {mx::astype(x, mx::float32, stream), weights};
  if (scales) inputs.push_back(*scales);
  if (biases) inputs.push_back(*biases);
  auto shape = x.shape();
  shape.back() = int(what.outputs);
  const mx::array result(shape, mx::float32, std::make_shared<ProductPrimitive>(stream, what, kernels), inputs);
  return mx::astype(result, x.dtype(), stream);
}

}  // namespace machd
