"""The arrays of a block: keys and values of its positions, and the state at its end.

On Metal every array is a buffer, and their number is limited. So the keys and values of all layers
that have one shape and dtype are stacked into one array; most models' blocks are one array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.layers.cache_state import CacheState, arrays_in, copied
from machd.engine.kv.layers.kinds import kind_of
from machd.engine.kv.row_caches import innermost


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one layer's keys or values, whatever their positions."""

    heads: int
    width: int
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The place in a block of each array that a model's caches hold.

    Attributes:
        caches: Shapes of each innermost cache's keys and values, in order; None for a cache that
            has a state instead.
    """

    caches: tuple[tuple[KvShape, ...] | None, ...]

    @property
    def stacks(self) -> Mapping[KvShape, int]:
        """Number of arrays in each stack, in the stacks' order."""
        return Counter(shape for shapes in self.caches for shape in shapes or ())

    @property
    def needs_state(self) -> bool:
        """Presence of caches that have a state."""
        return None in self.caches


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """A block in memory.

    Attributes:
        tokens: Positions.
        stacks: [arrays, heads, tokens, width] each, as the layout orders them.
        state: The state at the block's end, of each cache that has one; None if it is not known.
    """

    layout: BlockLayout
    tokens: int
    stacks: tuple[mx.array, ...]
    state: tuple[CacheState, ...] | None

    @property
    def arrays(self) -> list[mx.array]:
        """The stacks and the arrays of the state."""
        return [*self.stacks, *arrays_in(self.state)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def has_nan(self) -> mx.array:
        """Find out whether a number in it is NaN: a bool that is not evaluated yet."""
        floats = [one for one in self.arrays if one.size and mx.issubdtype(one.dtype, mx.floating)]
        return mx.any(mx.stack([mx.zeros(()), *(mx.any(mx.isnan(one)) for one in floats)]))

    def part(self, start: int, stop: int, *, has_state: bool = True) -> BlockArrays:
        """Copy positions, with the state if it is wanted and they end where the block does."""
        stacks = tuple(_joined([one[:, :, start:stop]], axis=2) for one in self.stacks)
        keeps_state = not self.layout.needs_state or (has_state and stop == self.tokens)
        return BlockArrays(self.layout, stop - start, stacks, self.state if keeps_state else None)


def copy_of_row(row: CachedRow, start: int, stop: int, *, has_state: bool) -> BlockArrays:
    """Copy positions of a row, with its state if it is wanted and the row is computed up to ``stop``.

    The copy is not evaluated; it should be before the row is computed any further.
    """
    assert 0 <= start < stop <= row.length, "what is copied is computed"
    caches = innermost(row.caches)
    columns: dict[KvShape, list[mx.array]] = {}
    layout: list[tuple[KvShape, ...] | None] = []
    for cache in caches:
        arrays = kind_of(cache).row_columns(
            cache, row.index, start
        )  # [1, heads, columns, width] each
        shapes = None
        if arrays is not None:
            shapes = tuple(KvShape(one.shape[1], one.shape[3], one.dtype) for one in arrays)
            for array, shape in zip(arrays, shapes, strict=True):
                columns.setdefault(shape, []).append(array[:, :, : stop - start])
        layout.append(shapes)
    others = [cache for cache, shapes in zip(caches, layout, strict=True) if shapes is None]
    state: tuple[CacheState, ...] | None = None
    if not others or (has_state and row.is_exact and row.length == stop):
        state = tuple(kind_of(cache).row_state(cache, row.index) for cache in others)
    stacks = tuple(_joined(parts, axis=0) for parts in columns.values())
    return BlockArrays(BlockLayout(tuple(layout)), stop - start, stacks, state)


def fill_caches(caches: Iterable[Cache], blocks: Sequence[BlockArrays], length: int) -> None:
    """Put ``length`` positions of blocks that follow one another from position 0 into a row's empty caches.

    If there are caches that have a state, the last block has it and ends there.
    """
    layout, last = blocks[0].layout, blocks[-1]
    assert all(block.layout == layout for block in blocks), "the blocks are one model's"
    held = sum(block.tokens for block in blocks)
    assert length <= held, "the blocks hold all positions"
    if layout.needs_state:
        assert last.state is not None, "the last block has state"
        assert length == held, "state is of the block's end"
    arrays = {
        shape: iter(
            mx.split(_put_together([block.stacks[number] for block in blocks], length), count)
        )
        for number, (shape, count) in enumerate(layout.stacks.items())
    }
    states = iter(last.state or ())
    for cache, shapes in zip(innermost(caches), layout.caches, strict=True):
        if shapes is None:
            cache.state = copied(next(states))
        else:
            filled = [next(arrays[shape]) for shape in shapes]
            kind_of(cache).fill_columns(cache, filled, length)


def _put_together(stacks: Sequence[mx.array], length: int) -> mx.array:
    """Join stacks of blocks, and cut them to ``length``: [arrays, heads, length, width]."""
    needed: list[mx.array] = []
    for stack in stacks:
        if length > 0:
            needed.append(stack[:, :, :length])
        length -= stack.shape[2]
    return mx.concatenate(needed, axis=2)


def _joined(parts: Sequence[mx.array], *, axis: int) -> mx.array:
    """Join arrays in memory of their own; of one array alone, concatenate gives the array itself."""
    empty = parts[0][:0] if axis == 0 else parts[0][:, :, :0]
    return mx.concatenate([empty, *parts], axis=axis)
