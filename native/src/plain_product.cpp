// The product's plain twin: nothing of it is shared with the kernels.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace machd::plain {
namespace {

// Of formats with infinities the highest exponent is theirs, and of what is not a number; others have numbers there too.
double decoded(uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinities = false) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = int(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  if (has_infinities && exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  const double fraction = std::ldexp(double(mantissa), -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

double number_at(const void* from, ScaleType type, long at) {
  if (type == ScaleType::kFloat32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == ScaleType::kFloat16 ? decoded(bits, 5, 10, true) : decoded(bits, 8, 7, true);
}

double e4m3(uint32_t bits) { return (bits & 0x7f) == 0x7f ? std::nan("") : decoded(bits, 4, 3); }

// 255, which the standard has as not a number, is infinity in MLX.
double e8m0(uint32_t bits) { return bits == 0xff ? HUGE_VAL : std::ldexp(1.0, int(bits) - 127); }

uint32_t packed_at(const Weights& w, long row, long k) {
  uint32_t value = 0;
  const auto* bytes = static_cast<const uint8_t*>(w.packed) + row * w.row_bytes();
  for (int bit = 0; bit < w.bits; ++bit) {
    const long at = k * w.bits + bit;
    value |= uint32_t(bytes[at / 8] >> at % 8 & 1) << bit;
  }
  return value;
}

double weight_at(const Weights& w, long row, long k) {
  const long at = row * w.inputs + k;
  const long group = row * (w.inputs / w.group) + k / w.group;
  const auto scale_bits = [&] { return static_cast<const uint8_t*>(w.scales)[group]; };
  switch (w.format) {
    case Format::kFloat32: return number_at(w.packed, ScaleType::kFloat32, at);
    case Format::kFloat16: return number_at(w.packed, ScaleType::kFloat16, at);
    case Format::kBfloat16: return number_at(w.packed, ScaleType::kBfloat16, at);
    case Format::kAffine:
      return number_at(w.scales, w.scale_type, group) * packed_at(w, row, k) + number_at(w.biases, w.scale_type, group);
    case Format::kMxfp4: return decoded(packed_at(w, row, k), 2, 1) * e8m0(scale_bits());
    case Format::kMxfp8: return e4m3(packed_at(w, row, k)) * e8m0(scale_bits());
    case Format::kNvfp4: return decoded(packed_at(w, row, k), 2, 1) * e4m3(scale_bits());
  }
  return 0;
}

void plain_product(const float* x, long rows, const Weights& w, float* out, long begin, long end, void*) {
  for (long row = 0; row < rows; ++row)
    for (long output = begin; output < end; ++output) {
      double sum = 0;
      for (long k = 0; k < w.inputs; ++k) sum += x[row * w.inputs + k] * weight_at(w, output, k);
      out[row * w.outputs + output] = float(sum);
    }
}

}  // namespace

Product find_product(Format, int) { return plain_product; }

bool arranges_rows(const Weights&) { return false; }

void arrange_rows(const float*, long, float*) {}

long product_scratch_bytes(long, long) { return 0; }

}  // namespace machd::plain
