// Products of float32 rows with a layer's weights.
#pragma once

#include "weights.h"

namespace machd {

// Computes out[row, output] = sum over k of x[row, k] * weight[output, k] for outputs from `begin` to `end`.
//
// Whatever the number of rows, a sum is taken in one order: sixteen partial sums, each over every sixteenth k from left to
// right, which `sum` adds at the end. So a row's bits depend on nothing but the row and the weights.
//
// x: float32 [rows, inputs]. out: float32 [rows, outputs]. scratch: scratch_bytes() of the calling thread's own, aligned to 64.
using Product = void (*)(const float* x, long rows, const Weights& weights, float* out, long begin, long end, void* scratch);

// The kernel for a format; null where there is none for its bits.
struct Kernels {
  Product (*find)(Format format, int bits);
  long (*scratch_bytes)(long rows, long inputs);
  const char* name;
};

// The same with plain loops in float64, one weight at a time: what the others are tested against.
extern const Kernels plain_kernels;

// The best that this processor can run, or those of a name ("avx512", "avx2", "neon" or "plain"); null without AVX2 or NEON.
// Raises std::invalid_argument if this processor has none of that name.
const Kernels* choose_kernels(const char* wanted);

}  // namespace machd
