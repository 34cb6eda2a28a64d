// Operations on rows of numbers that lie together: normalisation, activation, rotation.
#pragma once

namespace machd {

// out = x / sqrt(mean of squares + eps) * weight for rows of `size` numbers from `begin` to `end`.
using RmsNorm = void (*)(const float* x, const float* weight, float eps, long size, float* out, long begin, long end);

// out = (x - mean) / sqrt(mean of squared differences from it + eps) * weight + bias for rows of `size` numbers from `begin` to `end`.
// x and out may be the same.
using LayerNorm = void (*)(const float* x, const float* weight, const float* bias, float eps, long size, float* out, long begin, long end);

// out = x times the probability that a normal variable lies below it, for `count` numbers.
using Gelu = void (*)(const float* x, long count, float* out);

// out = mean of `rows` rows of `size` numbers, added one after another.
using MeanOfRows = void (*)(const float* x, long rows, long size, float* out);

// out = gate * sigmoid(gate) * up for `count` gates and ups.
using SiluProduct = void (*)(const float* gates, const float* ups, long count, float* out);

// Turns pairs (i, i + half) of one head's numbers by the angles whose cosines and sines are given.
using Rotate = void (*)(const float* head, const float* cosines, const float* sines, long half, float* out);

}  // namespace machd
