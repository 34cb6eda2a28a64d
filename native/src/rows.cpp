#include "rows.h"

#include <algorithm>
#include <cmath>

#include "gelu.h"
#include "kernels.h"
#include "vectors.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

// Calls each(at, count) for the vectors of `size` numbers; the last one may have fewer than sixteen.
template <class Each>
void by_vector(long size, Each each) {
  long at = 0;
  for (; at + kBlock <= size; at += kBlock) each(at, kBlock);
  if (at < size) each(at, int(size - at));
}

inline Vector load(const float* from, int count) { return count == kBlock ? Vector::load(from) : Vector::load_some(from, count); }

inline void store(Vector vector, float* to, int count) {
  if (count == kBlock) vector.store(to);
  else vector.store_some(to, count);
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, long size, float* out, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const float* from = x + row * size;
    float* to = out + row * size;
    Vector squares = Vector::zeros();
    by_vector(size, [&](long at, int count) {
      const Vector numbers = load(from + at, count);
      squares = fused(numbers, numbers, squares);
    });
    const Vector factor = Vector::all(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    by_vector(size, [&](long at, int count) { store(load(from + at, count) * factor * load(weight + at, count), to + at, count); });
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, long size, float* out, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const float* from = x + row * size;
    float* to = out + row * size;
    Vector total = Vector::zeros();
    by_vector(size, [&](long at, int count) { total = total + load(from + at, count); });
    const Vector mean = Vector::all(sum(total) / float(size));
    Vector squares = Vector::zeros();
    by_vector(size, [&](long at, int count) {
      Vector difference = load(from + at, count) - mean;
      if (count < kBlock) {  // behind the end there is nothing that differs
        float some[kBlock];
        difference.store(some);
        difference = Vector::load_some(some, count);
      }
      squares = fused(difference, difference, squares);
    });
    const Vector factor = Vector::all(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    by_vector(size, [&](long at, int count) {
      store(fused((load(from + at, count) - mean) * factor, load(weight + at, count), load(bias + at, count)), to + at, count);
    });
  }
}

void gelu(const float* x, long count, float* out) {
  by_vector(count, [&](long at, int here) { store(gelu(load(x + at, here)), out + at, here); });
}

void mean_of_rows(const float* x, long rows, long size, float* out) {
  by_vector(size, [&](long at, int count) {
    Vector total = Vector::zeros();
    for (long row = 0; row < rows; ++row) total = total + load(x + row * size + at, count);
    store(total / Vector::all(float(rows)), out + at, count);
  });
}

void silu_product(const float* gates, const float* ups, long count, float* out) {
  const Vector one = Vector::all(1.0f), to_base = Vector::all(-kLog2E);
  by_vector(count, [&](long at, int here) {
    const Vector gate = load(gates + at, here), up = load(ups + at, here);
    store(gate / (one + exp2(gate * to_base)) * up, out + at, here);
  });
}

void rotate(const float* head, const float* cosines, const float* sines, long half, float* out) {
  by_vector(half, [&](long at, int count) {
    const Vector first = load(head + at, count), second = load(head + half + at, count);
    const Vector cosine = load(cosines + at, count), sine = load(sines + at, count);
    store(first * cosine - second * sine, out + at, count);
    store(first * sine + second * cosine, out + half + at, count);
  });
}

}  // namespace MACHD_TARGET
}  // namespace machd
