"""The header of a GGUF file, read and bounds-checked without mlx.

Layout (GGUF 2 and 3, little-endian): magic, version, tensor count, metadata count, metadata
pairs, tensor descriptions, padding to ``general.alignment``, tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from machd.engine.backend.model_files import open_regular, shortened
from machd.errors import ModelFormatError, ModelNotFoundError

T = TypeVar("T")

MetadataValue = bool | int | float | str | list["MetadataValue"]
"""The value of a metadata key: a scalar, a text, or a list of one of them, or of lists."""

_MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
"""Of a text, in bytes."""

_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS: Mapping[int, str] = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types as struct formats; 8 is a string and 9 an array."""

_MAX_ENTRIES = 1 << 22
"""Entries of all lists, keys and tensors together; a vocabulary of 262,000 tokens with types, scores
and merges has a third of them."""

_MAX_HEADER_BYTES = 128 << 20
_DEFAULT_ALIGNMENT_BYTES = 32
_ALIGNMENT_UNIT_BYTES = 8
"""``general.alignment`` has to be a multiple of it."""

_MAX_DEPTH = 4
"""Of lists in lists, which the format allows, and hardly any file has."""

_MAX_DIMENSIONS = 4
"""ggml's limit."""

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
"""ggml's tensor types: name, elements and bytes of a block (ggml.h, ggml-common.h)."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's description.

    Attributes:
        shape: Row-major, outermost first, as numpy and mlx count.
        type_name: ggml's name, such as ``Q4_1``.
        offset: Position of its first byte in the file.
        size_bytes: Size in the file.
        block_elements: Elements of a block, which has scales of its own; 1 for floats.
        path: The file that has it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size_bytes: int
    block_elements: int
    path: Path

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class GgufHeader:
    """Metadata and tensor descriptions, of one file or of the parts of a model.

    The typed readers raise ModelFormatError naming file and key where a value is of another type, or
    where a key without a default is absent.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, MetadataValue], tensors: tuple[GgufTensor, ...]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def has(self, tensor_name: str) -> bool:
        """Tell whether there is such a tensor."""
        return tensor_name in self._by_name

    def shape(self, tensor_name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        tensor = self._by_name.get(tensor_name)
        if tensor is None:
            raise ModelFormatError(f"{self.path.name}: there is no tensor {tensor_name}")
        return tensor.shape

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text."""
        return self._typed(key, default, str, "a text")

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a whole number of at least 0."""
        value = self._typed(key, default, int, "a whole number")
        if isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Read a truth value."""
        return self._typed(key, default, bool, "true or false")

    def texts(self, key: str) -> list[str]:
        """Read a list of texts."""
        texts = self._typed(key, None, list, "a list of texts")
        if not all(isinstance(item, str) for item in texts):
            raise self._wrong(key, "a list of texts")
        return texts

    def numbers(self, key: str) -> list[float]:
        """Read a list of numbers, empty where the key is absent."""
        numbers = self._typed(key, [], list, "a list of numbers")
        if not all(isinstance(item, int | float) for item in numbers):
            raise self._wrong(key, "a list of numbers")
        return numbers

    def _typed(self, key: str, default: T | None, kind: type[T], expected: str) -> T:
        value = self._value(key, default)
        if not isinstance(value, kind):
            raise self._wrong(key, expected)
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.path.name}: the metadata has no {key}")
        return value

    def _wrong(self, key: str, expected: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path.name}: {key} is not {expected}")


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor descriptions, and check that every tensor lies inside the file.

    Takes about 0.1 s for a vocabulary of 49,000 tokens.

    Raises:
        ModelFormatError: Not a GGUF file, truncated, or of a tensor type that is not known.
        ModelNotFoundError: The file cannot be opened.
    """
    with _mapped(path) as data:
        return gguf_header_of(data, path)


def gguf_header_of(data: mmap.mmap | bytes, path: Path) -> GgufHeader:
    """Read and check the header of a file's whole content.

    Raises:
        ModelFormatError: As in :func:`read_gguf_header`.
    """
    reader = _Reader(path, data)
    try:
        return reader.header()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelFormatError(
            f"{path.name} is truncated or corrupt (its header ends at byte "
            f"{reader.position:,}); fetch the file again"
        ) from error


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelFormatError(f"{path.name} is empty; fetch the file again") from error
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error
    with data:
        yield data


class _Reader:
    """A position in the file's bytes."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path = path
        self._data = data
        self.position = 0
        self._entries_left = _MAX_ENTRIES

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ModelFormatError(f"{self._path.name} is not a GGUF file")
        self.position = 4
        version = self._unpack("I")
        if version not in _VERSIONS:
            raise ModelFormatError(
                f"{self._path.name} is GGUF version {version}; machd reads versions 2 and 3"
            )
        tensor_count, metadata_count = self._count(), self._count()
        metadata = {self._string(): self._value() for _ in range(metadata_count)}
        described = [self._tensor() for _ in range(tensor_count)]
        if len(metadata) < metadata_count or len({one.name for one in described}) < tensor_count:
            raise self._corrupt("a key or a tensor is there twice")
        alignment = self._alignment(GgufHeader(self._path, metadata, ()))
        begin = end = -(-self.position // alignment) * alignment
        tensors = tuple(replace(one, offset=begin + one.offset) for one in described)
        for tensor in sorted(tensors, key=lambda one: one.offset):
            # ggml, too, refuses tensors that overlap or leave gaps.
            if tensor.offset != -(-end // alignment) * alignment:
                raise self._corrupt(
                    f"{shortened(tensor.name)} does not begin where the one before it ends"
                )
            end = tensor.offset + tensor.size_bytes
            if end > len(self._data):
                raise ModelFormatError(
                    f"{self._path.name} is truncated: {shortened(tensor.name)} ends behind "
                    "the end of the file; fetch the file again"
                )
        return GgufHeader(self._path, metadata, tensors)

    def _alignment(self, header: GgufHeader) -> int:
        alignment = header.integer("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if alignment == 0 or alignment % _ALIGNMENT_UNIT_BYTES:
            raise self._corrupt(f"general.alignment is {alignment:,}")
        return alignment

    def _unpack(self, code: str) -> int:
        (value,) = self._scalars(code)
        assert isinstance(value, int)
        return value

    def _count(self) -> int:
        count = self._unpack("Q")
        # Counted over the whole file: a small file may hold many lists, a sparse one long ones.
        self._entries_left -= count
        if self._entries_left < 0:
            raise self._corrupt(f"{count:,} entries in a list")
        return count

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # One loop without calls: a vocabulary and its merges are up to a million texts.
        data, end = self._data, self.position
        limit = min(len(data), _MAX_HEADER_BYTES)
        texts = []
        for _ in range(count):
            start = end + _LENGTH.size
            (length,) = _LENGTH.unpack_from(data, end)
            end = start + length
            if end > limit:
                # The caller turns this into its message for truncated files.
                raise struct.error
            texts.append(data[start:end].decode("utf-8"))
        self.position = end
        return texts

    def _value(self) -> MetadataValue:
        kind = self._unpack("I")
        if kind != _ARRAY:
            return self._values(kind, 1)[0]
        return self._array(_MAX_DEPTH)

    def _array(self, depth: int) -> list[MetadataValue]:
        if depth == 0:
            raise self._corrupt(f"lists in lists, more than {_MAX_DEPTH} deep")
        kind, count = self._unpack("I"), self._count()
        if kind == _ARRAY:
            return [self._array(depth - 1) for _ in range(count)]
        return self._values(kind, count)

    def _values(self, kind: int, count: int) -> list[MetadataValue]:
        """Read scalars or texts."""
        if kind == _STRING:
            return list(self._strings(count))
        if kind in _SCALARS:
            return list(self._scalars(f"{count}{_SCALARS[kind]}"))
        raise self._corrupt(f"metadata of type {kind}")

    def _scalars(self, code: str) -> tuple[bool | int | float, ...]:
        values = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return values

    def _tensor(self) -> GgufTensor:
        """Read a tensor's description; its offset counts from the beginning of the data."""
        name = self._string()
        dimension_count = self._unpack("I")
        if not 1 <= dimension_count <= _MAX_DIMENSIONS:
            raise self._corrupt(f"{shortened(name)} has {dimension_count:,} dimensions")
        dimensions = [self._unpack("Q") for _ in range(dimension_count)]
        kind, offset = self._unpack("I"), self._unpack("Q")
        block = TENSOR_TYPES.get(kind)
        if block is None:
            raise ModelFormatError(
                f"{self._path.name}: {shortened(name)} has the tensor type {kind}, which machd does not "
                "know; a newer one may"
            )
        type_name, block_elements, block_bytes = block
        elements = math.prod(dimensions)
        if elements == 0:
            raise self._corrupt(f"{shortened(name)} is empty")
        if dimensions[0] % block_elements:
            raise self._corrupt(f"{shortened(name)} has broken blocks")
        size_bytes = elements // block_elements * block_bytes
        # GGUF counts dimensions innermost first.
        shape = tuple(reversed(dimensions))
        return GgufTensor(name, shape, type_name, offset, size_bytes, block_elements, self._path)

    def _corrupt(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path.name} is corrupt: {problem}; fetch the file again")
