#include "layer_product.h"

#include <algorithm>

#include "threads.h"

namespace machd {
namespace {

// Numbers of rows that one thread normalises or arranges in about the time that another takes to join it.
constexpr long kStretchNumbers = 16 * 1024;

}  // namespace

long layer_product_numbers(const LayerProduct& product, long rows, const Kernels& kernels) {
  const long normed = product.norm != nullptr ? rows * product.weights.inputs : 0;
  const long arranged = kernels.arranges_rows(product.weights) ? rows * product.weights.inputs : 0;
  return normed + arranged + (product.is_gated ? rows * product.weights.outputs : 0);
}

void compute_layer_product(const LayerProduct& product, const float* x, long rows, float* memory, float* out, const Kernels& kernels) {
  const Weights& weights = product.weights;
  const long inputs = weights.inputs, result = product.result();
  if (inputs == 0) {  // sums of nothing
    std::fill_n(out, rows * result, 0.0f);
    return;
  }
  const bool arranges = kernels.arranges_rows(weights);
  if (product.norm != nullptr || arranges) {
    float* const normed = memory;
    float* const arranged = product.norm != nullptr ? memory + rows * inputs : memory;
    share(rows, std::max<long>(1, kStretchNumbers / inputs), [&](long begin, long end, int) {
      const float* from = x;
      if (product.norm != nullptr) {
        kernels.rms_norm(x, product.norm, product.eps, inputs, normed, begin, end);
        from = normed;
      }
      if (arranges) kernels.arrange_rows(from + begin * inputs, (end - begin) * inputs, arranged + begin * inputs);
    });
    x = arranges ? arranged : normed;
    memory = (arranges ? arranged : normed) + rows * inputs;
  }
  float* const sums = product.is_gated ? memory : out;
  const auto kernel = kernels.find_product(weights.format, weights.bits);
  const long bytes = kernels.product_scratch_bytes(rows, inputs);
  share(result, kStretchOutputs, [&](long begin, long end, int) {
    void* own = scratch(bytes);
    kernel(x, rows, weights, sums, begin, end, own);
    if (product.is_gated) kernel(x, rows, weights, sums, result + begin, result + end, own);
    for (long row = 0; row < rows; ++row) {
      const float* gates = sums + row * weights.outputs;
      if (product.is_gated) kernels.silu_product(gates + begin, gates + result + begin, end - begin, out + row * result + begin);
      if (product.added != nullptr)
        for (long at = row * result + begin; at < row * result + end; ++at) out[at] += product.added[at];
    }
  });
}

}  // namespace machd
