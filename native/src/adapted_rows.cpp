#include "adapted_rows.h"

#include <algorithm>
#include <limits>
#include <map>

#include "threads.h"

namespace machd {
namespace {

// Products with a that a thread takes at once.
constexpr long kStretchRanks = 8;

// Applies a piece's ratios and offsets to one row's results, each product and sum rounded once.
void stretch(const LowRankPiece& piece, long begin, long end, float* out) {
  if (piece.ratios != nullptr)
    for (long at = begin; at < end; ++at) out[at] *= piece.ratios[at];
  if (piece.offsets != nullptr)
    for (long at = begin; at < end; ++at) out[at] += piece.offsets[at];
}

}  // namespace

AdaptedRows::AdaptedRows(const int32_t* index, long rows, long adapters) {
  std::map<long, std::vector<Run>> by_adapter;
  for (long from = 0, to; from < rows; from = to) {
    for (to = from + 1; to < rows && index[to] == index[from];) ++to;
    const long number = index[from];
    if (number == 0) continue;
    auto& runs = number < 0 || number > adapters ? lost_ : by_adapter[number - 1];
    runs.push_back({from, to - from});
  }
  for (auto& [adapter, runs] : by_adapter) groups_.push_back({adapter, std::move(runs)});
}

void AdaptedProduct::multiply(const float* x, const Kernels& kernels) const {
  struct Stretch {
    const AdaptedRows::Group* group;
    long begin, end;
  };
  std::vector<Stretch> stretches;
  for (const auto& group : rows->groups())
    if (const auto* one = adapters[group.adapter])
      for (long begin = 0; begin < one->a.outputs; begin += kStretchRanks)
        stretches.push_back({&group, begin, std::min(begin + kStretchRanks, one->a.outputs)});
  share(long(stretches.size()), 1, [&](long from, long to, int) {
    for (long at = from; at < to; ++at) {
      const auto& [group, begin, end] = stretches[at];
      const Weights& a = adapters[group->adapter]->a;
      const auto kernel = kernels.find_product(a.format, a.bits);
      for (const auto& [first, count] : group->runs)
        kernel(x + first * a.inputs, count, a, low + first * most_rank, begin, end, scratch(kernels.product_scratch_bytes(count, a.inputs)));
    }
  });
}

void AdaptedProduct::add(long begin, long end, float* out, long outputs, const Kernels& kernels) const {
  for (const auto& group : rows->groups()) {
    const auto* one = adapters[group.adapter];
    if (one == nullptr) continue;
    for (const auto& piece : one->pieces) {
      const long from = std::max(begin - piece.first_output, 0L), to = std::min(end - piece.first_output, piece.outputs);
      if (from >= to) continue;
      for (const auto& [row, count] : group.runs) {
        float* const own = out + row * outputs + piece.first_output;
        for (long at = 0; at < count; ++at) stretch(piece, from, to, own + at * outputs);
        kernels.add_low_rank(piece, one->a.format, low + row * most_rank + piece.first_rank, one->a.outputs, count, from, to, own, outputs);
      }
    }
  }
  for (const auto& [row, count] : rows->lost())
    for (long at = row; at < row + count; ++at)
      std::fill(out + at * outputs + begin, out + at * outputs + end, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace machd
