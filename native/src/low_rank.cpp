#include "low_rank.h"

#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

constexpr int kVectors = kLowRankPanel / kBlock;

// Rows of a tile: as many sums as there are registers for.
constexpr int kTileRows = kParts == 1 ? 8 : 3;

// Outputs of one panel from `begin` to `end`.
template <int kRows>
void tile(const float* panel, long rank, const float* low, long low_step, long begin, long end, float* out, long out_step) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Vector::zeros();
  for (long r = 0; r < rank; ++r) {
    Vector b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) b[v] = Vector::load(panel + r * kLowRankPanel + v * kBlock);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vector factor = Vector::all(low[row * low_step + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fused(b[v], factor, sums[row][v]);
    }
  }
  const bool is_whole = begin == 0 && end == kLowRankPanel;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    float* const to = out + row * out_step;
    if (is_whole) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) (Vector::load(to + v * kBlock) + sums[row][v]).store(to + v * kBlock);
    } else {
      float some[kLowRankPanel];
      for (int v = 0; v < kVectors; ++v) sums[row][v].store(some + v * kBlock);
      for (long at = begin; at < end; ++at) to[at] += some[at];
    }
  }
}

// A tile of as many rows as there are left, at most kRows.
template <int kRows, class... Rest>
void some_rows(long left, Rest... rest) {
  if constexpr (kRows > 1) {
    if (left < kRows) return some_rows<kRows - 1>(left, rest...);
  }
  tile<kRows>(rest...);
}

}  // namespace

void add_low_rank(const LowRankPiece& piece, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step) {
  for (long panel = begin / kLowRankPanel; panel * kLowRankPanel < end; ++panel) {
    const long first = panel * kLowRankPanel, from = std::max(begin - first, 0L), to = std::min(end - first, kLowRankPanel);
    for (long row = 0; row < rows; row += kTileRows)
      some_rows<kTileRows>(
          rows - row, piece.panels + first * piece.rank, piece.rank, low + row * low_step, low_step, from, to, out + row * out_step + first,
          out_step);
  }
}

}  // namespace MACHD_TARGET
}  // namespace machd
