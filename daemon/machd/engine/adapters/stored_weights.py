"""Weights of an adapter's layer, from the bytes of its file to float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from machd.engine.adapters.low_rank import BaseLayer, LowRank
from machd.engine.adapters.stored_adapter import StoredArray, StoredLayer
from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.gguf.families.transformer import in_halves
from machd.errors import AdapterError

_Floats = NDArray[np.float32]


def low_rank(layer: StoredLayer, of_base: BaseLayer, content: memoryview) -> LowRank:
    """Read the weights of one layer.

    Args:
        layer: Checked against the base model's layer.
        of_base: That layer.
        content: Of the file.

    Raises:
        AdapterError: A weight is no finite number.
    """
    a, b = _matrices(layer.a, content), _matrices(layer.b, content)
    if layer.is_transposed:
        a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    if layer.has_paired_rows:
        b = np.ascontiguousarray(in_halves(b, of_base.heads))
    magnitude = None if layer.magnitude is None else _floats(layer.magnitude, content)
    return LowRank(a, b, layer.scale, magnitude)


def _matrices(arrays: tuple[StoredArray, ...], content: memoryview) -> _Floats:
    if len(arrays) == 1:
        return _floats(arrays[0], content)
    return np.stack([_floats(one, content) for one in arrays])


def _floats(array: StoredArray, content: memoryview) -> _Floats:
    raw = content[array.offset : array.offset + array.size_bytes]
    values = _widened(raw, array.dtype).reshape(array.shape)
    if not np.isfinite(values).all():
        raise AdapterError(f"{shortened(array.name)} holds a number that is not finite")
    return values


def _widened(raw: memoryview, dtype: str) -> _Floats:
    """Copy stored numbers into float32, which holds each of them exactly."""
    if dtype == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if dtype == "BF16":
        high = np.frombuffer(raw, "<u2").astype(np.uint32)
        return (high << np.uint32(16)).view(np.float32)
    blocks = np.frombuffer(raw, np.uint8).reshape(
        -1, 34
    )  # Q8_0: a float16, and 32 whole numbers that it counts for
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * scales).reshape(-1)
