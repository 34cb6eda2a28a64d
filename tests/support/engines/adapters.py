"""Tiny models, and engines of them with adapters in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from machd.engine.adapters.adapted_model import AdaptedModel
from machd.engine.adapters.low_rank import AdapterWeights
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
from machd_probes.merged_adapters import merge
from machd_probes.tiny import tiny_configuration, tiny_model

_GROUP = 32


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
            merge(model, weights, adapter.scale)
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


def adapter_named(name: str, scale: float = 1.0) -> Adapter:
    """Return an adapter as a request names it."""
    return Adapter(name.encode(), scale=scale, name=name)
