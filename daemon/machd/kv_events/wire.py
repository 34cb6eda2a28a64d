"""KV events as they are on the wire: msgpack arrays that vLLM's subscribers decode.

Field order and class names are the format (vLLM 0.15, ``vllm/distributed/kv_events.py``): an event is
an array of its class's name and its fields, a batch an array of time, events and rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MEDIUM = "GPU"
"""vLLM's word for the tier that the model computes from: on every platform, machd's blocks in memory."""


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
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


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Blocks that left memory."""

    block_hashes: tuple[int, ...]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """No block is in memory."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The payload of one message.

    Attributes:
        ts: Seconds since 1970-01-01 UTC.
        events: In the order in which they happened.
        data_parallel_rank: Always 0: each daemon is a worker of its own.
    """

    ts: float
    events: Sequence[KvEvent]
    data_parallel_rank: int = 0
