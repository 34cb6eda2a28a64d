// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bert_layers.h"
#include "large_pages.h"
#include "llama_layers.h"
#include "low_rank_weights.h"
#include "operations.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_kernels, m) {
  nb::module_::import_("mlx.core");
  m.def(
      "product",
      &machd::product,
      "x"_a,
      "weights"_a,
      "scales"_a = nb::none(),
      "biases"_a = nb::none(),
      nb::kw_only(),
      "mode"_a = "plain",
      "group"_a = 1,
      "bits"_a = 32);
  m.def(
      "gathered_product",
      &machd::gathered_product,
      "x"_a,
      "weights"_a,
      "scales"_a.none(),
      "biases"_a.none(),
      "indices"_a,
      nb::kw_only(),
      "mode"_a = "plain",
      "group"_a = 1,
      "bits"_a = 32);
  m.def(
      "attend",
      &machd::attend,
      "queries"_a,
      "keys"_a,
      "values"_a,
      "starts"_a,
      "prefix_keys"_a = nb::none(),
      "prefix_values"_a = nb::none(),
      nb::kw_only(),
      "scale"_a,
      "window"_a = 0);
  m.def("written", &machd::written, "columns"_a, "tokens"_a, "starts"_a);
  m.def("rotate", &machd::rotate, "x"_a, "cosines"_a, "sines"_a, "positions"_a, nb::kw_only(), "rotated"_a);
  m.def("rms_norm", &machd::rms_norm, "x"_a, "weight"_a, "eps"_a);
  m.def("layer_norm", &machd::layer_norm, "x"_a, "weight"_a, "bias"_a, "eps"_a);
  m.def("gelu", &machd::gelu, "x"_a);
  m.def("silu_product", &machd::silu_product, "x"_a);
  m.def("gelu_product", &machd::gelu_product, "x"_a);
  nb::class_<machd::LowRank> low_rank(m, "LowRank");
  nb::class_<machd::LowRank::Piece>(low_rank, "Piece")
      .def(
          nb::init<int, mlx::core::array, mlx::core::array, std::optional<mlx::core::array>, std::optional<mlx::core::array>>(),
          "first_output"_a,
          "a"_a,
          "b"_a,
          "ratios"_a = nb::none(),
          "offsets"_a = nb::none());
  low_rank.def(nb::init<const std::vector<machd::LowRank::Piece>&>(), "pieces"_a)
      .def_prop_ro("nbytes", &machd::LowRank::nbytes);
  m.def("add_low_rank", &machd::add_low_rank, "y"_a, "x"_a, "index"_a, "adapters"_a);
  nb::class_<machd::LayerWeights>(m, "LayerWeights")
      .def(
          nb::init<
              const mlx::core::array&,
              const std::optional<mlx::core::array>&,
              const std::optional<mlx::core::array>&,
              const std::string&,
              int,
              int>(),
          "weights"_a,
          "scales"_a = nb::none(),
          "biases"_a = nb::none(),
          nb::kw_only(),
          "mode"_a = "plain",
          "group"_a = 1,
          "bits"_a = 32);
  nb::class_<machd::LlamaBlock>(m, "LlamaBlock")
      .def(
          nb::init<
              const machd::ScaledNorm&,
              const machd::ScaledNorm&,
              std::vector<machd::LayerWeights>,
              machd::LayerWeights,
              std::vector<machd::LayerWeights>,
              machd::LayerWeights,
              int,
              int,
              float,
              const std::optional<machd::ScaledNorm>&,
              const std::optional<machd::ScaledNorm>&,
              const std::optional<machd::ScaledNorm>&,
              const std::optional<machd::ScaledNorm>&,
              const std::string&,
              int,
              int>(),
          nb::kw_only(),
          "input_norm"_a,
          "post_norm"_a,
          "qkv"_a,
          "output"_a,
          "gate_up"_a,
          "down"_a,
          "heads"_a,
          "kv_heads"_a,
          "scale"_a,
          "query_norm"_a = nb::none(),
          "key_norm"_a = nb::none(),
          "output_norm"_a = nb::none(),
          "down_norm"_a = nb::none(),
          "activation"_a = "silu",
          "window"_a = 0,
          "table"_a = 0);
  nb::class_<machd::LlamaAdapter>(m, "LlamaAdapter").def(nb::init<machd::LlamaAdapter::Layers>(), "layers"_a);
  nb::class_<machd::LlamaLayers> layers(m, "LlamaLayers");
  using Arrays = std::vector<mlx::core::array>;
  nb::class_<machd::LlamaLayers::Columns>(layers, "Columns")
      .def(
          nb::init<Arrays, Arrays, mlx::core::array, int, Arrays, Arrays, std::vector<std::pair<int, int>>>(),
          "keys"_a,
          "values"_a,
          "starts"_a,
          "tokens"_a,
          "prefix_keys"_a = Arrays(),
          "prefix_values"_a = Arrays(),
          "rings"_a = std::vector<std::pair<int, int>>());
  layers.def(nb::init<const std::vector<machd::LlamaBlock>&>(), "blocks"_a)
      .def("__call__", &machd::LlamaLayers::operator(), "x"_a, "tables"_a, "columns"_a, "index"_a = nb::none(), "adapters"_a = std::vector<machd::LlamaAdapter>());
  nb::class_<machd::PanelWeights>(m, "PanelWeights").def(nb::init<const mlx::core::array&, const mlx::core::array&>(), "weights"_a, "bias"_a);
  nb::class_<machd::NormWeights>(m, "NormWeights")
      .def(nb::init<const mlx::core::array&, const mlx::core::array&, float>(), "weight"_a, "bias"_a, "eps"_a);
  nb::class_<machd::BertBlock>(m, "BertBlock")
      .def(
          nb::init<machd::PanelWeights, machd::PanelWeights, machd::NormWeights, machd::PanelWeights, machd::PanelWeights, machd::NormWeights>(),
          nb::kw_only(),
          "qkv"_a,
          "output"_a,
          "attention_norm"_a,
          "up"_a,
          "down"_a,
          "output_norm"_a);
  nb::class_<machd::BertLayers>(m, "BertLayers")
      .def(
          nb::init<machd::NormWeights, std::vector<machd::BertBlock>, int>(), "embedding_norm"_a, "blocks"_a, nb::kw_only(), "heads"_a)
      .def("__call__", &machd::BertLayers::operator(), "x"_a, "lengths"_a);
  m.def("text_means", &machd::text_means, "rows"_a, "lengths"_a);
  m.def("in_large_pages", &machd::in_large_pages, "array"_a);
  m.def("instruction_set", &machd::instruction_set);
  m.def("use_instruction_set", &machd::use_instruction_set, "name"_a);
  m.def("thread_count", &machd::thread_count);
  m.def("set_thread_count", &machd::set_thread_count, "count"_a);
}
