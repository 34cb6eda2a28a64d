"""Layers that are computed while the program still builds the graph of those behind them.

MLX computes nothing until it is asked. On the CPU a step was built whole, 3 ms of 40 for one row of 30 layers and 5 of 80 for
16, and computed then; now each layer is handed over as soon as it is built. Results are the same: no operation
changes. A GPU has the step before to compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import LanguageModel, Layer


def start_layers(model: LanguageModel) -> None:
    """Have each of a model's layers begun when it is called; for a model that computes on the CPU.

    A layer keeps its weights and gets a subclass of its own class. A model without a list of layers stays as it is, and so
    does one whose layers are started already: a check makes many engines of one model.
    """
    layers: Sequence[Layer] = getattr(model, "layers", ())
    # By identity: some models call one layer twice.
    for layer in {id(layer): layer for layer in layers}.values():
        if not isinstance(layer, _Started):
            layer.__class__ = _started(type(layer))


def class_of(layer: Layer) -> type[Layer]:
    """Return a layer's own class, whether it is started or not."""
    own: type[Layer] = layer.former if isinstance(layer, _Started) else type(layer)
    return own


class _Started:
    """Marks the classes of layers that are started."""

    __slots__ = ()
    former: type[Layer]


def _started(former: type[Layer]) -> type[Layer]:
    def call(self: Layer, *args: object, **named: object) -> object:
        hidden: object = former.__call__(self, *args, **named)
        mx.async_eval(hidden)
        return hidden

    return type(
        f"Started{former.__name__}", (former, _Started), {"__call__": call, "former": former}
    )
