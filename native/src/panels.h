// Products of float32 rows with weights whose outputs lie together in panels, for passes of many rows.
#pragma once

namespace machd {

// Outputs of a panel.
constexpr long kPanelWidth = 16;

struct Panels {
  long outputs;          // a multiple of kPanelWidth
  long inputs;
  const float* weights;  // [outputs / kPanelWidth, inputs, kPanelWidth]
  const float* bias;     // [outputs]

  long count() const { return outputs / kPanelWidth; }
};

// out = x times the transposed weights + bias; of these the GELU where is_gelu says so; plus `added` where there is one.
struct PanelProduct {
  const float* x;  // [rows, inputs]
  long rows;
  Panels panels;
  bool is_gelu;        // by the error function
  const float* added;  // [rows, outputs], or null
  float* out;          // [rows, outputs]
};

// Computes the panels from `begin` to `end`.
//
// A sum begins with the bias and takes inputs one after another, each product and sum rounded once. So a row's bits depend on nothing but
// the row and the weights, and are those of every instruction set.
using MultiplyPanels = void (*)(const PanelProduct& product, long begin, long end);

}  // namespace machd
