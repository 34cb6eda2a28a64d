"""Blocks to plain arrays that may leave the engine thread, and back.

What comes back is held against the model's own blocks: a file may be of another model, or anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from machd.engine.backend.untyped import LanguageModel
from machd.engine.kv.planes import KvFormat
from machd.engine.kv.row_planes import StandingRow, make_row_caches
from machd.engine.kv.state import CacheState, is_like, shape_of
from machd.engine.prefix_blocks.arrays import BlockArrays, BlockLayout, copy_of_row
from machd.engine.prefix_blocks.encoding import BlockContent, PlainArray

_DTYPES = {
    str(dtype).rpartition(".")[2]: dtype
    for dtype in (
        mx.bfloat16, mx.float16, mx.float32, mx.bool_,
        mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
    )
}  # fmt: skip

_ARRAY = "array"
_STATE = "state"
_BFLOAT16 = "bfloat16"

_TRACED_TOKENS = 8


def content_of(block: BlockArrays) -> BlockContent:
    """A block's content in numpy's own memory. Waits until it is computed."""
    arrays = {f"stack.{number}": stack for number, stack in enumerate(block.stacks)}
    structure = None if block.state is None else [_flattened(one, arrays) for one in block.state]
    notes = {_STATE: json.dumps(structure), _BFLOAT16: json.dumps(_bfloat16_names(arrays))}
    return BlockContent({name: _plain(array) for name, array in arrays.items()}, notes)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the blocks of a model look like, whatever their tokens.

    Attributes:
        state: Of each cache without positions, with shapes for arrays.
    """

    layout: BlockLayout
    stacks: tuple[tuple[int, int, int, mx.Dtype], ...]
    state: tuple[CacheState, ...]

    @classmethod
    def of_model(cls, model: LanguageModel, kv_format: KvFormat) -> BlockForm:
        """Find the form of a model's blocks from the shapes of its caches; no layer is evaluated."""
        caches = make_row_caches(model, kv_format)
        model(mx.zeros((1, _TRACED_TOKENS), dtype=mx.int32), cache=caches)
        row = StandingRow(caches, 0, _TRACED_TOKENS, is_exact=True)
        return cls.of(copy_of_row(row, 0, _TRACED_TOKENS, has_state=True))

    @classmethod
    def of(cls, block: BlockArrays) -> BlockForm:
        """That of a block with state."""
        assert block.state is not None, "state shows what others have to look like"
        stacks = tuple(
            (one.shape[0], one.shape[1], one.shape[3], one.dtype) for one in block.stacks
        )
        return cls(block.layout, stacks, tuple(shape_of(one) for one in block.state))

    def block_of(self, content: BlockContent, tokens: int) -> BlockArrays | None:
        """A block of so many tokens; None where the content is not of this form."""
        try:
            bfloat16 = frozenset(json.loads(content.notes[_BFLOAT16]))
            arrays = {
                name: _array(one, is_bfloat16=name in bfloat16)
                for name, one in content.arrays.items()
            }
            stacks = tuple(arrays[f"stack.{number}"] for number in range(len(self.stacks)))
            state = _state(json.loads(content.notes[_STATE]), arrays)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        block = BlockArrays(self.layout, tokens, stacks, state)
        return block if self._fits(block) else None

    def _fits(self, block: BlockArrays) -> bool:
        for stack, (planes, heads, width, dtype) in zip(block.stacks, self.stacks, strict=True):
            if stack.shape != (planes, heads, block.tokens, width) or stack.dtype != dtype:
                return False
        if block.state is None:
            return self.layout.needs_state
        return is_like(block.state, self.state)


def _flattened(state: CacheState, arrays: dict[str, mx.array]) -> object:
    """A state as JSON knows it; its arrays are added to ``arrays`` and named."""
    if isinstance(state, mx.array):
        name = f"state.{len(arrays)}"
        arrays[name] = state
        return {_ARRAY: name}
    if isinstance(state, tuple | list):
        return [_flattened(one, arrays) for one in state]
    return state


def _state(structure: object, arrays: Mapping[str, mx.array]) -> tuple[CacheState, ...] | None:
    if structure is None:
        return None
    if not isinstance(structure, list):
        raise TypeError("states come in a list")
    return tuple(_nested(one, arrays) for one in structure)


def _nested(structure: object, arrays: Mapping[str, mx.array]) -> CacheState:
    if isinstance(structure, dict):
        return arrays[structure[_ARRAY]]
    if isinstance(structure, list):
        return [_nested(one, arrays) for one in structure]
    assert structure is None or isinstance(structure, int | float | str), "JSON has no others"
    return structure


def _bfloat16_names(arrays: Mapping[str, mx.array]) -> list[str]:
    return [name for name, array in arrays.items() if array.dtype == mx.bfloat16]


def _plain(array: mx.array) -> PlainArray:
    # numpy has no bfloat16.
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits)


def _array(plain: PlainArray, *, is_bfloat16: bool) -> mx.array:
    array = mx.array(plain)
    return array.view(mx.bfloat16) if is_bfloat16 else array
