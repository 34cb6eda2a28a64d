"""Tiny models with random adapters, and the same models with an adapter merged into their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_unflatten

from machd.engine.adapters.adapted_model import AdaptedModel
from machd.engine.adapters.linear_layers import linear_parts
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers, LowRank
from machd.engine.assembly import engine_parts
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.precision import Conversion, native_layers
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.progress import SilentProgress
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine.step.ports import Proposer
from machd.request.adapter import Adapter
from machd_probes.tiny import tiny_configuration, tiny_model

_GROUP = 32
_STRENGTH = 0.5
"""Of what an adapter adds, in parts of the size of a layer's own outputs or so."""


@dataclass(frozen=True)
class TinyBase:
    """A tiny model of mlx-lm's.

    Attributes:
        variant: Architecture.
        is_quantised: Its linear layers have 4 bits.
        is_native: machd's own kernels compute it where they are installed.
    """

    variant: str
    is_quantised: bool = False
    is_native: bool = True

    def loaded(self, *merged: tuple[Adapter, AdapterWeights]) -> LoadedModel:
        """Build it as the loader does, with adapters merged into its weights."""
        import_mlx_lm()
        model = tiny_model(tiny_configuration(self.variant))
        if self.is_quantised:
            quantize(model, _GROUP, 4, class_predicate=lambda _, one: type(one) is Linear)
        for adapter, weights in merged:
            merge(model, adapter, weights)
        layers = native_layers("auto") if self.is_native else None
        materialise(
            model,
            Conversion(mx.float32, native=layers) if layers else Conversion(mx.float32),
            SilentProgress(),
        )
        description = describe_model(
            model,
            model_id=f"tiny-{self.variant}",
            architecture=self.variant,
            context_tokens=1024,
            eos_token_ids=frozenset(),
        )
        return LoadedModel(model, FakeTokenizer(), description)


def adapted_engine(
    loaded: LoadedModel,
    adapters: Mapping[tuple[Adapter, ...], Sequence[AdapterWeights]] | None = None,
    *,
    looks_ahead: bool = False,
    proposer: Proposer | None = None,
) -> tuple[MlxEngine, AdaptedModel]:
    """Make an engine with adapters in memory."""
    parts = engine_parts(loaded, looks_ahead=looks_ahead, proposer=proposer)
    model = parts.row_adapters
    assert isinstance(model, AdaptedModel), "an engine of one process serves adapters"
    engine = MlxEngine(parts, max_rows=16)
    for key, weights in (adapters or {}).items():
        model.add(key, weights)
    return engine, model


def random_adapter(
    base: BaseLayers, rank: int, seed: int, *, scale: float, has_magnitudes: bool = False
) -> AdapterWeights:
    """Return random weights on all linear layers, the same every time."""
    random = np.random.default_rng((seed, rank))
    weights: dict[str, LowRank] = {}
    for path, layer in base.items():
        a = random.standard_normal((rank, layer.inputs)) / np.sqrt(layer.inputs)
        b = random.standard_normal((layer.outputs, rank)) * _STRENGTH / np.sqrt(rank) / scale
        magnitude = 1 + random.random(layer.outputs) if has_magnitudes else None
        weights[path] = LowRank(
            a.astype(np.float32),
            b.astype(np.float32),
            scale,
            None if magnitude is None else magnitude.astype(np.float32),
        )
    return weights


def merge(model: Module, adapter: Adapter, weights: AdapterWeights) -> None:
    """Add an adapter to the weights of a model whose layers are mlx's own; quantised ones become plain."""
    parts = linear_parts(model)
    layers: dict[str, Linear] = {}
    for path, one in weights.items():
        layer = parts[path].layer
        assert type(layer) in (Linear, QuantizedLinear), "not merged, and not machd's"
        weight = layer.weight
        if type(layer) is QuantizedLinear:
            weight = mx.dequantize(weight, layer.scales, layer.biases, layer.group_size, layer.bits)
        weight = weight + adapter.scale * one.scale * (mx.array(one.b) @ mx.array(one.a))
        if one.magnitude is not None:
            lengths = mx.sqrt((weight * weight).sum(axis=1))
            weight = weight * (mx.array(one.magnitude) / lengths)[:, None]
        plain = Linear(weight.shape[1], weight.shape[0], bias="bias" in layer)
        plain.weight = weight
        if "bias" in layer:
            plain.bias = layer.bias
        layers[path] = plain
    model.update_modules(tree_unflatten(list(layers.items())))
    mx.eval(model.parameters())


def adapter_named(name: str, scale: float = 1.0) -> Adapter:
    """Return an adapter as a request names it."""
    return Adapter(name.encode(), scale=scale, name=name)
