"""Adapters of the rows of the pass that is being built.

The step names them around building a pass; adapted layers look them up when they are called, and layers that are computed in one
operation leave such a pass to them. Outside of such a context every layer computes the base model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from machd.request.adapter import Adapter

AdapterKey: TypeAlias = tuple[Adapter, ...]
"""A row's adapters, computed as one; empty for the base model."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPass:
    """Adapters of a pass as the operation of all layers takes them.

    Attributes:
        index: int32 [rows], 0 for the base model, or the number of an adapter + 1.
        adapters: ``LlamaAdapter`` of machd's own kernels, by number.
    """

    index: mx.array
    adapters: Sequence[object]


class PassAdapters:
    """Adapters of the rows of one pass.

    Attributes:
        keys: Of each row; of a packed pass of each token.
        distinct: Each key once, without the empty one.
        adapted_rows: uint32, places of the rows with adapters; None if all rows have some.
        in_one: For the operation of all layers; None where the layers compute the adapters one by one.
    """

    def __init__(
        self, keys: Sequence[AdapterKey], in_one: Mapping[AdapterKey, object] | None = None
    ) -> None:
        """Take the adapters of each row, at least one of which has some, and those that the operation of all layers takes."""
        self.keys = keys
        self.distinct = tuple(dict.fromkeys(key for key in keys if key))
        numbers = {key: number for number, key in enumerate(self.distinct)}
        adapted = [place for place, key in enumerate(keys) if key]
        self.adapted_rows: mx.array | None = None
        if len(adapted) < len(keys):
            self.adapted_rows = mx.array(adapted, dtype=mx.uint32)
        self._numbers = [numbers[keys[place]] for place in adapted]
        self._indices: dict[tuple[int, ...], mx.array] = {}
        self._first: dict[int, PassAdapters | None] = {}
        self._token_indices: dict[tuple[tuple[AdapterKey, ...], int], mx.array] = {}
        self.in_one: AdapterPass | None = None
        if in_one is not None and all(key in in_one for key in self.distinct):
            own = [in_one[key] for key in self.distinct]
            self.in_one = AdapterPass(self.token_index(self.distinct, 1), own)

    def index(self, places: tuple[int, ...]) -> mx.array:
        """Return the place of each row with adapters in a layer's stack, uint32.

        Args:
            places: Of each of :attr:`distinct`. Most layers have the same, and so one array.
        """
        index = self._indices.get(places)
        if index is None:
            index = mx.array([places[number] for number in self._numbers], dtype=mx.uint32)
            self._indices[places] = index
        return index

    def token_index(self, chosen: tuple[AdapterKey, ...], tokens: int) -> mx.array:
        """Return int32 [rows * tokens]: 0 for the base model and for adapters that are not chosen, or the number of a chosen one + 1.

        Args:
            chosen: Some of :attr:`distinct`.
            tokens: Of each row.
        """
        index = self._token_indices.get((chosen, tokens))
        if index is None:
            numbers = {key: number for number, key in enumerate(chosen, 1)}
            rows = [numbers.get(key, 0) for key in self.keys]
            index = mx.array([row for row in rows for _ in range(tokens)], dtype=mx.int32)
            self._token_indices[chosen, tokens] = index
        return index

    def first(self, rows: int) -> PassAdapters | None:
        """Return the adapters of the first rows alone, as the head of a packed pass computes them; None if they have none."""
        if rows == len(self.keys):
            return self
        assert rows < len(self.keys), "a layer has no more rows than its pass"
        if rows not in self._first:
            keys = self.keys[:rows]
            self._first[rows] = PassAdapters(keys) if any(keys) else None
        return self._first[rows]


_CURRENT: ContextVar[PassAdapters | None] = ContextVar("pass_adapters", default=None)


def current_adapters() -> PassAdapters | None:
    """Return the adapters of the pass that is being built on this thread; None for the base model."""
    return _CURRENT.get()


@contextmanager
def using_adapters(adapters: PassAdapters) -> Iterator[None]:
    """Have the passes that are built within the context computed with adapters."""
    token = _CURRENT.set(adapters)
    try:
        yield
    finally:
        _CURRENT.reset(token)
