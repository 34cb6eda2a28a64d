"""A linear layer of the model that adds what the adapters of the pass's rows say.

It keeps its weights and gets a subclass of its own class. A pass without adapters is computed by the former class alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx

from machd.engine.adapters.layer_stack import LayerStack, bias_offset, length_ratio
from machd.engine.adapters.linear_layers import LinearPart
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.native_layers import is_native
from machd.engine.kernels.pass_adapters import AdapterKey, PassAdapters, current_adapters

LowRankArrays: TypeAlias = tuple[mx.array, mx.array, mx.array | None]
"""What an adapter adds to a layer: a [rank, inputs], b [outputs, rank] with its scale, and of DoRA a magnitude [outputs]."""


class LayerAdapters:
    """Adapters of one layer of the model, which computes them from now on."""

    def __init__(self, stacks: Sequence[LayerStack]) -> None:
        """Attach to a layer that has no adapters yet.

        Args:
            stacks: Of the layers that were merged into it, in order; one of a layer that was not.
        """
        self._stacks = stacks
        self._layer = stacks[0].part.layer
        self._low_ranks: dict[AdapterKey, Any] | None = {} if is_native(self._layer) else None
        assert not isinstance(self._layer, _Adapted), "one engine at a time adds adapters"
        self._layer.__class__ = _adapted(self._layer.__class__)
        self._layer.adapters = self

    @property
    def inputs(self) -> int:
        """Numbers of a row."""
        return self._stacks[0].part.shape.inputs

    @property
    def outputs(self) -> int:
        """Numbers that the layer makes of a row."""
        return self._stacks[-1].part.end

    @property
    def dtype(self) -> mx.Dtype:
        """What they are held in at least."""
        return self._stacks[0].a.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        natives: int = sum(one.nbytes for one in (self._low_ranks or {}).values())
        return natives + sum(one.nbytes for one in self._stacks if not one.is_empty)

    def add(self, key: AdapterKey, arrays: Sequence[LowRankArrays | None]) -> None:
        """Put adapters into memory.

        Args:
            key: Theirs; it is not in memory.
            arrays: For each of the merged layers, None where they leave it as it is.
        """
        own = [
            (stack, one) for stack, one in zip(self._stacks, arrays, strict=True) if one is not None
        ]
        if self._low_ranks is None:
            for stack, one in own:
                stack.add(key, *one)
        elif own:
            pieces = [_piece(stack.part, *one) for stack, one in own]
            self._low_ranks[key] = native_kernels().LowRank(pieces)

    def remove(self, key: AdapterKey) -> None:
        """Free the memory of adapters, if they change the layer."""
        if self._low_ranks is not None:
            self._low_ranks.pop(key, None)
            return
        for stack in self._stacks:
            stack.remove(key)

    def detach(self) -> None:
        """Give the layer its former class again."""
        del self._layer.adapters
        self._layer.__class__ = self._layer.former

    def low_rank(self, key: AdapterKey) -> Any | None:  # noqa: ANN401 - of a package that may be absent
        """Return ``LowRank`` of machd's own kernels; None where the adapters leave the layer as it is.

        Raises:
            LookupError: The kernels do not compute them.
        """
        if self._low_ranks is None:
            raise LookupError("mlx computes these adapters")
        return self._low_ranks.get(key)

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
        if self._low_ranks is not None:
            return _with_low_ranks(x, y, adapters, self._low_ranks)
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


class _Adapted:
    """Marks the classes of layers with adapters."""

    __slots__ = ()
    former: type[Layer]


def _piece(part: LinearPart, a: mx.array, b: mx.array, magnitude: mx.array | None) -> Any:  # noqa: ANN401 - of a package that may be absent
    """Return what an adapter makes of a layer's outputs, as machd's own kernels take it."""
    piece = native_kernels().LowRank.Piece
    if magnitude is None:
        return piece(part.begin, a, b)
    ratios, bias = length_ratio(part, a, b, magnitude), part.bias()
    offsets = None if bias is None else bias_offset(bias, ratios)
    return piece(part.begin, a, ratios[:, None] * b, ratios, offsets)


def _with_low_ranks(
    x: mx.array, y: mx.array, adapters: PassAdapters, low_ranks: Mapping[AdapterKey, object]
) -> mx.array:
    """Return the outputs of rows that machd's own kernels change, and those of others as they are."""
    chosen = tuple(key for key in adapters.distinct if key in low_ranks)
    if not chosen:
        return y
    changed: mx.array = native_kernels().add_low_rank(
        y.astype(mx.float32),
        x.astype(mx.float32),
        adapters.token_index(chosen, x.shape[1]),
        [low_ranks[key] for key in chosen],
    )
    return changed.astype(y.dtype)


@cache
def _adapted(former: Layer) -> type[Layer]:
    def call(self: Layer, x: mx.array) -> mx.array:
        y: mx.array = former.__call__(self, x)
        adapters = current_adapters()
        return y if adapters is None else self.adapters.changed(x, y, adapters)

    members = {
        "__call__": call,
        "former": former,
        "stands_for": getattr(former, "stands_for", former),
    }
    return type(f"Adapted{former.__name__}", (former, _Adapted), members)
