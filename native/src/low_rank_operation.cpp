#include <algorithm>
#include <cmath>
#include <cstring>

#include "adapted_rows.h"
#include "held_inputs.h"
#include "layer_attention.h"
#include "layer_product.h"
#include "low_rank_weights.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// Below the largest power of float16.
constexpr int kHalfExponent = 15;

class LowRankPrimitive : public mx::UnaryPrimitive {
 public:
  LowRankPrimitive(mx::Stream stream, std::vector<LowRank> adapters, const Kernels* kernels)
      : UnaryPrimitive(stream), adapters_(std::move(adapters)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    // What is written in place needs nothing brought together.
    std::vector<mx::array> sources = {inputs[1], inputs[2]};
    if (!takes_over(inputs[0], out)) sources.push_back(inputs[0]);
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const long rows = inputs[2].size();
    long most_rank = 0;
    for (const auto& one : adapters_) most_rank = std::max(most_rank, one.product().a.outputs);
    mx::array low({int(rows), int(most_rank)}, mx::float32, nullptr, {});
    low.set_data(mx::allocator::malloc(low.nbytes()));
    encoder.dispatch([held = HeldInputs(sources, stream()), to = mx::array::unsafe_weak_copy(out), low = mx::array::unsafe_weak_copy(low), rows,
                      most_rank, adapters = adapters_, kernels = kernels_]() mutable {
      held.gather();
      float* const y = to.data<float>();
      if (held.size() > 2) std::memcpy(y, held[2].data<float>(), to.nbytes());
      const AdaptedRows adapted(held[1].data<int32_t>(), rows, long(adapters.size()));
      AdaptedProduct product{&adapted, {}, low.data<float>(), most_rank};
      for (const auto& one : adapters) product.adapters.push_back(&one.product());
      product.multiply(held[0].data<float>(), *kernels);
      const long outputs = to.shape(-1);
      share(outputs, kStretchOutputs, [&](long begin, long end, int) { product.add(begin, end, y, outputs, *kernels); });
    });
    encoder.add_temporary(std::move(low));
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdAddLowRank"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }  // one for each pass

 private:
  std::vector<LowRank> adapters_;
  const Kernels* kernels_;  // those of when the graph was built
};

// The power of two whose half is the largest number's; 0 where there is none.
int exponent_of(const mx::array& numbers) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const float largest = mx::max(mx::abs(numbers, stream), stream).item<float>();
  int exponent = 0;
  if (std::isfinite(largest) && largest > 0) std::frexp(largest, &exponent);
  return exponent;
}

// Numbers in float16, of which the largest lies right below the power of two.
mx::array halved(const mx::array& numbers, int exponent) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::astype(mx::multiply(numbers, mx::array(std::ldexp(1.0f, kHalfExponent - exponent)), stream), mx::float16, stream);
}

bool fits_half(const mx::array& numbers) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const int exponent = exponent_of(numbers);
  const mx::array back = mx::multiply(mx::astype(halved(numbers, exponent), mx::float32, stream), mx::array(std::ldexp(1.0f, exponent - kHalfExponent)), stream);
  return mx::array_equal(numbers, back, stream).item<bool>();
}

// b's numbers of each panel's outputs one after another, for each rank.
mx::array in_panels(const mx::array& b) {
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const int outputs = b.shape(0), rank = b.shape(1), width = int(kLowRankPanel), panels = (outputs + width - 1) / width;
  const mx::array whole = mx::pad(b, std::vector<std::pair<int, int>>{{0, panels * width - outputs}, {0, 0}}, mx::array(0.0f, b.dtype()), "constant", stream);
  return lying(mx::swapaxes(mx::reshape(whole, {panels, width, rank}, stream), 1, 2, stream));
}

}  // namespace

LowRank::LowRank(const std::vector<Piece>& pieces) {
  refuse(pieces.empty(), "there are pieces");
  for (const auto& [first_output, a, b, ratios, offsets] : pieces) {
    refuse(a.dtype() != mx::float32 || b.dtype() != mx::float32 || a.ndim() != 2 || b.ndim() != 2, "a and b are float32 with two axes");
    refuse(a.size() == 0 || b.size() == 0 || b.shape(1) != a.shape(0), "b has as many columns as a has rows");
    refuse(a.shape(1) != pieces[0].a.shape(1), "all pieces are of rows of one length");
    refuse(first_output < 0, "outputs are not negative");
    for (const auto* each : {&ratios, &offsets})
      refuse(*each && ((*each)->dtype() != mx::float32 || (*each)->shape() != mx::Shape{b.shape(0)}), "ratios and offsets are float32, one for each output");
  }
  const bool is_half = std::all_of(pieces.begin(), pieces.end(), [](const Piece& one) { return fits_half(one.a) && fits_half(one.b); });
  Kept kept;
  std::vector<mx::array> all;
  long rank = 0;
  const auto numbers_of = [&](const std::optional<mx::array>& one) { return one ? kept.arrays.emplace_back(lying(*one)).data<float>() : nullptr; };
  for (const auto& [first_output, a, b, ratios, offsets] : pieces) {
    const int a_exponent = is_half ? exponent_of(a) : 0, b_exponent = is_half ? exponent_of(b) : 0;
    const float factor = is_half ? std::ldexp(1.0f, a_exponent + b_exponent - 2 * kHalfExponent) : 1.0f;
    const mx::array& panels = kept.arrays.emplace_back(in_panels(is_half ? halved(b, b_exponent) : b));
    kept.product.pieces.push_back({first_output, b.shape(0), rank, a.shape(0), panels.data<char>(), factor, numbers_of(ratios), numbers_of(offsets)});
    rank += a.shape(0);
    all.push_back(is_half ? halved(a, a_exponent) : a);
  }
  const mx::array& a = kept.arrays.emplace_back(lying(mx::concatenate(all, 0, mx::default_stream(mx::Device::cpu))));
  kept.product.a = {is_half ? Format::kFloat16 : Format::kFloat32, ScaleType::kFloat32, is_half ? 16 : 32, 1, rank, a.shape(1), a.data<char>(), nullptr, nullptr};
  kept_ = std::make_shared<const Kept>(std::move(kept));
}

long LowRank::outputs() const {
  long end = 0;
  for (const auto& one : product().pieces) end = std::max(end, one.first_output + one.outputs);
  return end;
}

size_t LowRank::nbytes() const {
  size_t bytes = 0;
  for (const auto& one : kept_->arrays) bytes += one.nbytes();
  return bytes;
}

mx::array add_low_rank(const mx::array& y, const mx::array& x, const mx::array& index, const std::vector<LowRank>& adapters) {
  refuse(y.dtype() != mx::float32 || x.dtype() != mx::float32, "rows are float32");
  refuse(y.ndim() < 1 || x.ndim() != y.ndim() || !std::equal(x.shape().begin(), x.shape().end() - 1, y.shape().begin()), "there are as many rows as results");
  refuse(index.dtype() != mx::int32 || long(index.size()) * y.shape(-1) != long(y.size()), "indices are int32, one for each row");
  for (const auto& one : adapters) {
    refuse(one.product().a.inputs != x.shape(-1), "rows are as long as an adapter's");
    refuse(one.outputs() > y.shape(-1), "an adapter's outputs are those of the results");
  }
  return mx::array(
      y.shape(), mx::float32, std::make_shared<LowRankPrimitive>(mx::default_stream(mx::Device::cpu), adapters, present_kernels()), {y, x, index});
}

}  // namespace machd
