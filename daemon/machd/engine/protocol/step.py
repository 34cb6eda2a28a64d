"""A step as a message: the plan that the scheduler makes, and what the engine made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from machd.engine.protocol.blocks import BlockChange, HeldBlock, ReusedPrefix
from machd.engine.protocol.sampling import SamplingParams


class Lane(StrEnum):
    """How a row's forward passes are computed."""

    BATCH = "batch"
    """Together with every other row of the lane."""

    SERIAL = "serial"
    """Alone: a model or a request that cannot share a batch."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Some of a prompt's tokens for one slot.

    Attributes:
        start: Position of ``token_ids[0]`` in the prompt.
        is_last: The chunk ends the prompt, so the row decodes from now on. No chunk is the last one
            of a row without a completion.
        sampling: The row's parameters; the engine keeps those of the opening chunk.
        reserved_tokens: Positions that prompt and completion may take together.
        lane: Where the row decodes; the engine keeps that of the opening chunk.
        reused: What comes before ``start`` in an opening chunk, out of blocks.
    """

    slot_index: int
    token_ids: tuple[int, ...]
    start: int
    is_last: bool
    sampling: SamplingParams
    reserved_tokens: int
    lane: Lane = Lane.BATCH
    reused: ReusedPrefix | None = None

    @property
    def opens(self) -> bool:
        """Whether it is the first of its row."""
        return self.start == 0 or self.reused is not None


class ProposerKind(StrEnum):
    """Who guesses what a row says next, as ``speculation.mode`` spells it."""

    OFF = "off"
    """Nobody."""

    NGRAM = "ngram"
    """What followed the same words before, in prompt and completion."""

    DRAFT = "draft"
    """A small model."""

    DFLASH = "dflash"
    """A block-diffusion draft."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One running row that wants its next token.

    Attributes:
        max_draft_tokens: Tokens that may be guessed ahead of it and verified in the same pass.
    """

    slot_index: int
    max_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to do with blocks, what to free, what to prefill, who decodes."""

    release: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    blocks: tuple[BlockChange, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether running the plan would do nothing."""
        return not (self.blocks or self.release or self.prefill or self.decode)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that this step computes."""
        return sum(len(chunk.token_ids) for chunk in self.prefill)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id and its natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token that a row got, with log-probabilities if the row asked for them.

    Attributes:
        logprob: Natural log of the model's probability of ``token_id``; None unless asked.
        top_logprobs: The most likely tokens, best first; empty unless asked.
    """

    slot_index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """A token of a row's prompt with its log-probability after the tokens before it.

    Attributes:
        position: Of the token in the prompt; at least 1.
        logprob: Natural log of the model's probability of ``token_id``.
        rank: 1 for the most likely token of the vocabulary, 2 for the next one.
        top_logprobs: The most likely tokens, best first, as many as the row asked for.
    """

    slot_index: int
    position: int
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFault:
    """One row failed; ``cause`` goes to the log, never to the client.

    Attributes:
        cause: A panic in a library written in Rust is a BaseException and no Exception.
    """

    slot_index: int
    cause: BaseException = field(compare=False)


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Tokens that were guessed for a row and verified in this step.

    Attributes:
        drafted_tokens: How many were; at least one.
        accepted_tokens: How many of them, from the first on, are what the row says. They are in its
            caches, so after them comes one token more, which is not.
    """

    slot_index: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class DraftFault:
    """Guessing failed for a row, which goes on without; ``cause`` goes to the log."""

    slot_index: int
    cause: BaseException = field(compare=False)


LEAST_BATCHED_GAIN = 1.1
"""By how much guesses have to pay where others wait for them: tokens a second, over those without."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made.

    Attributes:
        tokens: At least one for each row that the plan decodes, those that are certain and those
            that were guessed rightly included.
        faults: Rows that have none because they failed.
        held_blocks: Blocks that are in memory since this step, with their size.
        lost_blocks: Numbers of those that could not be stored or loaded.
        unsaved_blocks: Digests that the disk tier was to keep since earlier steps, and does not.
        drafts: What came of the guesses, for each row that had some.
        draft_faults: Rows that nobody guesses for any more.
        batched_gain: Tokens a second that guesses for several rows together are thought to make, over
            those without; None before that was asked.
        prompt_logprobs: Of the rows that asked, for the prompt tokens of this step.
    """

    tokens: tuple[SampledToken, ...] = ()
    faults: tuple[RowFault, ...] = ()
    held_blocks: tuple[HeldBlock, ...] = ()
    lost_blocks: tuple[int, ...] = ()
    unsaved_blocks: tuple[bytes, ...] = ()
    drafts: tuple[DraftOutcome, ...] = ()
    draft_faults: tuple[DraftFault, ...] = ()
    batched_gain: float | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


def slab_rows(rows: int, max_rows: int) -> int:
    """Rows that a batch's cache has room for when it holds ``rows``: the next power of two.

    Both who reserves memory and who allocates it ask here.
    """
    return min(1 << max(rows - 1, 0).bit_length(), max(max_rows, rows))


class StepMemoryError(Exception):
    """A step needs more memory than is left for it.

    Attributes:
        needed_bytes: An upper estimate.
        left_bytes: What steps may take at that moment.
    """

    def __init__(self, *, needed_bytes: int, left_bytes: int) -> None:
        """Keep the numbers for the log and for the scheduler."""
        super().__init__(f"a step needs {needed_bytes} bytes and {left_bytes} are left for it")
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes
