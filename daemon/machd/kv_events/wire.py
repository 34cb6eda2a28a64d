"""KV events as they are on the wire, in msgpack, as vLLM's subscribers decode them.

Names and order of the fields are the format. A batch is an array in every version. An event is a map
with its class's name under ``type`` since vLLM 0.24, and an array that begins with that name before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

MEDIUM = "GPU"
"""vLLM's word for the tier that the model computes from: on every platform, machd's blocks in memory."""

EventEncoding = Literal["map", "array"]


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Consecutive blocks of one text that are in memory now.

    Attributes:
        block_hashes: Their hashes, in order.
        parent_block_hash: Hash of the block before them; None at the beginning of a text.
        token_ids: Their tokens, ``block_size`` for each.
        block_size: Tokens of a block.
        lora_id: Always None, as ``lora_name``: machd serves no adapters.
        medium: Where they are.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks that left memory."""

    block_hashes: tuple[int, ...]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """No block is in memory."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def encoded_batch(unix_s: float, events: Sequence[KvEvent], encoding: EventEncoding) -> bytes:
    """Return the payload of one message: time, events and data-parallel rank.

    The rank is always 0: each daemon is a worker of its own.
    """
    if encoding == "map":
        return msgspec.msgpack.encode((unix_s, events, 0))
    arrays = [(type(one).__name__, *msgspec.structs.astuple(one)) for one in events]
    return msgspec.msgpack.encode((unix_s, arrays, 0))
