"""The blocks of fixed size that are published for the tree's blocks in memory.

The tree cuts texts at branch points, a router into blocks of one size from the text's beginning. A
published block lies within one or several blocks of the tree, and belongs to the one that has its last
token: parents are in memory as long as their children, so all of it is.

A hash is keyed by a secret of the process. It stands for the model, the namespace and all tokens up to
the block's end, so equal texts of two namespaces have unrelated hashes, and candidates for an API key's
name or a cache salt cannot be tested against them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable

from machd.engine.protocol.media import FIRST_MEDIA_KEY
from machd.link.block_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from machd.request.adapter import Adapter, adapter_namespace
from machd.scheduler.block_tree import Block

_HASH_BYTES = 8
"""vLLM's integer hashes have 64 bits, and routers read them as such."""


class BlockLedger:
    """Translates changes of the tree's blocks in memory into events; on the engine thread."""

    def __init__(self, publish: Callable[[KvEvent], None], block_size: int, secret: bytes) -> None:
        """Publish that the cache is empty.

        Args:
            publish: Takes events in order; never waits.
            block_size: Tokens of a published block.
            secret: Key of the hashes.
        """
        self._publish = publish
        self._block_size = block_size
        self._secret = secret
        self._hashes: dict[Block, tuple[int, ...] | None] = {}
        """Hashes of the published blocks that end in each of the tree's blocks; None of a block that is
        not published, nor is what follows it."""
        publish(AllBlocksCleared())

    def entered(self, block: Block) -> None:
        """Publish the blocks that end in a block, and in parents that are not published yet."""
        missing: list[Block] = []
        while block not in self._hashes and not block.is_root:
            missing.append(block)
            block = block.before
        for one in reversed(missing):
            self._hashes[one] = self._stored(one)

    def left(self, block: Block) -> None:
        """Publish that the blocks that end in a block are gone."""
        hashes = self._hashes.pop(block, None)
        if hashes:
            self._publish(BlockRemoved(hashes[::-1]))  # children first

    def was_split(self, head: Block, tail: Block) -> None:
        """Divide the published blocks between the two halves of a split; publish nothing."""
        if tail not in self._hashes:
            return
        hashes = self._hashes[tail]
        count = head.stop // self._block_size - head.start // self._block_size
        self._hashes[head] = None if hashes is None else hashes[:count]
        self._hashes[tail] = None if hashes is None else hashes[count:]

    def cleared(self) -> None:
        """Publish that no block is in memory."""
        self._publish(AllBlocksCleared())

    def _stored(self, block: Block) -> tuple[int, ...] | None:
        """Publish the blocks that end in ``block``, and return their hashes."""
        if any(one >= FIRST_MEDIA_KEY for one in block.token_ids):
            return None  # keys of an image: no router could compute them from a request
        if not block.before.is_root and self._hashes[block.before] is None:
            return None
        size = self._block_size
        start, stop = block.start // size * size, block.stop // size * size
        if start == stop:
            return ()
        tokens = _tokens(block, start, stop)
        parent_hash, root = self._hash_before(block)
        hashes: list[int] = []
        previous = root.digest if parent_hash is None else _packed(parent_hash)
        for at in range(0, len(tokens), size):
            hashes.append(self._hash(previous, tokens[at : at + size]))
            previous = _packed(hashes[-1])
        adapters = _root_of(root).adapters
        self._publish(
            BlockStored(
                tuple(hashes),
                parent_hash,
                tokens,
                size,
                lora_id=_adapter_id(adapters),
                lora_name=_adapter_name(adapters),
            )
        )
        return tuple(hashes)

    def _hash_before(self, block: Block) -> tuple[int | None, Block]:
        """Return the last hash published before ``block``, or None and the root."""
        parent = block.before
        while not parent.is_root:
            if hashes := self._hashes[parent]:
                return hashes[-1], parent
            parent = parent.before
        return None, parent

    def _hash(self, previous: bytes, tokens: tuple[int, ...]) -> int:
        known = hashlib.blake2b(previous, digest_size=_HASH_BYTES, key=self._secret)
        known.update(array("Q", tokens).tobytes())
        return int.from_bytes(known.digest(), "big")


def _root_of(block: Block) -> Block:
    while not block.is_root:
        block = block.before
    return block


def _adapter_id(adapters: tuple[Adapter, ...]) -> int | None:
    """Return a number of 31 bits, never 0, that these adapters have in every process; None for none."""
    if not adapters:
        return None
    known = hashlib.blake2b(adapter_namespace(adapters).encode(), digest_size=4).digest()
    return int.from_bytes(known, "big") >> 1 or 1


def _adapter_name(adapters: tuple[Adapter, ...]) -> str | None:
    return "+".join(one.name for one in adapters) or None


def _packed(block_hash: int) -> bytes:
    return block_hash.to_bytes(_HASH_BYTES, "big")


def _tokens(block: Block, start: int, stop: int) -> tuple[int, ...]:
    """Return the tokens of a text from ``start`` to ``stop``, which lies in ``block``."""
    tokens = block.token_ids[: stop - block.start]
    while block.start > start:
        block = block.before
        tokens = block.token_ids[max(0, start - block.start) :] + tokens
    return tokens
