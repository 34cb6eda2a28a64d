#include "layer_product.h"

#include <algorithm>

#include "threads.h"

namespace machd {
namespace {

// Numbers of rows that one thread normalises or arranges in about the time that another takes to join it.
constexpr long kStretchNumbers = 16 * 1024;

void add(const float* added, long begin, long end, float* to) {
  for (long at = begin; at < end; ++at) to[at] += added[at];
}

}  // namespace

long layer_product_numbers(const LayerProduct& product, long rows, const Kernels& kernels) {
  const long normed = product.norm != nullptr ? rows * product.weights.inputs : 0;
  const long arranged = kernels.arranges_rows(product.weights) ? rows * product.weights.inputs : 0;
  return normed + arranged + (product.gated ? 2 * rows * product.result() : 0);
}

void compute_layer_product(const LayerProduct& product, const float* x, long rows, float* memory, float* out, const Kernels& kernels) {
  const Weights& weights = product.weights;
  const long inputs = weights.inputs, result = product.result();
  if (inputs == 0) {  // sums of nothing
    std::fill_n(out, rows * result, 0.0f);
    return;
  }
  const bool arranges = kernels.arranges_rows(weights);
  const float* plain = x;  // as they lie
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
    if (product.norm != nullptr) plain = normed;
    x = arranges ? arranged : normed;
    memory = (arranges ? arranged : normed) + rows * inputs;
  }
  for (const auto* one : {product.adapters, product.up_adapters})
    if (one != nullptr) one->multiply(plain, kernels);
  // Gates and ups of a row one behind another, or all rows' gates and then their ups.
  const bool is_one = product.ups.outputs == 0;
  float* const sums = product.gated ? memory : out;
  float* const up_sums = sums + (is_one ? result : rows * result);
  const auto kernel = kernels.find_product(weights.format, weights.bits);
  const long bytes = kernels.product_scratch_bytes(rows, inputs);
  share(result, kStretchOutputs, [&](long begin, long end, int) {
    void* own = scratch(bytes);
    kernel(x, rows, weights, sums, begin, end, own);
    if (product.gated && is_one) kernel(x, rows, weights, sums, result + begin, result + end, own);
    if (product.gated && !is_one) kernel(x, rows, product.ups, up_sums, begin, end, own);
    if (product.adapters != nullptr) product.adapters->add(begin, end, sums, weights.outputs, kernels);
    if (product.adapters != nullptr && product.gated && is_one) product.adapters->add(result + begin, result + end, sums, weights.outputs, kernels);
    if (product.up_adapters != nullptr) product.up_adapters->add(begin, end, up_sums, result, kernels);
    for (long row = 0; row < rows; ++row) {
      const long at = row * weights.outputs + begin;
      if (product.gated) product.gated(sums + at, up_sums + at, end - begin, out + row * result + begin);
      if (product.added != nullptr && product.result_norm == nullptr) add(product.added, row * result + begin, row * result + end, out);
    }
  });
  if (product.result_norm == nullptr) return;
  share(rows, std::max<long>(1, kStretchNumbers / result), [&](long begin, long end, int) {
    kernels.rms_norm(out, product.result_norm, product.result_eps, result, out, begin, end);
    if (product.added != nullptr) add(product.added, begin * result, end * result, out);
  });
}

}  // namespace machd
