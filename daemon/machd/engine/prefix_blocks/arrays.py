"""The arrays of a block: its own, and as few as possible.

On Metal every array is a buffer, and their number is limited. So the planes of all layers that are
of one shape and dtype lie in one array, one behind the other: of a usual model a block is one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.row_planes import StandingRow, fill_planes, innermost, planes_of
from machd.engine.kv.state import CacheState, arrays_in, copied, row_state


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """What planes that share an array have in common."""

    heads: int
    width: int
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a block keeps what a model's caches hold.

    Attributes:
        planes: Of each innermost cache, its planes in order; None of one without positions.
    """

    planes: tuple[tuple[PlaneShape, ...] | None, ...]

    @property
    def stacks(self) -> tuple[PlaneShape, ...]:
        """What the arrays are made of, in the order in which it first occurs."""
        return tuple(dict.fromkeys(one for planes in self.planes for one in planes or ()))

    @property
    def needs_state(self) -> bool:
        """Whether there are caches without positions."""
        return None in self.planes


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """What a block holds.

    Attributes:
        tokens: Positions.
        stacks: [planes, heads, tokens, n] each, as the layout orders them.
        state: At its end, of each cache without positions; None where it is not known.
    """

    layout: BlockLayout
    tokens: int
    stacks: tuple[mx.array, ...]
    state: tuple[CacheState, ...] | None

    @property
    def arrays(self) -> list[mx.array]:
        """All there are."""
        return [*self.stacks, *arrays_in(self.state)]

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(array.nbytes for array in self.arrays)

    def has_nan(self) -> mx.array:
        """Find out whether a number in it is NaN: a bool that is not evaluated yet."""
        floats = [one for one in self.arrays if one.size and mx.issubdtype(one.dtype, mx.floating)]
        return mx.any(mx.stack([mx.zeros(()), *(mx.any(mx.isnan(one)) for one in floats)]))

    def part(self, start: int, stop: int, *, has_state: bool = True) -> BlockArrays:
        """Copy positions, with the state where they end with the block's and it is wanted."""
        stacks = tuple(_joined([one[:, :, start:stop]], axis=2) for one in self.stacks)
        keeps_state = not self.layout.needs_state or (has_state and stop == self.tokens)
        return BlockArrays(self.layout, stop - start, stacks, self.state if keeps_state else None)


def copy_of_row(row: StandingRow, start: int, stop: int, *, has_state: bool) -> BlockArrays:
    """Positions of a row, and its state if it is wanted and the row stands at ``stop``.

    Nothing is computed yet; before the row is computed any further, it should be.
    """
    assert 0 <= start < stop <= row.length, "what is copied is computed"
    caches = innermost(row.caches)
    columns: dict[PlaneShape, list[mx.array]] = {}
    layout: list[tuple[PlaneShape, ...] | None] = []
    for cache in caches:
        planes = planes_of(cache)
        shapes = None if planes is None else tuple(_shape(plane) for plane in planes)
        for plane, shape in zip(planes or (), shapes or (), strict=True):
            one = plane[row.index : row.index + 1, :, start:stop]
            columns.setdefault(shape, []).append(one)
        layout.append(shapes)
    others = [cache for cache, planes in zip(caches, layout, strict=True) if planes is None]
    state: tuple[CacheState, ...] | None = None
    if not others or (has_state and row.is_exact and row.length == stop):
        state = tuple(row_state(cache, row.index) for cache in others)
    stacks = tuple(_joined(planes, axis=0) for planes in columns.values())
    return BlockArrays(BlockLayout(tuple(layout)), stop - start, stacks, state)


def fill_caches(caches: Iterable[Cache], blocks: Sequence[BlockArrays], length: int) -> None:
    """Put what blocks hold into a row's empty caches.

    Args:
        caches: As the model makes them.
        blocks: Following one another from position 0, with ``length`` positions or more. If there
            are caches without positions, the last one has state and ends there.
        length: Positions that the row has then.
    """
    layout, last = blocks[0].layout, blocks[-1]
    assert all(block.layout == layout for block in blocks), "the blocks are one model's"
    held = sum(block.tokens for block in blocks)
    assert length <= held, "the blocks hold all positions"
    if layout.needs_state:
        assert last.state is not None, "the last block has state"
        assert length == held, "state is of the block's end"
    stacks = {
        shape: _put_together([block.stacks[number] for block in blocks], length)
        for number, shape in enumerate(layout.stacks)
    }
    places = dict.fromkeys(layout.stacks, 0)
    states = iter(last.state or ())
    for cache, shapes in zip(innermost(caches), layout.planes, strict=True):
        if shapes is None:
            cache.state = copied(next(states))
            continue
        planes = []
        for shape in shapes:
            planes.append(stacks[shape][places[shape] : places[shape] + 1])
            places[shape] += 1
        fill_planes(cache, planes, length)


def _put_together(stacks: Sequence[mx.array], length: int) -> mx.array:
    """Stacks one behind the other, the first ``length`` positions: [planes, heads, length, n]."""
    needed: list[mx.array] = []
    for stack in stacks:
        if length > 0:
            needed.append(stack[:, :, :length])
        length -= stack.shape[2]
    return mx.concatenate(needed, axis=2)


def _joined(parts: Sequence[mx.array], *, axis: int) -> mx.array:
    """Arrays in one of its own; of one array alone, concatenate gives the array itself."""
    empty = parts[0][:0] if axis == 0 else parts[0][:, :, :0]
    return mx.concatenate([empty, *parts], axis=axis)


def _shape(plane: mx.array) -> PlaneShape:
    return PlaneShape(plane.shape[1], plane.shape[3], plane.dtype)
