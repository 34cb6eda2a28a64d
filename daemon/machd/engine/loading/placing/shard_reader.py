"""Reading of a rank's shard: of each tensor the bytes that this rank keeps, and no others.

mlx reads a tensor whole before it slices it. This reader records which slices mlx's ``_shard`` takes of which
stored tensor, and reads those by offset. A parameter that is computed in any other way is left to mlx.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from machd.engine.backend.model_files import open_regular
from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.opened import ReadLeaf
from machd.errors import ModelFormatError

_MIN_PIECE_BYTES = 4096
"""Smaller pieces are read together with the bytes between them: a disk reads whole pages anyway."""

_SPAN_BYTES = 8 << 20
"""Rows that are read at once where the pieces of a row are small."""

_UNCHANGED = frozenset({"Load", "AsType", "Slice", "Split", "Concatenate", "Contiguous", "Copy"})
"""Operations of mlx between a stored tensor and a shard of it, which may be read by offset."""

_OPERATION = re.compile(r'label ?= ?"(\w+)", shape ?= ?rectangle')


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor as a file holds it."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """The part of a stored tensor that a rank keeps: ranges along the axis that is cut, in their order."""

    stored: StoredArray
    axis: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _CutArray:
    """An array that ``_shard`` made, with its place in a file; kept so that its ``id`` is not reused."""

    array: mx.array
    slice: StoredSlice


class ShardReader(TensorOrigins):
    """Records how a model is cut, and reads this rank's shard."""

    def __init__(self, tensors: Mapping[str, tuple[Path, StoredTensor]], stored_bytes: int) -> None:
        # With a name in two files it is mlx-lm that chooses one, so nothing is read by offset.
        if sum(tensor.size_bytes for _, tensor in tensors.values()) != stored_bytes:
            tensors = {}
        super().__init__(tensors)
        self.read_bytes = 0
        self._stored: dict[str, StoredArray] = {}
        self._sources: dict[int, tuple[mx.array, StoredArray]] = {}
        self._cut: dict[int, _CutArray] = {}

    def note_stored(self, model: Module) -> None:
        """Note which parameters are stored tensors, before their dtypes are changed."""
        self._stored = {}
        for path, array in _arrays(model):
            found = self._tensor(id(array))
            if found is not None and found[1].size_bytes == array.nbytes:
                self._stored[path] = _stored_array(found, array)

    def note_cast(self, model: Module) -> None:
        """Note the arrays that stored tensors have become, before the model is cut."""
        self._cut.clear()
        self._sources = {}
        for path, array in _arrays(model):
            stored = self._stored.get(path)
            if stored is not None and _may_be_cast(array, stored):
                self._sources[id(array)] = (array, stored)
        self.release()

    @contextmanager
    def recording_cut(self) -> Iterator[None]:
        """Record the slices that mlx takes of parameters."""
        shard = distributed._shard  # noqa: SLF001 - mlx has no other place that every slice passes

        def recorded(  # type: ignore[no-untyped-def]  # noqa: ANN202
            parameters: dict[str, object],
            predicate: Callable[..., object],
            group: Any = None,  # noqa: ANN401 - mlx's group
        ):
            taken: dict[str, tuple[mx.array, Any]] = {}

            def noted(path: str, weight: mx.array) -> object:
                chosen = predicate(path, weight)
                taken[path] = (weight, chosen)
                return chosen

            result = shard(parameters, noted, group)
            flat: Any = tree_flatten(result)
            for path, array in flat:
                if path not in taken:
                    continue
                weight, chosen = taken[path]
                source = self._sources.get(id(weight))
                if source is None or chosen is None:
                    continue
                axis, segments = chosen if isinstance(chosen, tuple) else (chosen, 1)
                axis %= weight.ndim
                # mlx itself cuts the indices, so that its arithmetic of segments is not repeated here.
                indices = shard(
                    {"indices": mx.arange(weight.shape[axis])}, lambda *_, s=segments: (0, s), group
                )["indices"]
                part = StoredSlice(source[1], axis, runs(np.array(indices)))
                self._cut[id(array)] = _CutArray(array, part)
            return result

        distributed._shard = recorded  # type: ignore[assignment]  # noqa: SLF001
        try:
            yield
        finally:
            distributed._shard = shard  # noqa: SLF001

    def reading(self, model: Module) -> ReadLeaf:
        """Return a reader of a cut model's leaves: by offset where possible, and through mlx otherwise.

        Raises:
            ModelFormatError: Raised by the reader: a file is shorter than it was.
        """
        self._sources.clear()
        used = {id(array) for _, array in _arrays(model)}
        self._cut = {key: one for key, one in self._cut.items() if key in used}
        return self._read_leaf

    def _read_leaf(self, _path: str, leaf: Module) -> int:
        size_bytes = 0
        for name, array in _arrays(leaf):
            size_bytes += array.nbytes
            found = self._cut.pop(id(array), None)
            if found is None or not _is_unchanged(array):
                continue
            loaded = self._read(found.slice).astype(array.dtype)
            if loaded.shape == array.shape:
                mx.eval(loaded)
                leaf.update(tree_unflatten([(name, loaded)]))
        return size_bytes

    def _read(self, part: StoredSlice) -> mx.array:
        array, read_bytes = read_slice(part)
        self.read_bytes += read_bytes
        return array


