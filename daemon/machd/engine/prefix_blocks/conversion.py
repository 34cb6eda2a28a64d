"""Conversion of blocks to numpy arrays, which may leave the engine thread, and back.

A file may be another model's, or anything; so what comes back has to have the form of the model's
own blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from machd.engine.backend.untyped import LanguageModel
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.layers.cache_state import CacheState, is_like, shape_of
from machd.engine.kv.row_caches import make_row_caches
from machd.engine.prefix_blocks.arrays import BlockArrays, BlockLayout, copy_of_row
from machd.engine.prefix_blocks.encoding import BlockContent

_ARRAY = "array"
_STATE = "state"
_BFLOAT16 = "bfloat16"

_TRACED_TOKENS = 8


def content_of(block: BlockArrays) -> BlockContent:
    """Copy a block into numpy's own memory, once it is computed."""
    arrays = {f"stack.{number}": stack for number, stack in enumerate(block.stacks)}
    structure = None if block.state is None else [_named(one, arrays) for one in block.state]
    bfloat16 = [name for name, array in arrays.items() if array.dtype == mx.bfloat16]
    notes = {_STATE: json.dumps(structure), _BFLOAT16: json.dumps(bfloat16)}
    plain = {
        # numpy has no bfloat16.
        name: np.array(array.view(mx.uint16) if name in bfloat16 else array)
        for name, array in arrays.items()
    }
    return BlockContent(plain, notes)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The form of a model's blocks, whatever their tokens; a state has shapes for arrays."""

    layout: BlockLayout
    state: tuple[CacheState, ...]

    @classmethod
    def of_model(cls, model: LanguageModel, kv_format: KvFormat) -> BlockForm:
        """Find the form from the shapes of a model's caches; no layer is evaluated."""
        caches = make_row_caches(model, kv_format)
        model(mx.zeros((1, _TRACED_TOKENS), dtype=mx.int32), cache=caches)
        row = CachedRow(caches, 0, _TRACED_TOKENS, is_exact=True)
        return cls.of(copy_of_row(row, 0, _TRACED_TOKENS, has_state=True))

    @classmethod
    def of(cls, block: BlockArrays) -> BlockForm:
        """Find the form from a block with state."""
        assert block.state is not None, "state shows what others have to look like"
        return cls(block.layout, tuple(shape_of(one) for one in block.state))

    def block_of(self, content: BlockContent, tokens: int) -> BlockArrays | None:
        """Make a block of ``tokens`` positions; None if the content is not of this form."""
        try:
            bfloat16 = frozenset(json.loads(content.notes[_BFLOAT16]))
            arrays = {name: mx.array(plain) for name, plain in content.arrays.items()}
            arrays |= {name: arrays[name].view(mx.bfloat16) for name in bfloat16 & arrays.keys()}
            stacks = tuple(arrays[f"stack.{number}"] for number in range(len(self.layout.stacks)))
            state = _states(json.loads(content.notes[_STATE]), arrays)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        block = BlockArrays(self.layout, tokens, stacks, state)
        return block if self._fits(block) else None

    def _fits(self, block: BlockArrays) -> bool:
        for stack, (shape, count) in zip(block.stacks, self.layout.stacks.items(), strict=True):
            expected = (count, shape.heads, block.tokens, shape.width)
            if stack.shape != expected or stack.dtype != shape.dtype:
                return False
        return self.layout.needs_state if block.state is None else is_like(block.state, self.state)


def _named(state: CacheState, arrays: dict[str, mx.array]) -> object:
    """Convert a state to JSON's types; its arrays are added to ``arrays`` and named."""
    if isinstance(state, mx.array):
        name = f"state.{len(arrays)}"
        arrays[name] = state
        return {_ARRAY: name}
    if isinstance(state, tuple | list):
        return [_named(one, arrays) for one in state]
    return state


def _states(structure: object, arrays: Mapping[str, mx.array]) -> tuple[CacheState, ...] | None:
    if structure is None:
        return None
    if not isinstance(structure, list):
        raise TypeError("states come in a list")
    return tuple(_state(one, arrays) for one in structure)


def _state(structure: object, arrays: Mapping[str, mx.array]) -> CacheState:
    """Convert what :func:`_named` made of a state back."""
    if isinstance(structure, dict):
        return arrays[structure[_ARRAY]]
    if isinstance(structure, list):
        return [_state(one, arrays) for one in structure]
    assert structure is None or isinstance(structure, int | float | str), "JSON has no others"
    return structure
