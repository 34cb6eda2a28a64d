// A layer's weights as a product reads them: packed or plain, one row for each output.
#pragma once

#include <cstdint>

namespace machd {

enum class Format : uint8_t { kFloat32, kFloat16, kBfloat16, kAffine, kMxfp4, kMxfp8, kNvfp4 };
enum class ScaleType : uint8_t { kFloat32, kFloat16, kBfloat16 };

struct Weights {
  Format format;
  ScaleType scale_type;  // of affine scales and biases
  int bits;              // of a packed weight
  int group;             // weights that share a scale
  long outputs;
  long inputs;
  const void* packed;  // [outputs, inputs * bits / 8] bytes
  const void* scales;  // [outputs, inputs / group]; null for plain weights
  const void* biases;  // the same; null for formats other than affine

  long row_bytes() const { return inputs * bits / 8; }
};

}  // namespace machd
