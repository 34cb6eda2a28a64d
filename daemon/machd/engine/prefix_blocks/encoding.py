"""The file of a block: a safetensors file that is read only if every byte is as it was written.

``__metadata__`` has two entries. ``machd_block`` is a JSON object that says which block it is.
``checksum`` is the SHA-256 of the whole file with zeros in its own place, and is verified before
anything is parsed. SHA-256 is the fastest hash of the standard library where the processor helps
(1.8 GB/s here, BLAKE2b 0.95); a CRC would let one torn file of four billion pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from machd.engine.protocol.blocks import SavedBlock

BLOCK_VERSION = 2
"""To be raised with every change of what is in a file, or of what its arrays mean."""

MAX_BLOCK_BYTES = 4 << 30
"""Bytes of the largest file."""

MAX_HEADER_BYTES = 1 << 20
"""A block of 4,096 tokens in a model of 200 layers has some 100 kB."""

FIRST_BYTES = 32 << 10
"""Bytes that hold most headers, to be read at once."""

_MAX_TOKENS = 4096
"""Tokens of a block: the upper bound of ``cache.block_tokens``."""

_MAX_START = 1 << 32
_MAX_MEMORY_BYTES = 1 << 20
"""Bytes that a block may take in memory beside eight times its file."""

_LENGTH_BYTES = 8
_MARK = b'"checksum":"'
_ZEROS = b"0" * (2 * hashlib.sha256().digest_size)

_Count = Annotated[int, msgspec.Meta(ge=0)]

PlainArray = NDArray[Any]
"""A numpy array of a type that safetensors has: floats, integers, booleans."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """A block's arrays in numpy's own memory, which any thread may read and none writes to.

    Attributes:
        notes: Short texts that come back as they were.
    """

    arrays: Mapping[str, PlainArray]
    notes: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class BlockHead(msgspec.Struct, frozen=True):
    """The description of a block in its file; bytes are base64, ``token_ids`` little-endian uint64."""

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

    @property
    def tokens(self) -> int:
        """Tokens of the block."""
        return len(self.token_ids) // 8

    def saved(self, used_unix_s: float) -> SavedBlock:
        """Make the block that the file says it is."""
        return SavedBlock(
            digest=self.digest,
            parent=self.parent,
            start=self.start,
            token_ids=tuple(np.frombuffer(self.token_ids, dtype="<u8").tolist()),
            has_state=self.has_state,
            nbytes=self.nbytes,
            used_unix_s=used_unix_s,
        )


class _Metadata(msgspec.Struct, frozen=True):
    machd_block: str
    checksum: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_head = msgspec.json.Decoder(BlockHead).decode


def encode_block(saved: SavedBlock, content: BlockContent, key: bytes) -> tuple[memoryview, ...]:
    """Make the bytes of a file, in pieces.

    Raises:
        ValueError, OverflowError, SafetensorError: It has names, types or numbers that a file
            cannot have, or is too large.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in content.arrays.items()}
    head = BlockHead(
        version=BLOCK_VERSION,
        key=key,
        digest=saved.digest,
        parent=saved.parent,
        start=saved.start,
        token_ids=np.array(saved.token_ids, dtype="<u8").tobytes(),
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
    """Read a file's content; None if it is not exactly that of ``saved`` under ``key``."""
    head = read_head(whole, len(whole), key) if _is_intact(memoryview(whole)) else None
    if head is None or not is_of(head.saved(0.0), saved):
        return None
    try:
        arrays = load(whole)
    except (SafetensorError, KeyError, TypeError, ValueError):
        return None
    return BlockContent(arrays, head.notes)


def read_head(first: bytes, size_bytes: int, key: bytes) -> BlockHead | None:
    """Read which block a file says it is from its first bytes, with the whole header at least; None if that cannot be.

    The checksum is not looked at.
    """
    stop = header_stop(first)
    if stop > min(len(first), MAX_HEADER_BYTES):
        return None
    try:
        head = _decode_head(_decode_header(first[_LENGTH_BYTES:stop]).metadata.machd_block)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    is_possible = (
        head.version == BLOCK_VERSION
        and head.key == key
        and stop + head.data_bytes == size_bytes
        and 0 < len(head.token_ids) <= 8 * _MAX_TOKENS
        and len(head.token_ids) % 8 == 0
        and head.start <= _MAX_START
        and head.nbytes <= _MAX_MEMORY_BYTES + 8 * size_bytes
    )
    return head if is_possible else None


def is_of(found: SavedBlock, wanted: SavedBlock) -> bool:
    """Compare all that a block's content depends on."""
    return replace(found, nbytes=0, used_unix_s=0.0) == replace(wanted, nbytes=0, used_unix_s=0.0)


def header_stop(first: bytes | memoryview) -> int:
    """Compute where the header ends, if the first eight bytes can be believed."""
    return _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")


def _checksum_at(whole: memoryview) -> int | None:
    """Find the checksum's digits; None if there is no place for them."""
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