def runs(indices: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Join indices to ranges.

    >>> runs(np.array([0, 1, 4, 5, 6]))
    ((0, 2), (4, 7))
    """
    parts = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if len(part))


def read_slice(part: StoredSlice) -> tuple[mx.array, int]:
    """Read a part of a stored tensor; returns it in its stored dtype, and the bytes that were read.

    Raises:
        ModelFormatError: The file is shorter than it was.
    """
    stored, axis = part.stored, part.axis
    width = np.dtype(f"u{stored.dtype.size}")
    unit = math.prod(stored.shape[axis + 1 :]) * width.itemsize  # bytes of one index of the axis
    rows, row_bytes = math.prod(stored.shape[:axis]), stored.shape[axis] * unit
    kept = sum(end - begin for begin, end in part.runs)
    buffer = np.empty((rows, kept * unit), dtype=np.uint8)
    read_bytes = 0
    with open_regular(stored.file) as file:
        descriptor = file.fileno()
        smallest = min((end - begin for begin, end in part.runs), default=0) * unit
        together = 1 if rows == 1 or smallest >= _MIN_PIECE_BYTES else _SPAN_BYTES // row_bytes + 1
        for row in range(0, rows, together):
            count, offset = min(together, rows - row), stored.offset + row * row_bytes
            span = None
            if together > 1:
                span = np.empty((count, row_bytes), dtype=np.uint8)
                read_bytes += _fill(descriptor, span, offset, stored.file)
            column = 0
            for begin, end in part.runs:
                target = buffer[row : row + count, column : column + (end - begin) * unit]
                if span is None:
                    read_bytes += _fill(descriptor, target[0], offset + begin * unit, stored.file)
                else:
                    target[:] = span[:, begin * unit : end * unit]
                column += (end - begin) * unit
    shape = (*stored.shape[:axis], kept, *stored.shape[axis + 1 :])
    return mx.array(buffer.view(width).reshape(shape)).view(stored.dtype), read_bytes


def _fill(descriptor: int, into: np.ndarray[Any, Any], offset: int, file: Path) -> int:
    view = into.reshape(-1).data
    done_bytes = 0
    while done_bytes < len(view):
        count = os.preadv(descriptor, [view[done_bytes:]], offset + done_bytes)
        if count == 0:
            raise ModelFormatError(f"{file.name} is shorter than it was; fetch or copy it again")
        done_bytes += count
    return done_bytes


def _stored_array(found: tuple[Path, StoredTensor], array: mx.array) -> StoredArray:
    return StoredArray(found[0], found[1].offset, tuple(array.shape), array.dtype)


def _may_be_cast(array: mx.array, stored: StoredArray) -> bool:
    """Tell whether an array has the shape of a stored one, and its dtype or another floating one."""
    is_cast = mx.issubdtype(array.dtype, mx.floating) and mx.issubdtype(stored.dtype, mx.floating)
    return tuple(array.shape) == stored.shape and (array.dtype == stored.dtype or is_cast)


def _is_unchanged(array: mx.array) -> bool:
    """Tell whether a lazy array is a part of one stored tensor, by mlx's graph.

    ``array += 1`` changes an array's value and keeps its identity, so only the graph tells.
    """
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    operations = _OPERATION.findall(graph.getvalue())
    return operations.count("Load") == 1 and set(operations) <= _UNCHANGED


def _arrays(module: Module) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(module.parameters())
    return [(path, array) for path, array in flat]
