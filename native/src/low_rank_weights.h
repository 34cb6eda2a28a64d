// Weights of adapters as arrays of MLX.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "low_rank.h"
#include "mlx/array.h"

namespace machd {

// What an adapter adds to one product, laid out for it.
class LowRank {
 public:
  // Some outputs that lie together, float32.
  struct Piece {
    int first_output;
    mlx::core::array a, b;                          // [rank, inputs] and [outputs, rank]
    std::optional<mlx::core::array> ratios, offsets;  // [outputs]: the product's own results are multiplied with the former, and the latter added to them
  };

  // a and b are kept in float16, each array times a power of two, where no number loses a digit so; what is added has the same bits.
  // Raises std::invalid_argument where there are none, or they do not go together.
  explicit LowRank(const std::vector<Piece>& pieces);

  const LowRankProduct& product() const { return kept_->product; }
  long outputs() const;  // before which the last piece ends
  size_t nbytes() const;

 private:
  struct Kept {
    LowRankProduct product;
    std::vector<mlx::core::array> arrays;
  };
  std::shared_ptr<const Kept> kept_;  // by what has been asked for and is not yet computed, too
};

// y [.., outputs] plus what the adapters of rows add to the product of x [.., inputs]; y's own memory where nobody else holds it. float32 alone.
//
// index: int32, of each row 0 for none or an adapter's number + 1. A row's bits depend on its numbers and its adapter alone; rows without
// an adapter keep theirs. One with another index is not a number.
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array add_low_rank(
    const mlx::core::array& y, const mlx::core::array& x, const mlx::core::array& index, const std::vector<LowRank>& adapters);

}  // namespace machd
