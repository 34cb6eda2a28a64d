// All kernels of an instruction set.
#pragma once

#include "attention.h"
#include "low_rank.h"
#include "panels.h"
#include "product.h"
#include "rows.h"

namespace machd {

struct Kernels {
  const char* name;
  FindProduct find_product;
  ArrangesRows arranges_rows;
  ArrangeRows arrange_rows;
  ProductScratchBytes product_scratch_bytes;
  Attend attend;
  AttendScratchBytes attend_scratch_bytes;
  MultiplyPanels multiply_panels;
  RmsNorm rms_norm;
  LayerNorm layer_norm;
  Gelu gelu;
  MeanOfRows mean_of_rows;
  GatedProduct silu_product;
  GatedProduct gelu_product;
  Rotate rotate;
  AddLowRank add_low_rank;
};

// The best that this processor can run, or those of a name ("avx512", "avx2", "neon", or "plain": loops in float64, one number at a
// time, which the others are tested against); null without AVX2 or NEON.
// Raises std::invalid_argument if this processor has none of that name.
const Kernels* choose_kernels(const char* wanted);

#if defined(MACHD_TARGET)
namespace MACHD_TARGET {
Product find_product(Format format, int bits);
bool arranges_rows(const Weights& weights);
void arrange_rows(const float* x, long count, float* to);
long product_scratch_bytes(long rows, long inputs);
void attend(const Attention& attention, long begin, long end, void* scratch);
long attend_scratch_bytes(long queries, long head_dim, long value_dim);
void multiply_panels(const PanelProduct& product, long begin, long end);
void rms_norm(const float* x, const float* weight, float eps, long size, float* out, long begin, long end);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, long size, float* out, long begin, long end);
void gelu(const float* x, long count, float* out);
void mean_of_rows(const float* x, long rows, long size, float* out);
void silu_product(const float* gates, const float* ups, long count, float* out);
void gelu_product(const float* gates, const float* ups, long count, float* out);
void rotate(const float* head, const float* cosines, const float* sines, long half, float* out);
void add_low_rank(const LowRankPiece& piece, Format format, const float* low, long low_step, long rows, long begin, long end, float* out, long out_step);
}  // namespace MACHD_TARGET
#endif

}  // namespace machd
