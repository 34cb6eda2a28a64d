// BERT layers as one operation of MLX, over texts that lie behind one another without padding.
#pragma once

#include <memory>
#include <vector>

#include "mlx/array.h"
#include "panels.h"

namespace machd {

// Weights and bias of a layer's product, in panels.
class PanelWeights {
 public:
  // weights: float32 [outputs / 16, inputs, 16], of which number [p, k, o] is that of output 16 p + o and input k. bias: float32 [outputs].
  // Raises std::invalid_argument where they do not go together.
  PanelWeights(const mlx::core::array& weights, const mlx::core::array& bias);

  const Panels& panels() const { return panels_; }

 private:
  std::vector<mlx::core::array> kept_;
  Panels panels_;
};

// A LayerNorm of rows.
class NormWeights {
 public:
  // weight, bias: float32 [size].
  // Raises std::invalid_argument where they do not go together.
  NormWeights(const mlx::core::array& weight, const mlx::core::array& bias, float eps);

  long size() const { return kept_[0].size(); }
  const float* weight() const { return kept_[0].data<float>(); }
  const float* bias() const { return kept_[1].data<float>(); }
  float eps() const { return eps_; }

 private:
  std::vector<mlx::core::array> kept_;
  float eps_;
};

// A layer's parts: attention of each token to all tokens of its text; sum of its projection and the layer's input, normalised; GELU of a
// projection, projected; sum, normalised.
struct BertBlock {
  PanelWeights qkv;     // from hidden to queries, keys and values, hidden numbers each
  PanelWeights output;  // from hidden to hidden
  NormWeights attention_norm;
  PanelWeights up;
  PanelWeights down;
  NormWeights output_norm;
};

// Layers one after another; float32 alone. A row's bits depend on nothing but the rows of its text.
class BertLayers {
 public:
  // embedding_norm: of the rows that come in. Heads have a multiple of 16 numbers.
  // Raises std::invalid_argument where there are no layers, or sizes do not go together.
  BertLayers(NormWeights embedding_norm, std::vector<BertBlock> blocks, int heads);

  // x: [tokens, hidden], sums of embeddings, those of the first text first. lengths: tokens of each text.
  // Raises std::invalid_argument where texts have no tokens, or not as many as there are rows.
  mlx::core::array operator()(const mlx::core::array& x, const std::vector<int>& lengths) const;

  struct Stack {
    NormWeights embedding_norm;
    std::vector<BertBlock> blocks;
    long heads;

    long hidden() const { return embedding_norm.size(); }
  };

 private:
  std::shared_ptr<const Stack> stack_;  // kept by what has been asked for and is not yet computed, too
};

// Means of the rows of each text: [texts, hidden] of float32 [tokens, hidden].
// Raises std::invalid_argument where texts have no rows, or not as many as there are.
mlx::core::array text_means(const mlx::core::array& rows, const std::vector<int>& lengths);

}  // namespace machd
