"""Texts that begin alike, as a tree: what they have in common stands there once.

A block is a stretch of tokens that follows certain others. Texts go down the tree from the root of
their namespace by comparing tokens, so nothing is ever found by a hash alone. Where two texts part
in the middle of a block it is split, so that what is shared is shared to the token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

_DIGEST_BYTES = 16

_SLICE_TOKENS = 1024
"""Texts are compared in slices of so many, so that long ones that part early are not copied whole."""

_MIN_SWEPT_ROOTS = 1024
"""Namespaces before those that nothing is kept of are looked for: clients can make as many as they
like with salts."""


class Block:
    """A stretch of tokens, and what is known of its keys and values.

    Attributes:
        block_id: What the engine knows it by; another one if it is stored anew.
        start: Position of its first token.
        token_ids: One at least; none of a root.
        children: What follows it, by the first token.
        is_held: Whether it is in memory.
        is_pending: Whether the engine was asked to bring it there.
        is_saved: Whether the disk tier was asked to keep it.
        has_state: Whether what exists at its end alone is kept, too.
        nbytes: What it takes in memory, or would.
        pins: Running rows whose text goes on after it, or ends in it.
        uses: How often a prompt began with it.
        memory_children: Blocks after it that are in memory.
        saved_children: Blocks after it that the disk tier was asked to keep.
        entries: Texts in memory that begin with it, if it is there.
        holds: Its pins, and the blocks after it that are pinned or before one that is.
        priority: What it is worth; see :mod:`machd.scheduler.eviction`.
    """

    __slots__ = (
        "_digest",
        "_hash",
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
        """Begin as nothing but tokens.

        Args:
            block_id: What the engine is to know it by.
            parent: What it follows; None for a root.
            start: Position of its first token.
            token_ids: Its tokens.
            digest: Where it is known; a root's always is.
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
        self._digest = digest
        self._hash: hashlib.blake2b | None = None

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)

    @property
    def is_in_memory(self) -> bool:
        """Whether it takes memory, or will with the next step."""
        return self.is_held or self.is_pending

    @property
    def is_evictable(self) -> bool:
        """Whether it can leave memory: no row needs it, and nothing there follows it."""
        return self.is_held and not self.pins and not self.memory_children

    @property
    def is_known(self) -> bool:
        """Whether it stands for something that is kept anywhere; what does not is in no tree."""
        return self.is_root or self.is_in_memory or self.is_saved

    @property
    def is_root(self) -> bool:
        """Whether it stands for no tokens at all."""
        return self.parent is None

    @property
    def before(self) -> Block:
        """What it follows, which a root has not."""
        assert self.parent is not None, "nothing comes before a root"
        return self.parent

    @property
    def digest(self) -> bytes:
        """Of the model, the namespace and all tokens to its end, however they are cut into blocks."""
        if self._digest is None:
            self._digest = self._hashed().digest()
        return self._digest

    def _hashed(self) -> hashlib.blake2b:
        """What the digests of those after it begin with."""
        unhashed: list[Block] = []
        block = self
        while block._hash is None and not block.is_root:
            unhashed.append(block)
            block = block.before
        # A root's digest has one length, whatever its namespace is called.
        known = block._hash or _hash_of(block.digest)  # noqa: SLF001
        for one in reversed(unhashed):
            known = known.copy()
            known.update(array("I", one.token_ids).tobytes())
            one._hash = known  # noqa: SLF001
        return known

    def path(self) -> list[Block]:
        """The blocks from the first one to this one."""
        blocks: list[Block] = []
        block: Block | None = self
        while block is not None and not block.is_root:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    def under(self) -> Iterator[Block]:
        """This block and all that follow it, parents first."""
        waiting = [self]
        while waiting:
            block = waiting.pop()
            yield block
            waiting += block.children.values()


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a text goes down the tree.

    Attributes:
        block: The last one that it goes through, of which it may have only the beginning.
        tokens: How many of its tokens are there.
    """

    block: Block
    tokens: int

    @property
    def whole_block(self) -> Block:
        """The last one that it has all of."""
        return self.block if self.block.stop <= self.tokens else self.block.before


class BlockTree:
    """All blocks, from one root for each namespace."""

    def __init__(self, model_key: bytes) -> None:
        """Start empty.

        Args:
            model_key: Of all that decides what a block of given tokens holds.
        """
        self._model_key = model_key
        self._roots: dict[bytes, Block] = {}
        self._next_id = 0
        self._max_roots = _MIN_SWEPT_ROOTS

    def __iter__(self) -> Iterator[Block]:
        """Every block, parents first; roots are none."""
        for root in self._roots.values():
            for block in root.under():
                if not block.is_root:
                    yield block

    def root(self, namespace: str) -> Block:
        """Where the texts of a namespace begin."""
        if len(self._roots) >= self._max_roots:
            self.forget_empty_roots()
        key = len(self._model_key).to_bytes(4, "little") + self._model_key + namespace.encode()
        return self.root_of(_hash_of(key).digest())

    def root_of(self, digest: bytes) -> Block:
        """Where the texts of the namespace with that digest begin, whoever's it is."""
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = Block(-1, None, 0, (), digest)
        return root

    def walk(self, start: Block, text: tuple[int, ...]) -> Walk:
        """Follow a text as far as it goes.

        Args:
            start: Where it goes through for sure: a root, or what an earlier walk had all of.
            text: From position 0 on.
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
        """Let a block follow another; ``digest`` is given where it is known already."""
        assert token_ids, "a block has tokens"
        assert token_ids[0] not in parent.children, "texts that begin alike share a block"
        block = Block(self.new_id(), parent, parent.stop, token_ids, digest)
        parent.children[token_ids[0]] = block
        return block

    def split(self, block: Block, at: int) -> Block:
        """Cut a block; it keeps what comes from ``at`` on. Returns the new one before it."""
        assert 0 < at < len(block.token_ids), "both halves have tokens"
        head = Block(self.new_id(), block.before, block.start, block.token_ids[:at])
        block.before.children[head.token_ids[0]] = head
        block.start, block.token_ids, block.parent = head.stop, block.token_ids[at:], head
        head.children[block.token_ids[0]] = block
        return head

    def remove(self, block: Block) -> list[Block]:
        """Take a block out, and all that follow it; returns them."""
        del block.before.children[block.token_ids[0]]
        return list(block.under())

    def new_id(self) -> int:
        """A number that no block has had."""
        self._next_id += 1
        return self._next_id

    def forget_empty_roots(self) -> None:
        """Drop the namespaces that nothing is kept of, which anybody can make more of."""
        self._roots = {
            digest: root for digest, root in self._roots.items() if root.children or root.pins
        }
        self._max_roots = max(_MIN_SWEPT_ROOTS, 2 * len(self._roots))


def common_tokens(
    block: tuple[int, ...], text: tuple[int, ...], at: int = 0, *, known: int = 0
) -> int:
    """How many tokens ``block`` and ``text`` from ``at`` on have in common, from the first one.

    Args:
        block: One of them.
        text: The other one.
        at: Where it begins to be compared.
        known: Tokens that are known to be the same.
    """
    length = min(len(block), len(text) - at)
    if known >= length or block[known] != text[at + known]:
        return min(known, length)  # most texts have nothing to do with each other
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
    """Where two texts part that are known to, from ``low`` on and before ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        if block[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low


def _hash_of(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES)
