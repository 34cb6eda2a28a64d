#include "product.h"

#include <algorithm>

#include "expand.h"
#include "kernels.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

// Rows of a tile whose weights go from memory through registers into sums, and outputs beside so many rows: as many sums as there are
// registers for, beside weights.
constexpr int kDirectRows = kParts == 1 ? 8 : kParts == 2 ? 6 : 4;
constexpr int direct_outputs(int rows) {
  if (kParts == 1) return rows <= 4 ? 4 : 2;
  return rows == 1 ? 2 : 1;
}

// Rows up to which all tiles are such: weights of a stretch of outputs are in the cache when they are expanded for the second one. Beyond,
// they are expanded once for all.
constexpr int kUncachedRows = kParts == 1 ? 16 : 3 * kDirectRows;

// Outputs and rows of a tile, whose sums are in registers.
constexpr int kTileOutputs = kParts == 1 ? 4 : 3;
constexpr int kTileRows = kParts == 1 ? 6 : 2;

// Sixteen weights or numbers of a row whose last ones they may be; behind the end there are zeros.
template <class Expanded>
Vector last_weights(Expanded& weights, long k, long inputs) {
  float padded[kBlock] = {};
  if constexpr (requires { weights.one_at(k); })  // plain weights alone may end within a vector
    for (long at = k; at < inputs; ++at) padded[at - k] = weights.one_at(at);
  return Vector::load(padded);
}

// Outputs whose expanded weights lie in the cache together: whole tiles.
constexpr long kPanelOutputs = kParts == 1 ? 32 : 33;
static_assert(kPanelOutputs % kTileOutputs == 0);

// Outputs whose weights are asked for early: memory comes in time then, which the processor alone does not bring about across rows.
constexpr int kAhead = 32;

// Inputs that share a scale, or as many as one likes.
inline long span(const Weights& w) {
  return w.scales == nullptr ? kStretch : w.group;
}

// x: of each sixteen inputs those of all rows one after another.
template <class Expanded, int kRows, int kOutputs>
void direct_tile(const float* x, const Weights& w, float* out, long output) {
  constexpr int kVectors = Expanded::kVectors;
  Expanded weights[kOutputs];
  ScaleBuffer buffers[kOutputs];
  for (int o = 0; o < kOutputs; ++o) weights[o].begin(w, output + o, buffers[o]);
  // Every loop over the sums is unrolled, or the compiler would keep them in memory.
  Vector sums[kRows][kOutputs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) sums[r][o] = Vector::zeros();
  const long inputs = w.inputs, whole = inputs / kBlock * kBlock, step = span(w);
  for (long stretch = 0; stretch < whole; stretch += kStretch) {
    const long end = std::min(stretch + kStretch, whole);
    for (int o = 0; o < kOutputs; ++o) weights[o].prepare(stretch, (end - stretch) / step);
    for (long from = stretch, group = 0; from < end; from += step, ++group) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
        weights[o].enter(group);
        __builtin_prefetch(static_cast<const char*>(w.packed) + (output + o + kAhead) * w.row_bytes() + (from * w.bits >> 3));
      }
      const long to = std::min(from + step, end);
      for (long k = from; k < to; k += kBlock * kVectors) {
        Vector here[kOutputs][kVectors];
#pragma GCC unroll 8
        for (int o = 0; o < kOutputs; ++o) weights[o].at(k, here[o]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Vector row = in_registers(Vector::load(x + (k + v * kBlock) * kRows + r * kBlock));
#pragma GCC unroll 8
            for (int o = 0; o < kOutputs; ++o) sums[r][o] = fused(here[o][v], row, sums[r][o]);
          }
      }
    }
  }
  if (whole < inputs)
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const Vector weight = last_weights(weights[o], whole, inputs);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][o] = fused(weight, Vector::load(x + whole * kRows + r * kBlock), sums[r][o]);
    }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) out[r * w.outputs + output + o] = sum(sums[r][o]);
}

