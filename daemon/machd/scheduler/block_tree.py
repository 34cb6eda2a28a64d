"""A radix tree of blocks: texts with a common prefix share the blocks of that prefix.

A block is a run of tokens. A lookup descends from the root of its namespace by comparing tokens, never
by a hash alone. A branch point inside a block splits it, so that texts share prefixes to the token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from machd.request.adapter import Adapter

_DIGEST_BYTES = 16

_SLICE_TOKENS = 1024
"""Length of compared slices, so that long texts with an early branch point are not copied whole."""

_MIN_SWEPT_ROOTS = 1024
"""Number of namespaces at which empty ones are removed: salts let clients make any number."""


class Block:
    """A run of tokens, and where its keys and values are.

    Attributes:
        block_id: Its id at the engine; a new one whenever it is stored again.
        start: Position of its first token.
        token_ids: At least one; none of a root.
        children: Following blocks, by first token.
        is_held: It is in memory.
        is_pending: The engine was asked to bring it into memory.
        is_saved: The disk tier was asked to keep it.
        has_state: It has a snapshot of state at its end.
        nbytes: Size in memory, also for a block on disk only.
        pins: Rows that pin it.
        uses: Prompts that began with it.
        memory_children: Children in memory.
        saved_children: Children in the disk tier.
        entries: Texts in memory that begin with it, if it is in memory.
        holds: Its pins plus its children with holds.
        adapters: Of a root, those that compute its namespace's texts; known once a row has looked there.
        prefix_hash: Hash of all tokens to its end, in whatever namespace, for :mod:`machd.scheduler.seen_prefixes`; None if not known.
        priority: Eviction priority; see :mod:`machd.scheduler.eviction`.
    """

    __slots__ = (
        "_digest",
        "_hash",
        "adapters",
        "block_id",
        "children",
        "entries",
        "has_state",
        "holds",
        "is_held",
        "is_pending",
        "is_saved",
        "memory_children",
        "nbytes",
        "parent",
        "pins",
        "prefix_hash",
        "priority",
        "saved_children",
        "start",
        "token_ids",
        "uses",
    )

    def __init__(
        self,
        block_id: int,
        parent: Block | None,
        start: int,
        token_ids: tuple[int, ...],
        digest: bytes | None = None,
    ) -> None:
        """Start neither in memory nor on disk.

        Args:
            block_id: Its id at the engine.
            parent: The block before it; None for a root.
            start: Position of its first token.
            token_ids: Its tokens.
            digest: Its digest; None to compute it when needed, but never of a root.
        """
        self.block_id = block_id
        self.parent = parent
        self.start = start
        self.token_ids = token_ids
        self.children: dict[int, Block] = {}
        self.is_held = self.is_pending = self.is_saved = self.has_state = False
        self.nbytes = self.pins = self.holds = self.uses = 0
        self.memory_children = self.saved_children = self.entries = 0
        self.priority = 0.0
        self.prefix_hash: int | None = None
        self.adapters: tuple[Adapter, ...] = ()
        self._digest = digest
        self._hash: hashlib.blake2b | None = None

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)

    @property
    def is_in_memory(self) -> bool:
        """True if it takes memory, or will with the next step."""
        return self.is_held or self.is_pending

    @property
    def is_usable(self) -> bool:
        """True of a root and of a block in memory: a row can begin behind it."""
        return self.is_root or self.is_in_memory

    @property
    def is_evictable(self) -> bool:
        """True if it is an unpinned leaf in memory."""
        return self.is_held and not self.pins and not self.memory_children

    @property
    def is_known(self) -> bool:
        """True of a root and of a block in memory or on disk; others are in no tree."""
        return self.is_root or self.is_in_memory or self.is_saved

    @property
    def is_root(self) -> bool:
        """True if it begins a namespace and has no tokens."""
        return self.parent is None

    @property
    def before(self) -> Block:
        """The block before it; undefined for a root."""
        assert self.parent is not None, "a root has no parent"
        return self.parent

    @property
    def digest(self) -> bytes:
        """Digest of model, namespace and all tokens to its end, however they are cut into blocks."""
        if self._digest is None:
            self._digest = self._hashed().digest()
        return self._digest

    def _hashed(self) -> hashlib.blake2b:
        """Hash state that the digests of its children continue."""
        unhashed: list[Block] = []
        block = self
        while block._hash is None and not block.is_root:
            unhashed.append(block)
            block = block.before
        # A root's digest has a fixed length, so a long namespace cannot pass for tokens.
        known = block._hash or _hash_of(block.digest)  # noqa: SLF001
        for one in reversed(unhashed):
            known = known.copy()
            known.update(array("Q", one.token_ids).tobytes())
            one._hash = known  # noqa: SLF001
        return known

    def path(self) -> list[Block]:
        """Return the blocks from the first after the root to this one."""
        blocks: list[Block] = []
        block: Block | None = self
        while block is not None and not block.is_root:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    def under(self) -> Iterator[Block]:
        """Yield this block and its descendants, parents first."""
        waiting = [self]
        while waiting:
            block = waiting.pop()
            yield block
            waiting += block.children.values()


@dataclass(frozen=True, slots=True)
class Walk:
    """Longest prefix of a text in the tree.

    Attributes:
        block: Last block of the prefix, of which it may have only the beginning.
        tokens: Length of the prefix.
    """

    block: Block
    tokens: int

    @property
    def whole_block(self) -> Block:
        """Last block that is wholly part of the prefix."""
        return self.block if self.block.stop <= self.tokens else self.block.before


class BlockTree:
    """All blocks, with one root a namespace."""

    def __init__(self, model_key: bytes) -> None:
        """Start empty.

        Args:
            model_key: Key of the model and of all else on which the keys and values of tokens depend.
        """
        self._model_key = model_key
        self._roots: dict[bytes, Block] = {}
        self._next_id = 0
        self._max_roots = _MIN_SWEPT_ROOTS

    def __iter__(self) -> Iterator[Block]:
        """Yield every block but the roots, parents first."""
        for root in self._roots.values():
            for block in root.under():
                if not block.is_root:
                    yield block

    def root(self, namespace: str) -> Block:
        """Return the root of a namespace."""
        if len(self._roots) >= self._max_roots:
            self.forget_empty_roots()
        key = len(self._model_key).to_bytes(4, "little") + self._model_key + namespace.encode()
        return self.root_of(_hash_of(key).digest())

    def root_of(self, digest: bytes) -> Block:
        """Return the root of the namespace with that digest."""
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = Block(-1, None, 0, (), digest)
        return root

    def walk(self, start: Block, text: tuple[int, ...]) -> Walk:
        """Find the longest prefix of a text.

        Args:
            start: A root, or a block known to be wholly part of the prefix.
            text: Token ids from position 0 on.
        """
        block, at = start, start.stop
        while at < len(text):
            child = block.children.get(text[at])
            if child is None:
                break
            common = common_tokens(child.token_ids, text, at)
            block, at = child, at + common
            if at < child.stop:
                break
        return Walk(block, at)

    def add(
        self, parent: Block, token_ids: tuple[int, ...], *, digest: bytes | None = None
    ) -> Block:
        """Add a block behind ``parent``; ``digest`` saves computing it."""
        assert token_ids, "a block has tokens"
        assert token_ids[0] not in parent.children, "children differ in their first token"
        block = Block(self.new_id(), parent, parent.stop, token_ids, digest)
        parent.children[token_ids[0]] = block
        return block

    def split(self, block: Block, at: int) -> Block:
        """Split a block, which keeps its tokens from ``at`` on; returns the new block before it."""
        assert 0 < at < len(block.token_ids), "both halves have tokens"
        head = Block(self.new_id(), block.before, block.start, block.token_ids[:at])
        block.before.children[head.token_ids[0]] = head
        block.start, block.token_ids, block.parent = head.stop, block.token_ids[at:], head
        head.children[block.token_ids[0]] = block
        return head

    def remove(self, block: Block) -> list[Block]:
        """Remove a block with its descendants, and return them, parents first."""
        del block.before.children[block.token_ids[0]]
        return list(block.under())

    def new_id(self) -> int:
        """Return an id that no block has had."""
        self._next_id += 1
        return self._next_id

    def forget_empty_roots(self) -> None:
        """Drop namespaces without blocks and pins."""
        self._roots = {
            digest: root for digest, root in self._roots.items() if root.children or root.pins
        }
        self._max_roots = max(_MIN_SWEPT_ROOTS, 2 * len(self._roots))


def common_tokens(
    block: tuple[int, ...], text: tuple[int, ...], at: int = 0, *, known: int = 0
) -> int:
    """Return the length of the common prefix of ``block`` and ``text[at:]``.

    Args:
        block: Token ids.
        text: Token ids.
        at: Position in ``text`` from which to compare.
        known: Length of a common prefix known before.
    """
    length = min(len(block), len(text) - at)
    if known >= length or block[known] != text[at + known]:
        return min(known, length)  # the common case: unrelated texts
    # Slices are compared a hundred times as fast as tokens one by one.
    low = known
    while low < length:
        high = min(low + _SLICE_TOKENS, length)
        if block[low:high] != text[at + low : at + high]:
            return _first_difference(block, text, at, low, high)
        low = high
    return length


def _first_difference(
    block: tuple[int, ...], text: tuple[int, ...], at: int, low: int, high: int
) -> int:
    """Find the first difference of two texts by bisection between ``low`` and ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        if block[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _hash_of(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
