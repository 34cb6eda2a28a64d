// Products of float32 rows with a layer's weights.
#pragma once

#include "weights.h"

namespace machd {

// Computes out[row, output] = sum over k of x[row, k] * weight[output, k] for outputs from `begin` to `end`.
//
// Whatever the number of rows, a sum is taken in one order: sixteen partial sums, each over every sixteenth k from left to
// right, which `sum` adds at the end. So a row's bits depend on nothing but the row and the weights.
//
// x: float32 [rows, inputs], arranged where ArrangesRows says so. out: float32 [rows, outputs]. scratch: product_scratch_bytes() of the calling thread's own, aligned to 64.
using Product = void (*)(const float* x, long rows, const Weights& weights, float* out, long begin, long end, void* scratch);

// The kernel for a format; null where there is none for its bits.
using FindProduct = Product (*)(Format format, int bits);

// Whether the kernel of these weights takes rows with their numbers in another order, and what puts `count` of them into it: a multiple of
// 32 for rows that lie one behind another.
using ArrangesRows = bool (*)(const Weights& weights);
using ArrangeRows = void (*)(const float* x, long count, float* to);

using ProductScratchBytes = long (*)(long rows, long inputs);

}  // namespace machd
