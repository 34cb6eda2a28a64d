// The plain twins of the operations on rows.
#include <cmath>

#include "kernels.h"

namespace machd::plain {

void rms_norm(const float* x, const float* weight, float eps, long size, float* out, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    double squares = 0;
    for (long at = 0; at < size; ++at) squares += double(x[row * size + at]) * x[row * size + at];
    const double factor = 1 / std::sqrt(squares / size + eps);
    for (long at = 0; at < size; ++at) out[row * size + at] = float(x[row * size + at] * factor * weight[at]);
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, long size, float* out, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    double mean = 0, squares = 0;
    for (long at = 0; at < size; ++at) mean += double(x[row * size + at]) / size;
    for (long at = 0; at < size; ++at) squares += (x[row * size + at] - mean) * (x[row * size + at] - mean);
    const double factor = 1 / std::sqrt(squares / size + eps);
    for (long at = 0; at < size; ++at) out[row * size + at] = float((x[row * size + at] - mean) * factor * weight[at] + bias[at]);
  }
}

void gelu(const float* x, long count, float* out) {
  for (long at = 0; at < count; ++at) out[at] = float(x[at] * 0.5 * std::erfc(-double(x[at]) / std::sqrt(2.0)));
}

void mean_of_rows(const float* x, long rows, long size, float* out) {
  for (long at = 0; at < size; ++at) {
    double total = 0;
    for (long row = 0; row < rows; ++row) total += x[row * size + at];
    out[at] = float(total / rows);
  }
}

void silu_product(const float* gates, const float* ups, long count, float* out) {
  for (long at = 0; at < count; ++at) {
    const double gate = gates[at];
    out[at] = float(gate / (1 + std::exp(-gate)) * ups[at]);
  }
}

void rotate(const float* head, const float* cosines, const float* sines, long half, float* out) {
  for (long at = 0; at < half; ++at) {
    const double first = head[at], second = head[half + at], cosine = cosines[at], sine = sines[at];
    out[at] = float(first * cosine - second * sine);
    out[half + at] = float(first * sine + second * cosine);
  }
}

}  // namespace machd::plain
