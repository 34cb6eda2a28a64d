"""Vectors and logits of earlier inputs, in memory, so that a text that comes again is not computed again.

They are of one load of a model: another load may have read other weights. Lives on the event loop.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import Struct

from machd.engine.protocol.encoder import EncoderInput

_KEY_BYTES = 32

_ENTRY_BYTES = 320
"""What an entry takes beside its numbers, at most: the key, the heads of two objects, its place in the order."""


class VectorReading(Struct, frozen=True, kw_only=True):
    """The cache of an encoder's vectors at one moment; counts are since the start.

    Attributes:
        limit_bytes: Most memory that it may take; 0 where it is off.
        entries: Inputs whose vectors or logits are kept.
        bytes: Memory of these.
        hits: Inputs that were kept, or were being computed for another request.
        misses: Inputs that were computed.
    """

    limit_bytes: int = 0
    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


def vector_keys(inputs: Sequence[EncoderInput], namespace: str) -> list[bytes]:
    """Return a hash of each input's whole content, and of who may find it."""
    start = blake2b(blake2b(namespace.encode()).digest(), digest_size=_KEY_BYTES)
    keys = list[bytes]()
    for one in inputs:
        key = start.copy()
        second_from = -1 if one.second_from is None else one.second_from
        key.update(array("q", (second_from, *one.token_ids)))
        keys.append(key.digest())
    return keys


class VectorCache:
    """Float32 numbers by key; the least recently used are evicted first."""

    def __init__(self) -> None:
        """Begin with none, and keep none until :meth:`hold`."""
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._limit_bytes = 0
        self._load: object = None
        self._hits = 0
        self._misses = 0

    @property
    def reading(self) -> VectorReading:
        """What it holds, and its counts."""
        return VectorReading(
            limit_bytes=self._limit_bytes,
            entries=len(self._rows),
            bytes=self._bytes,
            hits=self._hits,
            misses=self._misses,
        )

    def hold(self, *, load: object, limit_bytes: int) -> None:
        """Keep vectors of this load of the model alone, and no more bytes than these."""
        if load is not self._load:
            self.clear()
            self._load = load
        self._limit_bytes = limit_bytes
        self._evict()

    def find(self, key: bytes) -> bytes | None:
        """Return an input's numbers and mark them as just used; None where they are not kept."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def count(self, *, hits: int, misses: int) -> None:
        """Count a request's different inputs."""
        self._hits += hits
        self._misses += misses

    def keep(self, key: bytes, row: memoryview) -> None:
        """Keep an input's numbers; the bytes are copied."""
        size_bytes = len(row) + _ENTRY_BYTES
        if size_bytes > self._limit_bytes or key in self._rows:
            return
        self._rows[key] = bytes(row)
        self._bytes += size_bytes
        self._evict()

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self._bytes = 0

    def _evict(self) -> None:
        while self._bytes > self._limit_bytes:
            _, row = self._rows.popitem(last=False)
            self._bytes -= len(row) + _ENTRY_BYTES
