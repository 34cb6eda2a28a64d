"""Linear layers of a model by their paths in mlx-lm's module, whether machd has merged some of them or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from machd.engine.adapters.low_rank import BaseLayer, BaseLayers
from machd.engine.backend.untyped import LanguageModel, Layer
from machd.engine.kernels.fused_llama import merged_parts
from machd.engine.kernels.packed_weights import unpacked

_HEADS = {
    "q_proj": ("heads", "n_heads", "num_heads"),
    "k_proj": ("kv_heads", "n_kv_heads", "num_key_value_heads"),
}
"""What the attention of mlx-lm's architectures, and machd's own, call the heads of a projection."""

_EXPERTS = "experts"
"""Name of the part with a layer for each expert, in architectures that have no one layer of all."""

_NOT_CALLED = ("self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj")
"""Layers of mlx-lm's kimi_k3, which multiplies with their weights itself: what an adapter adds would be left out in silence."""


class LinearPart(NamedTuple):
    """A linear layer as it is computed now.

    Attributes:
        layer: The layer of the model that computes it.
        begin: Its first output among those of the layer, which may be several merged ones.
        shape: Its own outputs and inputs.
    """

    layer: Layer
    begin: int
    shape: BaseLayer

    @property
    def end(self) -> int:
        """The output behind its last one."""
        return self.begin + self.shape.outputs

    def dense(self, outputs: Sequence[int] | None = None) -> mx.array:
        """Return its weights, float32 [outputs, inputs]; of all its outputs unless given."""
        rows = mx.arange(self.begin, self.end)
        if outputs is not None:
            rows = rows[mx.array(list(outputs))]
        if "scales" in self.layer:
            return unpacked(self.layer, rows)
        weights: mx.array = self.layer.weight[rows]
        return weights.astype(mx.float32)

    def bias(self) -> mx.array | None:
        """Return its bias, [outputs]; None without."""
        return self.layer.bias[self.begin : self.end] if "bias" in self.layer else None


def base_layers(model: LanguageModel, under: str = "") -> BaseLayers:
    """Return the linear layers that adapters may change; see :func:`linear_parts`."""
    return {path: part.shape for path, part in linear_parts(model, under).items()}


def linear_parts(model: LanguageModel, under: str = "") -> dict[str, LinearPart]:
    """Return the plain and quantised linear layers of a model by path, those that machd has merged one by one.

    Layers of experts are not among them: their rows are those tokens that have chosen an expert. Embeddings are no linear layers.
    Of a layer that a model has in two places the first path alone is known.

    Args:
        model: It is not changed.
        under: Beginning of the paths that count: the language model's, of a model with vision.
    """
    modules = dict(model.named_modules())
    parts: dict[str, LinearPart] = {}
    seen: set[int] = set()
    for path, layer in modules.items():
        if not path.startswith(under) or not _is_linear(layer) or id(layer) in seen:
            continue
        if _EXPERTS in path.split(".") or path.endswith(_NOT_CALLED):
            continue
        seen.add(id(layer))
        parent, _, name = path.rpartition(".")
        merged = merged_parts(modules.get(parent)).get(name)
        begin = 0
        for part_name, outputs in merged or [(name, int(layer.weight.shape[0]))]:
            part_path = f"{parent}.{part_name}" if parent else part_name
            heads = _heads(modules.get(parent), part_name)
            parts[part_path] = LinearPart(
                layer, begin, BaseLayer(outputs, _inputs(layer), heads=heads)
            )
            begin += outputs
        assert begin == layer.weight.shape[0], "its parts are the whole layer"
    return parts


def _heads(attention: Layer, name: str) -> int:
    """Read the number of heads that a projection makes; 0 where the model does not tell."""
    counts = (getattr(attention, one, 0) for one in _HEADS.get(name, ()))
    return next((one for one in counts if isinstance(one, int) and one > 0), 0)


def _is_linear(layer: Layer) -> bool:
    """Return True for a layer that is called as mlx's own; some architectures have subclasses that return several arrays."""
    kind = getattr(layer, "stands_for", type(layer))
    return kind in (Linear, QuantizedLinear) and layer.weight.ndim == 2


def _inputs(layer: Layer) -> int:
    words = int(layer.weight.shape[1])
    return words * 32 // layer.bits if "scales" in layer else words
