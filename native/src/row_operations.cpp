#include <algorithm>
#include <cstring>
#include <functional>

#include "held_inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "operations.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// Numbers that one thread computes in about the time that another takes to join it.
constexpr long kStretchNumbers = 16 * 1024;

// Computes rows from `begin` to `end` of an operation's result.
using Rows = void (*)(const Kernels& kernels, const HeldInputs& held, mx::array& out, float eps, int rotated, long begin, long end);

// An operation whose rows are computed independently.
class RowsPrimitive : public mx::UnaryPrimitive {
 public:
  RowsPrimitive(mx::Stream stream, const char* name, Rows compute, long row_size, const Kernels* kernels, float eps = 0, int rotated = 0)
      : UnaryPrimitive(stream), name_(name), compute_(compute), row_size_(row_size), kernels_(kernels), eps_(eps), rotated_(rotated) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [held = HeldInputs(inputs, stream()), to = mx::array::unsafe_weak_copy(out), compute = compute_, row_size = row_size_,
         kernels = kernels_, eps = eps_, rotated = rotated_]() mutable {
          held.gather();
          share(long(to.size()) / row_size, std::max<long>(1, kStretchNumbers / row_size), [&](long begin, long end, int) {
            compute(*kernels, held, to, eps, rotated, begin, end);
          });
        });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return name_; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const RowsPrimitive&>(other);
    return another.compute_ == compute_ && another.row_size_ == row_size_ && another.kernels_ == kernels_ && another.eps_ == eps_ &&
        another.rotated_ == rotated_;
  }

 private:
  const char* name_;
  Rows compute_;
  long row_size_;
  const Kernels* kernels_;
  float eps_;
  int rotated_;
};

void compute_norm(const Kernels& kernels, const HeldInputs& held, mx::array& out, float eps, int, long begin, long end) {
  kernels.rms_norm(held[0].data<float>(), held[1].data<float>(), eps, held[1].size(), out.data<float>(), begin, end);
}

void compute_layer_norm(const Kernels& kernels, const HeldInputs& held, mx::array& out, float eps, int, long begin, long end) {
  kernels.layer_norm(held[0].data<float>(), held[1].data<float>(), held[2].data<float>(), eps, held[1].size(), out.data<float>(), begin, end);
}

void compute_gelu(const Kernels& kernels, const HeldInputs& held, mx::array& out, float, int, long begin, long end) {
  const long size = out.shape(-1);
  kernels.gelu(held[0].data<float>() + begin * size, (end - begin) * size, out.data<float>() + begin * size);
}

void compute_silu_product(const Kernels& kernels, const HeldInputs& held, mx::array& out, float, int, long begin, long end) {
  const long size = out.shape(-1);
  for (long row = begin; row < end; ++row) {
    const float* gates = held[0].data<float>() + row * 2 * size;
    kernels.silu_product(gates, gates + size, size, out.data<float>() + row * size);
  }
}

// A row is a token: its heads one behind another.
void compute_rotation(const Kernels& kernels, const HeldInputs& held, mx::array& out, float, int rotated, long begin, long end) {
  const mx::array &x = held[0], &cosines = held[1], &sines = held[2], &positions = held[3];
  const long tokens = x.shape(1), heads = x.shape(2), head_dim = x.shape(3), half = head_dim / 2;
  for (long at = begin; at < end; ++at) {
    const long position = std::clamp<long>(positions.data<int32_t>()[at / tokens] + at % tokens, 0, cosines.shape(0) - 1);
    const float* from = x.data<float>() + at * heads * head_dim;
    float* to = out.data<float>() + at * heads * head_dim;
    for (long head = 0; head < rotated; ++head)
      kernels.rotate(
          from + head * head_dim, cosines.data<float>() + position * half, sines.data<float>() + position * half, half, to + head * head_dim);
    std::memcpy(to + rotated * head_dim, from + rotated * head_dim, sizeof(float) * (heads - rotated) * head_dim);
  }
}

}  // namespace

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps) {
  refuse(x.dtype() != mx::float32 || weight.dtype() != mx::float32, "rows and weight are float32");
  refuse(x.ndim() < 1 || weight.ndim() != 1 || weight.size() == 0 || x.shape(-1) != weight.shape(0), "rows are as long as the weight");
  auto primitive = std::make_shared<RowsPrimitive>(
      mx::default_stream(mx::Device::cpu), "MachdRmsNorm", compute_norm, weight.shape(0), present_kernels(), eps);
  return mx::array(x.shape(), mx::float32, std::move(primitive), {x, weight});
}

mx::array layer_norm(const mx::array& x, const mx::array& weight, const mx::array& bias, float eps) {
  refuse(x.dtype() != mx::float32 || weight.dtype() != mx::float32 || bias.dtype() != mx::float32, "rows, weight and bias are float32");
  refuse(x.ndim() < 1 || weight.ndim() != 1 || weight.size() == 0 || x.shape(-1) != weight.shape(0), "rows are as long as the weight");
  refuse(bias.shape() != weight.shape(), "weight and bias are as long as each other");
  auto primitive = std::make_shared<RowsPrimitive>(
      mx::default_stream(mx::Device::cpu), "MachdLayerNorm", compute_layer_norm, weight.shape(0), present_kernels(), eps);
  return mx::array(x.shape(), mx::float32, std::move(primitive), {x, weight, bias});
}

mx::array gelu(const mx::array& x) {
  refuse(x.dtype() != mx::float32 || x.ndim() < 1 || x.shape(-1) == 0, "rows are float32, and there are numbers in them");
  auto primitive =
      std::make_shared<RowsPrimitive>(mx::default_stream(mx::Device::cpu), "MachdGelu", compute_gelu, x.shape(-1), present_kernels());
  return mx::array(x.shape(), mx::float32, std::move(primitive), {x});
}

mx::array silu_product(const mx::array& x) {
  refuse(x.dtype() != mx::float32, "rows are float32");
  refuse(x.ndim() < 1 || x.shape(-1) % 2 || x.shape(-1) == 0, "rows hold a gate and as long an up");
  auto shape = x.shape();
  shape.back() /= 2;
  auto primitive = std::make_shared<RowsPrimitive>(
      mx::default_stream(mx::Device::cpu), "MachdSiluProduct", compute_silu_product, shape.back(), present_kernels());
  return mx::array(shape, mx::float32, std::move(primitive), {x});
}

mx::array rotate(const mx::array& x, const mx::array& cosines, const mx::array& sines, const mx::array& positions, int rotated) {
  refuse(x.dtype() != mx::float32 || x.ndim() != 4, "heads are float32 with four axes");
  refuse_other_tables(cosines, sines, x.shape(3));
  refuse(positions.dtype() != mx::int32 || positions.shape() != mx::Shape{x.shape(0)}, "positions are int32, one for each row");
  refuse(rotated < 0 || rotated > x.shape(2), "no more heads are turned than there are");
  auto primitive = std::make_shared<RowsPrimitive>(
      mx::default_stream(mx::Device::cpu), "MachdRotate", compute_rotation, long(x.shape(2)) * x.shape(3), present_kernels(), 0.0f, rotated);
  return mx::array(x.shape(), mx::float32, std::move(primitive), {x, cosines, sines, positions});
}

}  // namespace machd
