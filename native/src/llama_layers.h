// Llama layers as one operation of MLX.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layer_product.h"
#include "mlx/array.h"

namespace machd {

// Weights of a layer's product, kept where they lie.
class LayerWeights {
 public:
  // Arguments as of `product`. Raises std::invalid_argument where they do not go together, or no kernel computes them.
  LayerWeights(
      const mlx::core::array& weights,
      const std::optional<mlx::core::array>& scales,
      const std::optional<mlx::core::array>& biases,
      const std::string& mode,
      int group,
      int bits);

  const Weights& weights() const { return weights_; }

 private:
  std::vector<mlx::core::array> kept_;
  Weights weights_;
};

// A layer's parts: norm, projection of queries, keys and values, rotation, attention over columns that the keys and values are written to,
// projection of its output and sum; norm, projection of gate and up, SiLU product, projection and sum.
class LlamaBlock {
 public:
  // input_norm, post_norm: float32 [hidden]. The products go from hidden to heads + 2 kv_heads heads, from heads heads to hidden, from
  // hidden to gates and as many ups, and from these to hidden.
  // Raises std::invalid_argument where sizes do not go together.
  LlamaBlock(
      const mlx::core::array& input_norm,
      const mlx::core::array& post_norm,
      float input_eps,
      float post_eps,
      LayerWeights qkv,
      LayerWeights output,
      LayerWeights gate_up,
      LayerWeights down,
      int heads,
      int kv_heads,
      float scale);

  struct Parts;
  const std::shared_ptr<const Parts>& parts() const { return parts_; }

 private:
  std::shared_ptr<const Parts> parts_;  // kept by what has been asked for and is not yet computed, too
};

// Layers one after another. A row has the bits that the operations of operations.h give it one after another; float32 alone.
class LlamaLayers {
 public:
  // Raises std::invalid_argument where there are none, or rows or heads of one do not go with those of another.
  explicit LlamaLayers(const std::vector<LlamaBlock>& blocks);

  // Some of the pass's rows, and the columns that they have in each layer: keys, values, starts, prefix_keys and prefix_values as of
  // `attend`, all columns so far seen. They are written in place where nobody else holds them, and a row's first column has the position
  // behind the prefix.
  struct Columns {
    std::vector<mlx::core::array> keys, values;
    mlx::core::array starts;
    int tokens;  // of each row
    std::vector<mlx::core::array> prefix_keys, prefix_values;  // none, or one for each layer
  };

  // x: [.., hidden], the tokens of the first columns' rows one after another, then those of the next. cosines, sines: as of `rotate`.
  // Returns the last layer's result like x; and of each of the columns keys and values of the first layer, of the second one and so on.
  // Raises std::invalid_argument where shapes or dtypes do not go together.
  std::vector<mlx::core::array> operator()(
      const mlx::core::array& x, const mlx::core::array& cosines, const mlx::core::array& sines, const std::vector<Columns>& columns) const;

  using Stack = std::vector<std::shared_ptr<const LlamaBlock::Parts>>;

 private:
  std::shared_ptr<const Stack> stack_;
};

}  // namespace machd
