// The plain twin of what adapters add.
#include "kernels.h"

namespace machd::plain {

void add_low_rank(const LowRankPiece& piece, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step) {
  for (long row = 0; row < rows; ++row)
    for (long output = begin; output < end; ++output) {
      double sum = 0;
      for (long r = 0; r < piece.rank; ++r)
        sum += double(low[row * low_step + r]) * piece.panels[(output / kLowRankPanel * piece.rank + r) * kLowRankPanel + output % kLowRankPanel];
      out[row * out_step + output] = float(out[row * out_step + output] + sum);
    }
}

}  // namespace machd::plain
