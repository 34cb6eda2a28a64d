// The plain twin of products with panels.
#include <cmath>

#include "kernels.h"

namespace machd::plain {

void multiply_panels(const PanelProduct& product, long begin, long end) {
  const Panels& panels = product.panels;
  for (long row = 0; row < product.rows; ++row)
    for (long output = begin * kPanelWidth; output < end * kPanelWidth; ++output) {
      const float* weights = panels.weights + output / kPanelWidth * panels.inputs * kPanelWidth + output % kPanelWidth;
      double sum = panels.bias[output];
      for (long k = 0; k < panels.inputs; ++k) sum += double(product.x[row * panels.inputs + k]) * weights[k * kPanelWidth];
      if (product.is_gelu) sum *= 0.5 * std::erfc(-sum / std::sqrt(2.0));
      if (product.added != nullptr) sum += product.added[row * panels.outputs + output];
      product.out[row * panels.outputs + output] = float(sum);
    }
}

}  // namespace machd::plain
