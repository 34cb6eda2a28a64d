// The plain twin of what adapters add.
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace machd::plain {
namespace {

double number_at(const void* from, Format format, long at) {
  if (format == Format::kFloat32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa == 0 ? (bits >> 15 ? -HUGE_VAL : HUGE_VAL) : std::nan("");
  const double number = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -number : number;
}

}  // namespace

void add_low_rank(const LowRankPiece& piece, Format format, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step) {
  for (long row = 0; row < rows; ++row)
    for (long output = begin; output < end; ++output) {
      double sum = 0;
      for (long r = 0; r < piece.rank; ++r)
        sum += low[row * low_step + r] * number_at(piece.panels, format, (output / kLowRankPanel * piece.rank + r) * kLowRankPanel + output % kLowRankPanel);
      out[row * out_step + output] = float(out[row * out_step + output] + piece.factor * sum);
    }
}

}  // namespace machd::plain
