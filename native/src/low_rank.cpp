#include "low_rank.h"

#include <algorithm>

#include "expand.h"
#include "kernels.h"
#include "vectors.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

constexpr int kVectors = kLowRankPanel / kBlock;

// Rows of a tile: as many sums as there are registers for.
constexpr int kTileRows = kParts == 1 ? 8 : 3;

// Outputs of one panel from `begin` to `end`. panel: its number.
template <Format kFormat, int kRows>
void tile(const LowRankPiece& piece, long panel, const float* low, long low_step, long begin, long end, float* out, long out_step) {
  const long rank = piece.rank;
  Weights packed{};
  packed.packed = piece.panels;
  Expander<kFormat, kFormat == Format::kFloat32 ? 32 : 16> numbers;
  ScaleBuffer buffer;
  numbers.begin(packed, 0, buffer);
  Vector sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Vector::zeros();
  for (long r = 0; r < rank; ++r) {
    Vector b[kVectors][1];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) numbers.at((panel * rank + r) * kLowRankPanel + v * kBlock, b[v]);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vector factor = Vector::all(low[row * low_step + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[row][v] = fused(b[v][0], factor, sums[row][v]);
    }
  }
  const Vector factor = Vector::all(piece.factor);
  const bool is_whole = begin == 0 && end == kLowRankPanel;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    float* const to = out + row * out_step;
    if (is_whole) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) fused(sums[row][v], factor, Vector::load(to + v * kBlock)).store(to + v * kBlock);
    } else {
      float some[kLowRankPanel];
      for (int v = 0; v < kVectors; ++v) (sums[row][v] * factor).store(some + v * kBlock);  // exact, so the sum is rounded as above
      for (long at = begin; at < end; ++at) to[at] += some[at];
    }
  }
}

// A tile of as many rows as there are left, at most kRows.
template <Format kFormat, int kRows, class... Rest>
void some_rows(long left, const Rest&... rest) {
  if constexpr (kRows > 1) {
    if (left < kRows) return some_rows<kFormat, kRows - 1>(left, rest...);
  }
  tile<kFormat, kRows>(rest...);
}

template <Format kFormat>
void add(const LowRankPiece& piece, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step) {
  for (long panel = begin / kLowRankPanel; panel * kLowRankPanel < end; ++panel) {
    const long first = panel * kLowRankPanel, from = std::max(begin - first, 0L), to = std::min(end - first, kLowRankPanel);
    for (long row = 0; row < rows; row += kTileRows)
      some_rows<kFormat, kTileRows>(
          rows - row, piece, panel, low + row * low_step, low_step, from, to, out + row * out_step + first, out_step);
  }
}

}  // namespace

void add_low_rank(
    const LowRankPiece& piece, Format format, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step) {
  (format == Format::kFloat32 ? add<Format::kFloat32> : add<Format::kFloat16>)(piece, low, low_step, rows, begin, end, out, out_step);
}

}  // namespace MACHD_TARGET
}  // namespace machd