// Lays rows as direct_tile reads them; behind the last input there are zeros.
template <int kRows>
void interleave(const float* x, long inputs, float* to) {
  const long whole = inputs / kBlock * kBlock;
  for (long k = 0; k < whole; k += kBlock)
    for (int r = 0; r < kRows; ++r) Vector::load(x + r * inputs + k).store(to + k * kRows + r * kBlock);
  if (whole < inputs)
    for (int r = 0; r < kRows; ++r) Vector::load_some(x + r * inputs + whole, int(inputs - whole)).store(to + whole * kRows + r * kBlock);
}

// A few rows: each weight is expanded once and used for all of them at once.
template <class Expanded, int kRows>
void direct(const float* x, const Weights& w, float* out, long begin, long end, float* interleaved) {
  if (kRows > 1 || w.inputs % kBlock != 0) {
    interleave<kRows>(x, w.inputs, interleaved);
    x = interleaved;
  }
  constexpr int kOutputs = direct_outputs(kRows);
  long output = begin;
  for (; output + kOutputs <= end; output += kOutputs) direct_tile<Expanded, kRows, kOutputs>(x, w, out, output);
  for (; output < end; ++output) direct_tile<Expanded, kRows, 1>(x, w, out, output);
}

// As many rows as there are, at most kRows.
template <class Expanded, int kRows, class... Rest>
void direct_rows(long rows, Rest&&... rest) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return direct_rows<Expanded, kRows - 1>(rows, rest...);
  }
  direct<Expanded, kRows>(rest...);
}

// The sums of a few rows with a few outputs over a stretch of inputs. They go on from those in memory, and wait there for the next
// stretch, which changes no bit; the last one adds them up.
template <int kRows>
void cached_tile(const float* x, const float* expanded, const Weights& w, long from, long to, float* sums, float* out, int count) {
  Vector tile[kRows][kTileOutputs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < kTileOutputs; ++o)
      tile[r][o] = from == 0 ? Vector::zeros() : Vector::load(sums + (r * kTileOutputs + o) * kBlock);
  const auto add = [&](long k, auto row_at) {
    Vector weights[kTileOutputs];
    for (int o = 0; o < kTileOutputs; ++o) weights[o] = Vector::load(expanded + o * kStretch + k - from);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector row = row_at(x + r * w.inputs + k);
#pragma GCC unroll 8
      for (int o = 0; o < kTileOutputs; ++o) tile[r][o] = fused(weights[o], row, tile[r][o]);
    }
  };
  const long whole = from + (to - from) / kBlock * kBlock;
  for (long k = from; k < whole; k += kBlock) add(k, [](const float* at) { return Vector::load(at); });
  if (whole < to) add(whole, [&](const float* at) { return Vector::load_some(at, int(to - whole)); });
  if (to < w.inputs) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < kTileOutputs; ++o) tile[r][o].store(sums + (r * kTileOutputs + o) * kBlock);
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < kTileOutputs; ++o)
      if (o < count) out[r * w.outputs + o] = sum(tile[r][o]);
}

// A tile of as many rows as there are left, at most kRows.
template <int kRows, class... Rest>
void some_rows(long left, Rest&&... rest) {
  if constexpr (kRows > 1) {
    if (left < kRows) return some_rows<kRows - 1>(left, rest...);
  }
  cached_tile<kRows>(rest...);
}

// Rows that are worked on at once at the most, which bounds the memory for their sums.
constexpr long kMostRows = 512;

// Expands a stretch of one row's weights.
template <class Expanded>
void expand(Expanded& weights, const Weights& w, long from, long to, float* expanded) {
  const long whole = from + (to - from) / kBlock * kBlock, step = span(w);
  weights.prepare(from, (whole - from) / step);
  for (long k = from, group = 0; k < whole; ++group) {
    weights.enter(group);
    for (const long end = std::min(k + step, whole); k < end; k += kBlock * Expanded::kVectors) {
      Vector here[Expanded::kVectors];
      weights.at(k, here);
      for (int v = 0; v < Expanded::kVectors; ++v) here[v].store(expanded + k - from + v * kBlock);
    }
  }
  if (whole < to) last_weights(weights, whole, to).store(expanded + whole - from);
}

