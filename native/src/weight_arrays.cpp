#include "weight_arrays.h"

namespace machd {

namespace mx = mlx::core;

Weights described(
    const mx::array& weights,
    int axes,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const std::string& mode,
    int group,
    int bits) {
  Weights result{};
  refuse(int(weights.ndim()) != axes, axes == 2 ? "weights have two axes" : "weights of experts have three axes");
  result.outputs = weights.shape(-2);
  if (mode == "plain") {
    const auto type = weights.dtype();
    refuse(!is_of_16_or_32_bits(type), "plain weights are float32, float16 or bfloat16");
    refuse(scales.has_value() || biases.has_value(), "plain weights have no scales");
    result.format = type == mx::float32 ? Format::kFloat32 : type == mx::float16 ? Format::kFloat16 : Format::kBfloat16;
    result.bits = 8 * int(type.size());
    result.group = 1;
    result.inputs = weights.shape(-1);
    return result;
  }
  refuse(weights.dtype() != mx::uint32, "packed weights are uint32");
  refuse(!scales.has_value(), "packed weights have scales");
  refuse(bits < 2 || bits > 8 || group < 16 || group > 128 || 128 % group, "no kernel has these bits or this group");
  result.bits = bits;
  result.group = group;
  refuse(long(weights.shape(-1)) * 32 % bits, "packed weights end within a weight");
  result.inputs = long(weights.shape(-1)) * 32 / bits;
  mx::Shape groups = weights.shape();
  groups.back() = int(result.inputs / group);
  refuse(result.inputs % group || scales->shape() != groups, "scales have one entry for each group");
  if (mode == "affine") {
    refuse(group < 32 && bits == 4, "affine groups of 4 bits have 32 weights at least");
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

void set_addresses(Weights& weights, const HeldInputs& held, size_t first) {
  weights.packed = held[first].data<char>();
  weights.scales = held.size() > first + 1 ? held[first + 1].data<char>() : nullptr;
  weights.biases = held.size() > first + 2 ? held[first + 2].data<char>() : nullptr;
}

}  // namespace machd
