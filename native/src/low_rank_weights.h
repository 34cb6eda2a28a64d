// Weights of adapters as arrays of MLX.
#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include "low_rank.h"
#include "mlx/array.h"

namespace machd {

// What an adapter adds to one product, laid out for it.
class LowRank {
 public:
  // The first output of some that lie together, a [rank, inputs] and b [outputs, rank], float32.
  using Piece = std::tuple<int, mlx::core::array, mlx::core::array>;

  // is_half: kept in float16, each array times a power of two that leaves its numbers all their digits there; computed in float32 all the same.
  // Raises std::invalid_argument where there are none, or they do not go together.
  LowRank(const std::vector<Piece>& pieces, bool is_half);

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
