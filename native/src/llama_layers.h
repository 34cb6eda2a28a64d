// Layers of a llama, and of models of its shape, as one operation of MLX.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layer_product.h"
#include "low_rank_weights.h"
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

// A norm's weight, float32, and what is added to the mean of squares.
using ScaledNorm = std::pair<mlx::core::array, float>;

// A layer's parts: norm, projection of queries, keys and values, norms of each head of queries and keys, rotation, attention over columns that
// the keys and values are written to, projection of its output, norm and sum; norm, projection of gate and up, activation, projection,
// norm and sum. The norms of heads and those before the sums are optional.
class LlamaBlock {
 public:
  // input_norm, post_norm, output_norm, down_norm: [hidden]. query_norm, key_norm: [head_dim]. The products go from hidden to heads +
  // 2 kv_heads heads, in one or in three (queries, keys, values); from heads heads to hidden, from hidden to gates and as many ups, in one
  // or in two that are packed alike; and from these to hidden. activation: "silu" or "gelu". window: columns that a token sees, its own included; 0 for all. table: which of the
  // tables of a pass rotates the heads.
  // Raises std::invalid_argument where sizes do not go together.
  LlamaBlock(
      const ScaledNorm& input_norm,
      const ScaledNorm& post_norm,
      std::vector<LayerWeights> qkv,
      LayerWeights output,
      std::vector<LayerWeights> gate_up,
      LayerWeights down,
      int heads,
      int kv_heads,
      float scale,
      const std::optional<ScaledNorm>& query_norm,
      const std::optional<ScaledNorm>& key_norm,
      const std::optional<ScaledNorm>& output_norm,
      const std::optional<ScaledNorm>& down_norm,
      const std::string& activation,
      int window,
      int table);

  struct Parts;
  const std::shared_ptr<const Parts>& parts() const { return parts_; }

 private:
  std::shared_ptr<const Parts> parts_;  // kept by what has been asked for and is not yet computed, too
};

// An adapter of layers: what it adds to the product of each of their weights, in the order of LlamaBlock's; none where it leaves one as it is.
class LlamaAdapter {
 public:
  using Layers = std::vector<std::vector<std::optional<LowRank>>>;
  explicit LlamaAdapter(Layers layers) : layers_(std::make_shared<const Layers>(std::move(layers))) {}

  const Layers& layers() const { return *layers_; }

  const LowRankProduct* product(size_t layer, size_t product) const {
    const auto& one = layers()[layer][product];
    return one ? &one->product() : nullptr;
  }

 private:
  std::shared_ptr<const Layers> layers_;  // kept by what has been asked for and is not yet computed, too
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
    // None, or for each layer the columns of a ring and the column of position 0 there: position p lies in column (p + that) % columns.
    // 0 columns where positions lie in order. A ring holds all that the pass's tokens see.
    std::vector<std::pair<int, int>> rings;
  };

  // x: [.., hidden], the tokens of the first columns' rows one after another, then those of the next. tables: cosines and sines as of
  // `rotate`, for the blocks to choose from.
  // index, adapters: as of `add_low_rank`, of the tokens; none where no token has an adapter.
  // Returns the last layer's result like x; and of each of the columns keys and values of the first layer, of the second one and so on.
  // Raises std::invalid_argument where shapes or dtypes do not go together.
  std::vector<mlx::core::array> operator()(
      const mlx::core::array& x,
      const std::vector<std::pair<mlx::core::array, mlx::core::array>>& tables,
      const std::vector<Columns>& columns,
      const std::optional<mlx::core::array>& index,
      const std::vector<LlamaAdapter>& adapters) const;

  using Stack = std::vector<std::shared_ptr<const LlamaBlock::Parts>>;

 private:
  std::shared_ptr<const Stack> stack_;
};

}  // namespace machd
