"""Orders of rank 0: each verb of the engine as a message.

A step's plan goes over as it is but for what only rank 0 needs of it: sampling parameters, of which
followers know one, and costs and draft lengths, from which rank 0 alone chooses spans.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    ReusedPrefix,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.request.generation import SamplingParams

_CHANGES: dict[str, type[BlockChange]] = {
    one.__name__: one for one in (StoreBlock, SplitBlock, DropBlocks)
}


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`PrefillChunk`."""

    slot_index: int
    token_ids: tuple[int, ...]
    start: int
    is_last: bool
    prompt_logprobs: int | None
    reserved_tokens: int
    lane: Lane
    reused: ReusedPrefix | None
    resumed_tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, chunk: PrefillChunk) -> Chunk:
        """Return what a follower needs of a chunk."""
        assert not chunk.media, "ranks serve text"
        assert chunk.shared is None, "rows of ranks share no prefix"
        return cls(
            chunk.slot_index,
            chunk.token_ids,
            chunk.start,
            chunk.is_last,
            chunk.sampling.prompt_logprobs,
            chunk.reserved_tokens,
            chunk.lane,
            chunk.reused,
            chunk.resumed_tokens,
            chunk.prompt_tokens,
        )

    @property
    def chunk(self) -> PrefillChunk:
        """The chunk, with the one parameter that followers act on."""
        return PrefillChunk(
            slot_index=self.slot_index,
            token_ids=self.token_ids,
            start=self.start,
            is_last=self.is_last,
            sampling=SamplingParams(prompt_logprobs=self.prompt_logprobs),
            reserved_tokens=self.reserved_tokens,
            lane=self.lane,
            reused=self.reused,
            resumed_tokens=self.resumed_tokens,
            prompt_tokens=self.prompt_tokens,
        )


class Run(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Run a step.

    Attributes:
        number: Orders before this one.
        row_checksum: Of the rows that rank 0 has before the step; see :meth:`machd.engine.step.mlx_engine.MlxEngine.row_checksum`.
        blocks: Changes to blocks, each with the name of its kind.
    """

    number: int
    row_checksum: int
    release: tuple[int, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[int, ...]
    blocks: tuple[tuple[str, msgspec.Raw], ...]

    @classmethod
    def of(cls, plan: StepPlan, number: int, row_checksum: int) -> Run:
        """Return the order to run ``plan``."""
        assert not plan.encode, "ranks serve text"
        changes = [(type(one).__name__, msgspec.msgpack.encode(one)) for one in plan.blocks]
        return cls(
            number,
            row_checksum,
            plan.release,
            tuple(Chunk.of(one) for one in plan.prefill),
            tuple(one.slot_index for one in plan.decode),
            tuple((name, msgspec.Raw(encoded)) for name, encoded in changes),
        )

    @property
    def plan(self) -> StepPlan:
        """The plan, for a follower."""
        return StepPlan(
            release=self.release,
            prefill=tuple(one.chunk for one in self.prefill),
            decode=tuple(DecodeRow(slot_index) for slot_index in self.decode),
            blocks=tuple(
                msgspec.msgpack.decode(encoded, type=_CHANGES[name])
                for name, encoded in self.blocks
            ),
        )


class Reset(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Remove every row."""

    number: int
    max_rows: int | None


class Report(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Say what memory there is; also the heartbeat of a group that is idle."""

    number: int


class Close(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End: nothing follows."""

    number: int


Order: TypeAlias = Run | Reset | Report | Close

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Order)


def encoded(order: Order) -> bytes:
    """Return an order as bytes."""
    return msgspec.msgpack.encode(order)


def decoded(message: bytes) -> Order:
    """Return the order that a message is."""
    order: Order = _DECODER.decode(message)
    return order
