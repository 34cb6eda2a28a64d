"""The header of a safetensors file, checked against the file's size before mlx reads it.

Layout: eight bytes, the little-endian length of a JSON object; the object, which maps tensor
names to ``dtype``, ``shape`` and ``data_offsets``; the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from machd.engine.backend.model_files import open_regular, shortened
from machd.errors import ModelFormatError, ModelNotFoundError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The limit of the safetensors library itself."""

MAX_TENSORS = 1 << 18
"""Tensors of a checkpoint; the largest models have 100,000, and machd and mlx take a minute for some millions."""

_OFFSETS = b'"data_offsets"'
_MAX_DIMENSIONS = 64
_MAX_NUMBER = 1 << 63

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, by its first byte from the beginning of the file."""

    offset: int
    size_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of one file, by name."""

    tensors: Mapping[str, StoredTensor]

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def read_safetensors_header(path: Path, max_tensors: int = MAX_TENSORS) -> SafetensorsHeader:
    """Read and check the header.

    Raises:
        ModelFormatError: Not a safetensors file, truncated, with data outside the file, with too many tensors, or no
            regular file.
        ModelNotFoundError: The file cannot be opened.
    """
    try:
        with open_regular(path) as file:
            return header_of(file, path, os.fstat(file.fileno()).st_size, max_tensors)
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error


def header_of(
    file: BinaryIO, path: Path, size_bytes: int, max_tensors: int = MAX_TENSORS
) -> SafetensorsHeader:
    """Read and check the header of a file that is open at its beginning, or of its content in memory.

    Raises:
        ModelFormatError: As in :func:`read_safetensors_header`.
    """
    length_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size_bytes < _LENGTH_BYTES or length_bytes > min(size_bytes, _MAX_HEADER_BYTES):
        raise _broken(path, "its header is longer than the file")
    entries = _entries(path, file.read(length_bytes), max_tensors)
    data_bytes = size_bytes - _LENGTH_BYTES - length_bytes
    begin = _LENGTH_BYTES + length_bytes
    return SafetensorsHeader(
        {
            name: _checked_tensor(path, name, entry, begin, data_bytes)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    )


def _entries(path: Path, text: bytes, max_tensors: int) -> dict[str, msgspec.Raw]:
    """Split a header into its entries, which stay text: a hundred megabytes would become a gigabyte of objects."""
    if text.count(_OFFSETS) > max_tensors:
        raise _too_many(path)
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _broken(path, "its header is not a JSON object") from error
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 among them
        raise _broken(path, "its header is not JSON") from error
    # Counted again, because JSON has escapes.
    count = len(entries) - ("__metadata__" in entries)
    if count > max_tensors:
        raise _too_many(path)
    if text.count(_OFFSETS) > count:
        raise _broken(path, "a tensor is in its header twice")
    return entries


def _checked_tensor(
    path: Path, name: str, raw: msgspec.Raw, begin: int, data_bytes: int
) -> StoredTensor:
    """Find a tensor in the data, which begins at a byte, after comparing shape, offsets and the file's end."""
    shown = shortened(name)
    try:
        entry = json.loads(bytes(raw))
        assert isinstance(entry, dict)
        start, end = _numbers(entry["data_offsets"])
        shape = tuple(_numbers(entry["shape"]))
        elements = math.prod(shape)
        dtype = entry["dtype"]
        bits = _BITS[dtype]
    except (AssertionError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _broken(path, f"the header's entry for {shown} makes no sense") from error
    if not 0 <= start <= end:
        raise _broken(path, f"the offsets of {shown} make no sense")
    if end > data_bytes:
        raise _broken(path, f"it is truncated: {shown} ends behind the end of the file")
    if elements < 0 or elements * bits != (end - start) * 8:
        raise _broken(path, f"shape and size of {shown} do not agree")
    return StoredTensor(begin + start, end - start, dtype, shape)


def _numbers(values: list[object]) -> list[int]:
    """Check lengths or offsets: JSON has fractions, and integers and lists of any size, which are a ValueError."""
    numbers = [one for one in values if isinstance(one, int) and abs(one) < _MAX_NUMBER]
    if len(numbers) < len(values) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("no lengths of a tensor")
    return numbers


def _too_many(path: Path) -> ModelFormatError:
    return _broken(path, f"with it the model has more than {MAX_TENSORS:,} tensors")


def _broken(path: Path, problem: str) -> ModelFormatError:
    return ModelFormatError(f"{path.name} cannot be read: {problem}; fetch or copy the file again")
