"""A linear layer of the model that adds what the adapters of the pass's rows say.

It keeps its weights and gets a subclass of its own class. A pass without adapters is computed by the former class alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from machd.engine.adapters.layer_stack import LayerStack
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.pass_adapters import PassAdapters, current_adapters


def attach(layer: Layer, stacks: Sequence[LayerStack]) -> None:
    """Have a layer compute its rows' adapters.

    Args:
        layer: It has none yet.
        stacks: Adapters of the layers that were merged into it, in order; one of a layer that was not.
    """
    assert not isinstance(layer, _Adapted), "one engine at a time adds adapters to a model"
    layer.__class__ = _adapted(layer.__class__)
    layer.adapter_stacks = _LayerAdapters(stacks)


def detach(layer: Layer) -> None:
    """Give a layer its former class again."""
    del layer.adapter_stacks
    layer.__class__ = layer.former


class _Adapted:
    """Marks the classes of layers with adapters."""

    __slots__ = ()
    former: type[Layer]


class _LayerAdapters:
    """Adapters of one layer of the model. No list, which mlx would take for layers within the layer."""

    def __init__(self, stacks: Sequence[LayerStack]) -> None:
        self._stacks = stacks

    def changed(self, x: mx.array, y: mx.array, adapters: PassAdapters) -> mx.array:
        """Return a layer's outputs, those of rows with adapters changed by them.

        Args:
            x: [rows, .., inputs], or [rows * tokens, inputs].
            y: What the base layer made of it.
            adapters: Of the rows; of a packed pass, whose head computes the first rows alone, of all tokens.
        """
        rows = len(adapters.keys)
        if x.ndim > 2:
            own = adapters.first(x.shape[0])
            if own is None:
                return y
            adapters, rows = own, x.shape[0]
        assert x.shape[0] % rows == 0, "a layer is called with the rows of its pass"
        changed = self._of_rows(
            x.reshape(rows, -1, x.shape[-1]), y.reshape(rows, -1, y.shape[-1]), adapters
        )
        return changed.reshape(y.shape)

    def _of_rows(self, x: mx.array, y: mx.array, adapters: PassAdapters) -> mx.array:
        """Return the outputs [rows, tokens, outputs] of [rows, tokens, inputs]; rows of the base model are not touched."""
        rows = adapters.adapted_rows
        if rows is not None:
            x = x[rows]
        own = y if rows is None else y[rows]
        parts = [own[..., one.part.begin : one.part.end] for one in self._stacks]
        for number, stack in enumerate(self._stacks):
            if not stack.is_empty:
                places = tuple(map(stack.place, adapters.distinct))
                parts[number] = stack.changed(x, parts[number], adapters.index(places))
        own = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        if rows is None:
            return own
        y[rows] = own
        return y


@cache
def _adapted(former: Layer) -> type[Layer]:
    def call(self: Layer, x: mx.array) -> mx.array:
        y: mx.array = former.__call__(self, x)
        adapters = current_adapters()
        return y if adapters is None else self.adapter_stacks.changed(x, y, adapters)

    members = {
        "__call__": call,
        "former": former,
        "stands_for": getattr(former, "stands_for", former),
    }
    return type(f"Adapted{former.__name__}", (former, _Adapted), members)
