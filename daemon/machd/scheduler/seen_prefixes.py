"""A bounded memory of prefixes that rows have computed, with which a lookup tells why blocks are missing.

It keeps hashes and no tokens. A collision gives a wrong reason and never a wrong block: blocks are found by their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from machd.request.adapter import adapter_namespace
from machd.scheduler.block_tree import Block
from machd.scheduler.events import CacheReason
from machd.scheduler.sequence import Sequence

MAX_GENERATION_KEYS = 32_768
"""Keys of a generation, of which two are kept: at most 6 MiB, and at least the newest 2.7 million tokens in blocks of 256."""

_KEYS_PER_PREFIX = 3


class SeenText:
    """The hashed prefixes of one row's text. A prefix ends at a multiple of the block size, or where the row is.

    Attributes:
        namespace: Key of the cache namespace.
        sharers: Key of the namespace without its adapters.
    """

    __slots__ = ("_block_tokens", "_first", "_hashes", "_noted", "namespace", "sharers")

    def __init__(self, sequence: Sequence, block_tokens: int) -> None:
        """Start without hashes."""
        request = sequence.request
        adapters = adapter_namespace(request.sampling.adapters)
        self.namespace = hash(request.cache_namespace)
        self.sharers = hash(request.cache_namespace.removeprefix(adapters))
        self._block_tokens = block_tokens
        self._first = self._noted = 0
        self._hashes: list[int] = [0]

    def begin(self, tip: Block, text: tuple[int, ...]) -> None:
        """Go on behind the whole blocks that a row reuses, whose hashes are computed once and kept with them."""
        block, unhashed = tip, list[Block]()
        while not block.is_root and block.prefix_hash is None:
            unhashed.append(block)
            block = block.before
        self._first = block.stop // self._block_tokens
        self._hashes = [block.prefix_hash or 0]
        self._reach(text, tip.stop)
        for one in unhashed:
            one.prefix_hash = self.hash_at(one.stop)
        self._noted = tip.stop // self._block_tokens

    def hash_at(self, stop: int) -> int | None:
        """Return the hash of a prefix; None if it does not end at a multiple of the block size or is not known."""
        index = stop // self._block_tokens - self._first
        is_known = not stop % self._block_tokens and 0 <= index < len(self._hashes)
        return self._hashes[index] if is_known else None

    def unnoted(self, text: tuple[int, ...], stop: int) -> list[int]:
        """Return hashes of prefixes up to ``stop`` that it has not returned before, that of ``stop`` included."""
        self._reach(text, stop)
        ends = stop // self._block_tokens
        hashes = self._hashes[self._noted + 1 - self._first : ends + 1 - self._first]
        self._noted = max(self._noted, ends)
        return [*hashes, self._end(text, stop)]

    def longer_than(self, tokens: int, text: tuple[int, ...]) -> list[int]:
        """Return hashes of prefixes of more than so many tokens, the longest, which is the whole text, first."""
        self._reach(text, len(text))
        longer = self._hashes[tokens // self._block_tokens + 1 - self._first :]
        return [self._end(text, len(text)), *reversed(longer)]

    def _reach(self, text: tuple[int, ...], stop: int) -> None:
        hashes, size = self._hashes, self._block_tokens
        while (ends := self._first + len(hashes)) <= stop // size:
            hashes.append(hash((hashes[-1], text[(ends - 1) * size : ends * size])))

    def _end(self, text: tuple[int, ...], stop: int) -> int:
        ends = stop // self._block_tokens
        known, rest = self._hashes[ends - self._first], text[ends * self._block_tokens : stop]
        return hash((known, rest)) if rest else known


class SeenPrefixes:
    """Keys of computed prefixes in two generations: the older one is dropped when the newer one is full."""

    def __init__(self, max_generation_keys: int = MAX_GENERATION_KEYS) -> None:
        """Start empty."""
        self._max_keys = max_generation_keys
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._newer) + len(self._older)

    def add(self, seen: SeenText, hashes: Iterable[int]) -> None:
        """Remember prefixes of a row's text."""
        for one in hashes:
            if len(self._newer) + _KEYS_PER_PREFIX > self._max_keys:
                self._older, self._newer = self._newer, set()
            self._newer |= {one, hash((one, seen.sharers)), hash((one, seen.namespace))}

    def find(self, seen: SeenText, hashes: Iterable[int]) -> CacheReason | None:
        """Return where the first known prefix was computed, as the reason why its blocks were not found; None if none is known."""
        for one in hashes:
            if hash((one, seen.namespace)) in self:
                return CacheReason.EVICTED
            if hash((one, seen.sharers)) in self:
                return CacheReason.ADAPTER
            if one in self:
                return CacheReason.OTHER_NAMESPACE
        return None

    def __contains__(self, key: int) -> bool:
        """Return whether a key is remembered."""
        return key in self._newer or key in self._older
