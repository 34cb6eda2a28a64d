// What an adapter adds to a product of rows: b times (a times the row), of low rank.
#pragma once

#include <vector>

#include "weights.h"

namespace machd {

// Outputs whose numbers of b lie together.
constexpr long kLowRankPanel = 32;

// Some outputs of a product that lie together.
struct LowRankPiece {
  long first_output, outputs;
  long first_rank, rank;  // the products with a that b multiplies
  const void* panels;     // b: [outputs / kLowRankPanel, rank, kLowRankPanel] in a's format, zeros behind the last output
  float factor;           // of what is added: a power of two, which changes no digit
  const float* ratios;    // [outputs], what the product's own results are multiplied with before; null for none
  const float* offsets;   // [outputs], added to these results; null for none
};

struct LowRankProduct {
  Weights a;  // float32 or float16, of all pieces one after another
  std::vector<LowRankPiece> pieces;
};

// Adds to out[row, output] the sum over r of low[row, r] * b[output, r], times the factor, for outputs of a piece from `begin` to `end`.
//
// A sum takes r one after another, each product and sum rounded once. So what is added to a row depends on nothing but the row and b.
//
// low: from the piece's first rank of the first row on, `low_step` numbers from one row's to the next one's. out: the same, from the piece's first output on.
using AddLowRank = void (*)(
    const LowRankPiece& piece, Format format, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step);

}  // namespace machd
