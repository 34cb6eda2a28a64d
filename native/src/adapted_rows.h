// Rows of a pass by the adapters that they have, over addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace machd {

// Rows with an adapter: those of one adapter after those of another.
class AdaptedRows {
 public:
  // Some that lie one behind another.
  struct Run {
    long first, rows;
  };

  struct Group {
    long adapter;
    std::vector<Run> runs;
  };

  // index: of each row 0 for none, or an adapter's number + 1. One that is not that of an adapter is no adapter's and no base row's.
  AdaptedRows(const int32_t* index, long rows, long adapters);

  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Run>& lost() const { return lost_; }  // with an index that nothing has

 private:
  std::vector<Group> groups_;
  std::vector<Run> lost_;
};

// What a pass's adapters add to one product. A row's bits depend on the row, its adapter and the product alone; rows without an adapter
// are not touched, and lost ones are not numbers.
struct AdaptedProduct {
  const AdaptedRows* rows;
  std::vector<const LowRankProduct*> adapters;  // by number; null for one that leaves this product as it is
  float* low;                                   // [rows, most_rank]
  long most_rank;                               // of all products with a

  // Computes the products of x [rows, inputs] with a, on all threads.
  void multiply(const float* x, const Kernels& kernels) const;

  // Adds to the product's outputs from `begin` to `end`. out: `outputs` of each row.
  void add(long begin, long end, float* out, long outputs, const Kernels& kernels) const;
};

}  // namespace machd