// Many rows. The weights of a panel of outputs are expanded into the second cache; each tile of rows stays in the first one
// while it passes over all of the panel.
template <class Expanded>
void cached(const float* x, long rows, const Weights& w, float* out, long begin, long end, float* expanded, float* sums) {
  for (long panel = begin; panel < end; panel += kPanelOutputs) {
    const long count = std::min(kPanelOutputs, end - panel);
    for (long from = 0; from < w.inputs; from += kStretch) {
      const long to = std::min(from + kStretch, w.inputs);
      for (long o = 0; o < count; ++o) {
        Expanded weights;
        ScaleBuffer buffer;
        weights.begin(w, panel + o, buffer);
        expand(weights, w, from, to, expanded + o * kStretch);
      }
      for (long row = 0; row < rows; row += kTileRows)
        for (long o = 0; o < count; o += kTileOutputs)
          some_rows<kTileRows>(
              rows - row, x + row * w.inputs, expanded + o * kStretch, w, from, to,
              sums + (row * kPanelOutputs + o * std::min<long>(kTileRows, rows - row)) * kBlock,
              out + row * w.outputs + panel + o, int(std::min<long>(kTileOutputs, count - o)));
    }
  }
}

template <class Expanded>
void product(const float* x, long rows, const Weights& w, float* out, long begin, long end, void* scratch) {
  if (rows <= kUncachedRows) {
    for (long row = 0, count; row < rows; row += count) {
      const long tiles = (rows - row + kDirectRows - 1) / kDirectRows;
      count = (rows - row + tiles - 1) / tiles;  // of like many rows
      direct_rows<Expanded, kDirectRows>(count, x + row * w.inputs, w, out + row * w.outputs, begin, end, static_cast<float*>(scratch));
    }
    return;
  }
  float* const expanded = static_cast<float*>(scratch);
  for (long row = 0; row < rows; row += kMostRows)
    cached<Expanded>(
        x + row * w.inputs, std::min(kMostRows, rows - row), w, out + row * w.outputs, begin, end, expanded,
        expanded + kPanelOutputs * kStretch);
}

}  // namespace

bool arranges_rows(const Weights& w) { return w.format == Format::kAffine && w.bits == 4; }

void arrange_rows(const float* x, long count, float* to) { arrange(x, count, to); }

long product_scratch_bytes(long rows, long inputs) {
  if (rows <= kUncachedRows) return long(sizeof(float)) * std::min<long>(rows, kDirectRows) * (inputs + kBlock);
  const long sums = inputs > kStretch ? std::min(kMostRows, rows) * kPanelOutputs * kBlock : 0;
  return long(sizeof(float)) * (kPanelOutputs * kStretch + sums);
}

Product find_product(Format format, int bits) {
  switch (format) {
    case Format::kFloat32: return product<Expander<Format::kFloat32, 32>>;
    case Format::kFloat16: return product<Expander<Format::kFloat16, 16>>;
    case Format::kBfloat16: return product<Expander<Format::kBfloat16, 16>>;
    case Format::kMxfp4: return product<Expander<Format::kMxfp4, 4>>;
    case Format::kNvfp4: return product<Expander<Format::kNvfp4, 4>>;
    case Format::kMxfp8: return product<Expander<Format::kMxfp8, 8>>;
    case Format::kAffine:
      switch (bits) {
        case 2: return product<Expander<Format::kAffine, 2>>;
        case 3: return product<Expander<Format::kAffine, 3>>;
        case 4: return product<Expander<Format::kAffine, 4>>;
        case 5: return product<Expander<Format::kAffine, 5>>;
        case 6: return product<Expander<Format::kAffine, 6>>;
        case 8: return product<Expander<Format::kAffine, 8>>;
      }
  }
  return nullptr;
}

}  // namespace MACHD_TARGET
}  // namespace machd
