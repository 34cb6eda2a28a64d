"""Reading of a shard by offset: the same weights as mlx's slices of whole tensors, and fewer bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from machd.engine.backend.safetensors_header import read_safetensors_header
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.placing import shard_reader
from machd.engine.loading.placing.precision import Conversion
from machd.engine.loading.placing.shard_reader import (
    ShardReader,
    StoredArray,
    StoredSlice,
    read_slice,
)
from machd.engine.loading.placing.whole import hold_in, materialise
from machd.engine.protocol.progress import SilentProgress
from machd.errors import ModelFormatError

_DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)

Cut = Callable[[Module, Any], None]


@dataclass(frozen=True)
class _Rank:
    """The part of a group that mlx asks when it slices."""

    number: int
    ranks: int = 2

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


class _Model(Module):
    """One fused projection and one back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.qkv = Linear(64, 256, bias=True)
        self.out = Linear(128, 64, bias=True)
        self.norm = RMSNorm(64)


def _cut(model: Module, group: Any) -> None:
    shard_inplace(model.qkv, "all-to-sharded", segments=[0.5, 0.75], group=group)
    shard_inplace(model.out, "sharded-to-all", group=group)


def _cut_and_divide(model: Module, group: Any) -> None:
    shard_inplace(model.qkv, "all-to-sharded", group=group)
    model.qkv.weight /= 2
    model.qkv.bias = model.qkv.bias / 2


def _checkpoint(path: Path, model: Module) -> Checkpoint:
    file = path / "model.safetensors"
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(file), weights)
    header = read_safetensors_header(file)
    tensors = {name: (file, one) for name, one in header.tensors.items()}
    return Checkpoint(path, {}, (file,), header.tensor_bytes, tensors, ())


def _loaded(
    build: Callable[[], Module],
    checkpoint: Checkpoint,
    cut: Cut,
    rank: _Rank,
    dtype: mx.Dtype | None = None,
) -> tuple[dict[str, mx.array], ShardReader]:
    """Load a rank's shard as the loader does."""
    reader, model = ShardReader(checkpoint.tensors, checkpoint.stored_bytes), build()
    weights: Any = mx.load(str(checkpoint.weight_files[0]))
    with reader.recording(weights):
        pass
    model.load_weights(list(weights.items()))
    del weights
    reader.note_stored(model)
    hold_in(model, Conversion(dtype))
    reader.note_cast(model)
    with reader.recording_cut():
        cut(model, rank)
    materialise(model, Conversion(None), SilentProgress(), reader.reading(model))
    return dict(tree_flatten(model.parameters())), reader


def _sliced(
    build: Callable[[], Module],
    checkpoint: Checkpoint,
    cut: Cut,
    rank: _Rank,
    dtype: mx.Dtype | None = None,
) -> dict[str, mx.array]:
    """Slice whole tensors."""
    model = build()
    model.load_weights(str(checkpoint.weight_files[0]))
    hold_in(model, Conversion(dtype))
    cut(model, rank)
    return dict(tree_flatten(model.parameters()))


def _differences(found: dict[str, mx.array], expected: dict[str, mx.array]) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, one in expected.items()
        if found[name].dtype != one.dtype
        or found[name].shape != one.shape
        or not mx.array_equal(found[name], one).item()
    ]


def _quantised() -> Module:
    model = _Model()
    quantize(model, group_size=32, bits=4)
    return model


def _half() -> Module:
    model = _Model()
    model.set_dtype(mx.bfloat16)
    return model


@pytest.mark.parametrize("build", [_Model, _quantised, _half])
@pytest.mark.parametrize("dtype", [None, mx.float16])
@pytest.mark.parametrize("rank", [0, 1])
def test_shard_has_the_weights_of_slices(
    build: Callable[[], Module], dtype: mx.Dtype | None, rank: int, tmp_path: Path
) -> None:
    """Fused segments, weights with scales and biases, bfloat16 and casts."""
    checkpoint, place = _checkpoint(tmp_path, build()), _Rank(rank)
    found, reader = _loaded(build, checkpoint, _cut, place, dtype)

    assert _differences(found, _sliced(build, checkpoint, _cut, place, dtype)) == []
    assert reader.read_bytes > 0


def test_two_ranks_read_each_row_of_a_tensor_once(tmp_path: Path) -> None:
    """The bytes that both read by offset are those of the tensors that are cut along their rows."""
    checkpoint = _checkpoint(tmp_path, _Model())

    def cut(model: Module, group: Any) -> None:
        shard_inplace(model.qkv, "all-to-sharded", segments=[0.5, 0.75], group=group)

    read = [_loaded(_Model, checkpoint, cut, _Rank(one))[1].read_bytes for one in (0, 1)]
    tensors = [checkpoint.tensors[name][1].size_bytes for name in ("qkv.weight", "qkv.bias")]

    assert read == [sum(tensors) / 2] * 2


def test_wrong_range_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the comparison of these tests sees one range that begins an index late."""
    checkpoint, right = _checkpoint(tmp_path, _Model()), read_slice

    def wrong(part: StoredSlice) -> tuple[mx.array, int]:
        first, *rest = part.runs
        late = (first[0] + 1, first[1] + 1)
        return right(replace(part, runs=(late, *rest)))

    monkeypatch.setattr(shard_reader, "read_slice", wrong)
    found, _ = _loaded(_Model, checkpoint, _cut, _Rank(0))

    expected = _sliced(_Model, checkpoint, _cut, _Rank(0))
    assert _differences(found, expected) == ["qkv.weight", "qkv.bias", "out.weight"]


def test_computed_parameters_are_left_to_mlx(tmp_path: Path) -> None:
    """Also one that is changed in place after it was cut, whose array keeps its identity."""
    checkpoint = _checkpoint(tmp_path, _Model())
    found, reader = _loaded(_Model, checkpoint, _cut_and_divide, _Rank(1))

    assert _differences(found, _sliced(_Model, checkpoint, _cut_and_divide, _Rank(1))) == []
    assert reader.read_bytes == 0


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("runs", [((0, 4),), ((1, 3), (5, 8)), ((6, 8), (0, 1))])
@pytest.mark.parametrize("width", [8, 4096])
def test_slice_is_read_along_any_axis(
    dtype: mx.Dtype, axis: int, runs: tuple[tuple[int, int], ...], width: int, tmp_path: Path
) -> None:
    """In small pieces, which are read together, and in large ones."""
    shape = (8, 8, width) if axis < 2 else (8, width, 8)
    array = (mx.arange(math.prod(shape)) % 251).astype(dtype).reshape(shape)
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"a": array})
    offset = read_safetensors_header(file).tensors["a"].offset

    part, _ = read_slice(StoredSlice(StoredArray(file, offset, shape, dtype), axis, runs))

    indices = mx.array(np.concatenate([np.arange(*one) for one in runs]))
    assert part.dtype == dtype
    assert mx.array_equal(part, mx.take(array, indices, axis=axis)).item()


def test_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    """Nothing is made up for what is missing."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(64))

    with pytest.raises(ModelFormatError, match="shorter"):
        read_slice(StoredSlice(StoredArray(file, 0, (64, 2), mx.float32), 0, ((0, 64),)))
