#include "panels.h"

#include "gelu.h"
#include "kernels.h"
#include "vectors.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

static_assert(kPanelWidth == kBlock);

// Rows and panels of a tile, whose sums are in registers beside weights and one number of a row.
constexpr int kTileRows = kParts == 1 ? 12 : 6;
constexpr int kTilePanels = kParts == 1 ? 2 : 1;

template <int kRows, int kPanels>
void tile(const PanelProduct& product, long row, long panel) {
  const long inputs = product.panels.inputs, outputs = product.panels.outputs;
  const float* x = product.x + row * inputs;
  const float* weights = product.panels.weights + panel * inputs * kBlock;
  Vector sums[kRows][kPanels];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) sums[r][p] = Vector::load(product.panels.bias + (panel + p) * kBlock);
#pragma GCC unroll 4
  for (long k = 0; k < inputs; ++k) {
    Vector here[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) here[p] = Vector::load(weights + (p * inputs + k) * kBlock);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const FloatPart number = in_all_lanes(x[r * inputs + k]);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) sums[r][p].part[part] = fused(here[p].part[part], number, sums[r][p].part[part]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const long at = (row + r) * outputs + (panel + p) * kBlock;
      Vector result = sums[r][p];
      if (product.is_gelu) result = gelu(result);
      if (product.added != nullptr) result = result + Vector::load(product.added + at);
      result.store(product.out + at);
    }
}

// A tile of as many rows as there are left, at most kRows.
template <int kRows, int kPanels>
void some_rows(long left, const PanelProduct& product, long row, long panel) {
  if constexpr (kRows > 1) {
    if (left < kRows) return some_rows<kRows - 1, kPanels>(left, product, row, panel);
  }
  tile<kRows, kPanels>(product, row, panel);
}

// All rows of a few panels, whose weights stay in the first cache meanwhile.
template <int kPanels>
void all_rows(const PanelProduct& product, long panel) {
  for (long row = 0, count; row < product.rows; row += count) {
    const long left = product.rows - row, tiles = (left + kTileRows - 1) / kTileRows;
    count = (left + tiles - 1) / tiles;  // of like many rows
    some_rows<kTileRows, kPanels>(count, product, row, panel);
  }
}

}  // namespace

void multiply_panels(const PanelProduct& product, long begin, long end) {
  long panel = begin;
  for (; panel + kTilePanels <= end; panel += kTilePanels) all_rows<kTilePanels>(product, panel);
  for (; panel < end; ++panel) all_rows<1>(product, panel);
}

}  // namespace MACHD_TARGET
}  // namespace machd
