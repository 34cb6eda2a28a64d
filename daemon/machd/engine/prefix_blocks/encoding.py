"""A block as the bytes of a safetensors file, and back, if they are exactly those that were made.

``__metadata__`` has two entries. ``machd_block`` is a JSON object that says which block it is;
``checksum`` is the SHA-256 of the whole file with zeros in its own place, so every byte counts, and
nothing is parsed before it is known to be ours. SHA-256 is the fastest hash of the standard library
where the processor helps (1.8 GB/s here, BLAKE2b 0.95); a CRC would let one torn file of four
billion pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from machd.engine.protocol.blocks import SavedBlock

BLOCK_VERSION = 1
"""To be raised with every change of what is in a file, or of what its arrays mean."""

MAX_BLOCK_BYTES = 4 << 30
"""Of a file."""

MAX_HEADER_BYTES = 1 << 20
"""A block of 4,096 tokens in a model of 200 layers has some 100 kB."""

FIRST_BYTES = 32 << 10
"""As far as most headers go; to be read in one go."""

_MAX_TOKENS = 4096
"""Of a block: the most that ``cache.block_tokens`` takes."""

_MAX_START = 1 << 32
_MAX_MEMORY_BYTES = 1 << 20
"""That a block may take in memory beside eight times its file."""

_LENGTH_BYTES = 8
_MARK = b'"checksum":"'
_ZEROS = b"0" * (2 * hashlib.sha256().digest_size)

PlainArray = NDArray[Any]
"""An array of numpy's, of a type that safetensors has: floats, integers, booleans."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Arrays by name, and what else has to be known to make a block of them.

    Attributes:
        arrays: Of numpy's own memory, and nobody writes to them any more.
        notes: Short texts that come back as they were.
    """

    arrays: Mapping[str, PlainArray]
    notes: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """What the arrays take."""
        return sum(array.nbytes for array in self.arrays.values())


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Head(msgspec.Struct, frozen=True):
    """What a file says of itself; bytes are base64."""

    version: _Count
    key: bytes
    digest: bytes
    parent: bytes
    start: _Count
    token_ids: bytes
    has_state: bool
    nbytes: _Count
    data_bytes: _Count
    notes: dict[str, str]


class _Metadata(msgspec.Struct, frozen=True):
    machd_block: str
    checksum: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_head = msgspec.json.Decoder(_Head).decode


def encode_block(saved: SavedBlock, content: BlockContent, key: bytes) -> tuple[memoryview, ...]:
    """The bytes of a file, in pieces.

    Raises:
        ValueError, OverflowError, SafetensorError: It has names, types or numbers that a file
            cannot have.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in content.arrays.items()}
    head = _Head(
        version=BLOCK_VERSION,
        key=key,
        digest=saved.digest,
        parent=saved.parent,
        start=saved.start,
        token_ids=np.array(saved.token_ids, dtype="<u4").tobytes(),
        has_state=saved.has_state,
        nbytes=saved.nbytes,
        data_bytes=content.nbytes,
        notes=dict(content.notes),
    )
    text = msgspec.json.encode(head).decode()
    whole = memoryview(save(arrays, {"machd_block": text, "checksum": _ZEROS.decode()}))
    if header_stop(whole) > MAX_HEADER_BYTES or len(whole) > MAX_BLOCK_BYTES:
        raise ValueError("it is larger than any may be")
    at = _checksum_at(whole)
    assert at is not None, "a quote inside of a text is escaped, so the mark is there once"
    checksum = hashlib.sha256(whole).hexdigest().encode()
    return whole[:at], memoryview(checksum), whole[at + len(_ZEROS) :]


def decode_block(whole: bytes, saved: SavedBlock, key: bytes) -> BlockContent | None:
    """The content, or None if it is not exactly that of ``saved`` under ``key``."""
    if not _is_intact(memoryview(whole)):
        return None
    found = _read_head(whole, len(whole))
    if found is None or found.key != key or not is_of(_saved(found, 0.0), saved):
        return None
    try:
        arrays = load(whole)
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None
    return BlockContent(arrays, found.notes)


def read_head(first: bytes, size_bytes: int, key: bytes, used_unix_s: float) -> SavedBlock | None:
    """Which block a file says that it is; None where it says something that cannot be.

    Args:
        first: Its first bytes, at least to the end of the header. The checksum is not looked at.
        size_bytes: All that it has.
        key: What it has to be made under.
        used_unix_s: When it was last of use.
    """
    found = _read_head(first, size_bytes)
    if found is None or found.key != key:
        return None
    return _saved(found, used_unix_s)


def is_of(found: SavedBlock, wanted: SavedBlock) -> bool:
    """Whether a block is the one that is wanted, by all that its content depends on."""
    return (
        found.digest == wanted.digest
        and found.parent == wanted.parent
        and found.start == wanted.start
        and found.token_ids == wanted.token_ids
        and found.has_state == wanted.has_state
    )


def header_stop(first: bytes | memoryview) -> int:
    """Where the header ends, as far as the first eight bytes can be believed."""
    return _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")


def _read_head(first: bytes, size_bytes: int) -> _Head | None:
    stop = header_stop(first)
    if stop > min(len(first), MAX_HEADER_BYTES):
        return None
    try:
        head = _decode_head(_decode_header(first[_LENGTH_BYTES:stop]).metadata.machd_block)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    is_possible = (
        head.version == BLOCK_VERSION
        and stop + head.data_bytes == size_bytes
        and 0 < len(head.token_ids) <= 4 * _MAX_TOKENS
        and len(head.token_ids) % 4 == 0
        and head.start <= _MAX_START
        and head.nbytes <= _MAX_MEMORY_BYTES + 8 * size_bytes
    )
    return head if is_possible else None


def _saved(head: _Head, used_unix_s: float) -> SavedBlock:
    return SavedBlock(
        digest=head.digest,
        parent=head.parent,
        start=head.start,
        token_ids=tuple(np.frombuffer(head.token_ids, dtype="<u4").tolist()),
        has_state=head.has_state,
        nbytes=head.nbytes,
        used_unix_s=used_unix_s,
    )


def _checksum_at(whole: memoryview) -> int | None:
    """Where the checksum's digits are; None where there is no place for them."""
    stop = header_stop(whole)
    if len(whole) < _LENGTH_BYTES or stop > min(len(whole), MAX_HEADER_BYTES):
        return None
    at = bytes(whole[:stop]).find(_MARK) + len(_MARK)
    return at if len(_MARK) <= at <= stop - len(_ZEROS) else None


def _is_intact(whole: memoryview) -> bool:
    at = _checksum_at(whole)
    if at is None:
        return False
    stop = at + len(_ZEROS)
    checksum = hashlib.sha256(whole[:at])
    checksum.update(_ZEROS)
    checksum.update(whole[stop:])
    # Digit by digit: a flipped bit can turn "a" into "A".
    return checksum.hexdigest().encode() == whole[at:stop]
