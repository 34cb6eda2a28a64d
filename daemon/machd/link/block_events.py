"""Changes of the blocks in memory, from an engine process to routers.

Names and order of the fields are vLLM's; see :mod:`machd.kv_events.wire`.
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"
"""vLLM's word for the tier that the model computes from: on every platform, machd's blocks in memory."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Consecutive blocks of one text that are in memory now.

    Attributes:
        block_hashes: Their hashes, in order.
        parent_block_hash: Hash of the block before them; None at the beginning of a text.
        token_ids: Their tokens, ``block_size`` a block.
        block_size: Tokens of a block.
        lora_id: A number that their adapters have in every process, by content and scale; None without an adapter.
        medium: The tier in which they are.
        lora_name: Name of the adapter, as the request that brought it has it; of several with ``+``.
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
