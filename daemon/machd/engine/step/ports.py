"""Ports of the step: what it asks of proposers, blocks, experts, images and other ranks, in plain data.

The packages speculation/, prefix_blocks/, experts/ and vision/ satisfy these protocols by structure, without importing
this module; machd.engine.assembly plugs them in; ranks/ has deciders of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.protocol.blocks import BlockChange, BlockOutcome, ReusedPrefix, SavedBlock
from machd.engine.protocol.media import MediaProcessor, MediaSpan
from machd.engine.protocol.memory import DiskReading, ExpertReading, MediaReading
from machd.engine.protocol.step import EncodeOutcome, EncodeRow, ProposerKind
from machd.request.adapter import Adapter
from machd.request.generation import SamplingParams

if TYPE_CHECKING:
    from machd.engine.step.decode_pass import DecodePass
    from machd.engine.step.row import Decoded
    from machd.engine.step.verification import Span

FindRow = Callable[[int], CachedRow | None]
"""Locates a slot's row; None if there is none that blocks can be copied from."""


class Experts(Protocol):
    """Experts that lie on disk until they are needed."""

    def reading(self) -> ExpertReading | None:
        """Return the bank at this moment; None if all experts are in memory."""
        return None

    def take_fault(self) -> OSError | None:
        """Return why experts could not be read since the last call, if any.

        Rows that needed one have NaN where it would have counted.
        """
        return None

    def close(self) -> None:
        """End all reading, and give the memory back."""
        return


class NoExperts(Experts):
    """All experts are in memory, if the model has any: each default of the port."""


class PromptMedia(Protocol):
    """Images and videos of prompts, as the model takes them."""

    @property
    def processor(self) -> MediaProcessor | None:
        """Decoder and processor of images and videos; None for a model that takes text only."""
        return None

    @property
    def has_features(self) -> bool:
        """True if the model is given features beside token ids, which are made for one prompt at a time."""
        return False

    @property
    def has_positions(self) -> bool:
        """True if the model is told the positions of rows, which images move."""
        return False

    def encode(self, rows: Sequence[EncodeRow], limit_s: float) -> EncodeOutcome:
        """Encode what rows wait for, and pause after ``limit_s``.

        A row fails with StepMemoryError if its image or video does not fit into the memory that is left.
        """
        raise AssertionError(f"a model without vision is given {len(rows)} images ({limit_s} s)")

    def inputs(
        self, keys: Sequence[int], start: int, spans: Sequence[MediaSpan]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Return what the model takes of a stretch of a prompt.

        Args:
            keys: The stretch.
            start: Its place in the prompt.
            spans: Images and videos of the whole prompt, in order.

        Returns:
            Token ids int32 [1, n], and features by name.

        Raises:
            MediaEncodingError: An image or video cannot be encoded.
        """
        del start, spans
        return mx.array([keys], dtype=mx.int32), {}

    def shift(self, spans: Sequence[MediaSpan]) -> int:
        """Return the position of the first token behind a prompt's images, less its place."""
        del spans
        return 0

    def reading(self) -> MediaReading | None:
        """Return the encoder's cache at this moment; None without an encoder."""
        return None

    def forget_rows(self, slot_indices: Iterable[int] | None = None) -> None:
        """Keep nothing more for rows that are past their prefill, or gone; None for all."""
        del slot_indices

    def close(self) -> None:
        """Drop the encoder's cache, and close the processor."""
        return


class NoMedia(PromptMedia):
    """The model takes text only: each default of the port."""


class RowAdapters(Protocol):
    """Adapters of rows, while a pass is built."""

    def chosen(
        self,
        rows: Sequence[tuple[Adapter, ...]],
    ) -> AbstractContextManager[None]:
        """Have the passes that are built within the context computed with these adapters.

        Args:
            rows: Of each row of the pass; of a packed pass of each token. All are in memory.
        """
        assert not any(rows), "a model without adapters"
        return nullcontext()


class NoRowAdapters(RowAdapters):
    """No adapters are served: each default of the port."""


class RowProposer(Protocol):
    """Draft tokens for one row."""

    @property
    def kv_bytes(self) -> int:
        """Bytes held for the row beside the served model's caches."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the row has generated."""
        ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return the likeliest next tokens in order; empty where none are known. A lookup may be asked twice."""
        ...

    def close(self) -> None:
        """Give back what is held for the row."""
        ...


class Proposer(Protocol):
    """Draft tokens for an engine's rows."""

    @property
    def kind(self) -> ProposerKind:
        """Source of the draft tokens."""
        ...

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        """Begin with a row that has generated nothing yet."""
        ...

    def close(self) -> None:
        """Give back what all rows share."""
        ...


class BlockTier(Protocol):
    """Blocks of the prefix cache, in memory and perhaps on disk."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the copies of rows that left."""
        ...

    def apply(self, changes: Sequence[BlockChange], find_row: FindRow) -> BlockOutcome:
        """Make the plan's changes; blocks are copied from rows that ``find_row`` locates."""
        ...

    def fill(self, caches: Sequence[Cache], reused: ReusedPrefix) -> None:
        """Copy a prefix out of blocks into a row's empty caches."""
        ...

    def keep_row(self, slot_index: int, row: CachedRow) -> None:
        """Copy a row that leaves before its slot is released, so that blocks can be made of it."""
        ...

    def forget_rows(self, slot_indices: Iterable[int] | None = None) -> None:
        """Drop the copies of these slots' rows; of all rows by default."""
        ...

    def saved(self) -> tuple[SavedBlock, ...]:
        """Return the blocks of the disk tier."""
        ...

    def reading(self) -> DiskReading | None:
        """Return the disk tier's counts; None without one."""
        ...

    def close(self) -> None:
        """Drop all blocks and finish writing."""
        ...


class Decider:
    """Decides what a step does. This one is of a process that computes the model alone: it returns what it is given.

    With ranks (``ranks/deciding.py``) each method is a collective, called by all in this order, the last two for each lane:

    - agree_on_memory: every rank sends its need and its free bytes; all take the tightest;
    - agree_on_joining: rank 0 sends the slots of the rows that can begin to decode;
    - agree_on_spans: rank 0 sends the tokens ahead of each row;
    - agree_on_result: rank 0 sends what each row keeps of the pass (SettledRow), or that it is computed again.

    Between them all ranks compute the same passes over the same tokens. Only rank 0 samples, drafts and has grammars:
    two ranks whose logits differ in the last bit would not choose the same token.
    """

    def agree_on_memory(
        self, measure: Callable[[], tuple[int, int]], *, only_decodes: bool
    ) -> tuple[int, int] | None:
        """Return the bytes that a step needs, and those left for it, on the rank that has least to spare.

        ``measure`` returns both for this process. None if no rank looks before this step.
        """
        del only_decodes
        return measure()

    def agree_on_joining(self, slot_indices: Sequence[int]) -> Sequence[int]:
        """Return which rows join their lanes, of those that can begin to decode here."""
        return slot_indices

    def agree_on_spans(self, choose: Callable[[], list[Span]], rows: int) -> list[Span]:
        """Return the span of each of so many rows in the next pass; empty for plain ones."""
        del rows
        return choose()

    def agree_on_result(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Return the result of a pass; None if it is to be computed again without tokens ahead."""
        return settle(current)
