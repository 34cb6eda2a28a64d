// A product with what a layer does around it, over addresses; the same bits as those operations have one after another.
#pragma once

#include "kernels.h"

namespace machd {

// Outputs that a thread takes at once: few enough that two threads end together, many enough that taking them costs nothing.
constexpr long kStretchOutputs = 32;

struct LayerProduct {
  Weights weights;
  const float* norm;   // of the rows, by rms_norm; null for none
  float eps;           // of that
  const float* added;  // [rows, result], added to the result; null for none
  bool is_gated;       // the outputs are gates and as many ups, of which silu_product makes the result

  long result() const { return is_gated ? weights.outputs / 2 : weights.outputs; }
};

// Numbers of memory that compute_layer_product() needs for so many rows.
long layer_product_numbers(const LayerProduct& product, long rows, const Kernels& kernels);

// Computes x [rows, inputs] to out [rows, result], on all threads. memory: layer_product_numbers() of float32.
void compute_layer_product(const LayerProduct& product, const float* x, long rows, float* memory, float* out, const Kernels& kernels);

}  // namespace machd
