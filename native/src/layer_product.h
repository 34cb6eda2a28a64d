// A product with what a layer does around it, over addresses; the same bits as those operations have one after another.
#pragma once

#include "adapted_rows.h"
#include "kernels.h"

namespace machd {

// Outputs that a thread takes at once: few enough that two threads end together, many enough that taking them costs nothing.
constexpr long kStretchOutputs = 32;

struct LayerProduct {
  Weights weights;
  const float* norm;   // of the rows, by rms_norm; null for none
  float eps;           // of that
  const float* added;  // [rows, result], added to the result; null for none
  GatedProduct gated;  // makes the result of the outputs, which are gates and as many ups; null where these are the result
  const float* result_norm = nullptr;  // of the result before it is added, by rms_norm; null for none
  float result_eps = 0;
  Weights ups = {};  // of the ups, packed like those of the gates; no outputs where the weights are of both
  const AdaptedProduct *adapters = nullptr, *up_adapters = nullptr;  // of the rows, where they add to the weights' outputs, and to those of `ups`

  long result() const { return gated && ups.outputs == 0 ? weights.outputs / 2 : weights.outputs; }
};

// Numbers of memory that compute_layer_product() needs for so many rows.
long layer_product_numbers(const LayerProduct& product, long rows, const Kernels& kernels);

// Computes x [rows, inputs] to out [rows, result], on all threads. memory: layer_product_numbers() of float32.
void compute_layer_product(const LayerProduct& product, const float* x, long rows, float* memory, float* out, const Kernels& kernels);

}  // namespace machd
