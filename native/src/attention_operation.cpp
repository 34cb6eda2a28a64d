#include <algorithm>
#include <cstring>

#include "layer_attention.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "operations.h"

namespace machd {
namespace {

namespace mx = mlx::core;

class AttendPrimitive : public mx::UnaryPrimitive {
 public:
  AttendPrimitive(mx::Stream stream, float scale, int window, const Kernels* kernels)
      : UnaryPrimitive(stream), scale_(scale), window_(window), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [held = HeldInputs(inputs, stream(), HeldInputs::Need::kLastAxis), to = mx::array::unsafe_weak_copy(out), this_scale = scale_,
         window = window_, kernels = kernels_]() mutable {
          held.gather();
          const mx::array& asking = held[0];
          const Queries queries{
              asking.data<float>(), asking.shape(0), asking.shape(1), asking.shape(2), asking.shape(3),
              asking.strides(0), asking.strides(1), asking.strides(2)};
          compute_attention(queries, *columns_at(held, 1), held[3], columns_at(held, 4), this_scale, window, to.data<float>(), *kernels);
        });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdAttend"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const AttendPrimitive&>(other);
    return another.scale_ == scale_ && another.window_ == window_ && another.kernels_ == kernels_;
  }

 private:
  float scale_;
  int window_;
  const Kernels* kernels_;
};

class WritePrimitive : public mx::UnaryPrimitive {
 public:
  using UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const bool is_in_place = takes_over(inputs[0], out);
    if (out.size() == 0) return;
    // What is written in place needs nothing brought together.
    std::vector<mx::array> sources = {inputs[1], inputs[2]};
    if (!is_in_place) sources.push_back(inputs[0]);
    encoder.dispatch([held = HeldInputs(sources, stream()), to = mx::array::unsafe_weak_copy(out)]() mutable {
      held.gather();
      if (held.size() > 2) std::memcpy(to.data<char>(), held[2].data<char>(), to.nbytes());
      const mx::array &tokens = held[0], &starts = held[1];
      const long rows = tokens.shape(0), heads = tokens.shape(1), count = tokens.shape(2), all = to.shape(2);
      const long bytes = to.shape(3) * long(to.itemsize());
      for (long row = 0; row < rows; ++row) {
        const long begin = std::clamp<long>(starts.data<int32_t>()[row], 0, all), fits = std::min(count, all - begin);
        for (long head = 0; head < heads; ++head)
          std::memcpy(
              to.data<char>() + ((row * heads + head) * all + begin) * bytes, tokens.data<char>() + (row * heads + head) * count * bytes,
              fits * bytes);
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdWritten"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

}  // namespace

mx::array attend(
    const mx::array& queries,
    const mx::array& keys,
    const mx::array& values,
    const mx::array& starts,
    const std::optional<mx::array>& prefix_keys,
    const std::optional<mx::array>& prefix_values,
    float scale,
    int window) {
  const Kernels* kernels = present_kernels();
  refuse(queries.dtype() != mx::float32 || queries.ndim() != 4, "queries, keys and values are float32 with four axes");
  refuse(window < 0, "a window is not negative");
  refuse_other_columns(queries.shape(), keys, values, starts, prefix_keys, prefix_values);
  std::vector<mx::array> inputs = {queries, keys, values, starts};
  if (prefix_keys) inputs.insert(inputs.end(), {*prefix_keys, *prefix_values});
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::array(
      mx::Shape{queries.shape(0), queries.shape(2), queries.shape(1), values.shape(3)}, mx::float32,
      std::make_shared<AttendPrimitive>(stream, scale, window, kernels), inputs);
}

mx::array written(const mx::array& columns, const mx::array& tokens, const mx::array& starts) {
  refuse(columns.ndim() != 4 || tokens.ndim() != 4 || columns.dtype() != tokens.dtype(), "columns and tokens have four axes and one dtype");
  refuse(tokens.shape(0) > columns.shape(0) || tokens.shape(1) != columns.shape(1) || tokens.shape(3) != columns.shape(3),
         "tokens are like columns");
  refuse_other_starts(starts, tokens.shape(0));
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::array(columns.shape(), columns.dtype(), std::make_shared<WritePrimitive>(stream), {columns, tokens, starts});
}

}  // namespace machd
