"""A step as a message: the scheduler's plan and the engine's result, both plain data.

A sequence has computed tokens, whose keys and values are in the caches, and known tokens behind them. A
step computes a span of a row's known tokens: a chunk of its prompt (:class:`PrefillChunk`), or its last
token and perhaps tokens ahead of it (:class:`DecodeRow`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TypeAlias

from msgspec import Struct

from machd.engine.protocol.blocks import BlockChange, HeldBlock, ReusedPrefix
from machd.engine.protocol.media import Media, MediaSpan
from machd.request.generation import SamplingParams


class Lane(StrEnum):
    """Kind of a row's forward passes."""

    BATCH = "batch"
    """Shared with every other row of the lane."""

    SERIAL = "serial"
    """The row's own: its model or its request cannot share a batch."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Positions from 0 on that several rows have in common, and whose keys and values they read in one place.

    Attributes:
        number: Its name; prefixes of one number are of the same tokens.
        tokens: Positions.
    """

    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A span of a row's prompt; of a resumed row its completion so far is the end of that.

    Attributes:
        start: Position of ``token_ids[0]`` in the prompt.
        is_last: The chunk ends the prompt, so the row decodes from now on. No chunk is the last one
            of a row without a completion.
        sampling: The row's parameters; the engine keeps those of the opening chunk.
        reserved_tokens: Positions that prompt and completion may take together.
        lane: The row's lane; the engine keeps that of the opening chunk.
        reused: Prefix before ``start`` that an opening chunk takes from blocks.
        media: Images and videos of the whole prompt, in order; the engine keeps those of the opening
            chunk. Where one lies, ``token_ids`` are its keys; see :mod:`machd.engine.protocol.media`.
        shared: Beginning of the prompt that the row will share with others; of a last chunk. It leaves the row
            its last token and more to compute.
        resumed_tokens: Last tokens of the prompt that the row had generated itself before it was suspended. What
            depends on them goes on as if it never had been; the engine keeps the number of the opening chunk.
        prompt_tokens: Tokens of the whole prompt; of an opening chunk whose prompt has others behind it.
    """

    slot_index: int
    token_ids: tuple[int, ...]
    start: int
    is_last: bool
    sampling: SamplingParams
    reserved_tokens: int
    lane: Lane = Lane.BATCH
    reused: ReusedPrefix | None = None
    media: tuple[MediaSpan, ...] = ()
    shared: SharedPrefix | None = None
    resumed_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def opened_tokens(self) -> int:
        """Tokens for which the chunk's caches need room: all of the prompt's of an opening chunk."""
        return max(len(self.token_ids), self.prompt_tokens - self.start)

    @property
    def opens(self) -> bool:
        """True for the first chunk of a row."""
        return self.start == 0 or self.reused is not None

    @property
    def is_scored(self) -> bool:
        """True if log-probabilities of the prompt were asked for."""
        return self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """An image or video that has to be encoded before a row's next chunk."""

    slot_index: int
    media: Media


class ProposerKind(StrEnum):
    """Source of draft tokens, as ``speculation.mode`` spells it."""

    OFF = "off"
    """No drafts."""

    NGRAM = "ngram"
    """Prompt lookup: the tokens that followed the same ones before, in prompt and completion."""

    DRAFT = "draft"
    """A small model."""

    DFLASH = "dflash"
    """A block-diffusion draft."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The span of a running row: its last token and the tokens ahead of it.

    Attributes:
        max_draft_tokens: Draft tokens that may be proposed and verified in the pass.
        acceptance: Probability that a draft token is right if those before it are.
    """

    slot_index: int
    max_draft_tokens: int = 0
    acceptance: float = 1.0


@dataclass(frozen=True, slots=True)
class SpanCost:
    """Cost of tokens ahead in a decode pass, in passes over one token of each row.

    The defaults take every token ahead that is offered.

    Attributes:
        token_cost: Time that one more token of every row adds.
        max_lost_passes: Time that the pass may lose if every draft is wrong.
        least_batched_gain: Tokens a second with tokens ahead over those without that justify them where other
            rows wait.
    """

    token_cost: float = 0.0
    max_lost_passes: float = inf
    least_batched_gain: float = 1.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: blocks to change, slots to free, prompts to prefill, rows to decode, images to encode.

    Attributes:
        encode: What rows wait for, the most urgent first. What no step asks for any more is dropped half done.
        encode_s: Time after which encoding pauses; the next step that asks for the same goes on with it.
    """

    release: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    blocks: tuple[BlockChange, ...] = ()
    span_cost: SpanCost = SpanCost()
    encode: tuple[EncodeRow, ...] = ()
    encode_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """True if running the plan would do nothing."""
        return not (self.blocks or self.release or self.prefill or self.decode or self.encode)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that this step computes."""
        return sum(len(chunk.token_ids) for chunk in self.prefill)


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """A token id and its natural-log probability."""

    token_id: int
    logprob: float


class SampledToken(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A token of a row, with log-probabilities if the row asked for them.

    Attributes:
        logprob: Natural log of the model's probability of ``token_id``; None unless asked.
        top_logprobs: The most likely tokens, best first; empty unless asked.
        named_logprobs: Log-probabilities of the row's ``logprob_token_ids``, in their order.
    """

    slot_index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    named_logprobs: tuple[float, ...] = ()


class PromptLogprob(Struct, frozen=True, array_like=True, gc=False):
    """A token of a prompt with its log-probability after the tokens before it.

    Attributes:
        position: Of the token in the prompt; at least 1.
        logprob: Natural log of the model's probability of ``token_id``.
        rank: 1 for the most likely token of the vocabulary, 2 for the next one.
        top_logprobs: The most likely tokens, best first, as many as the row asked for.
    """

    position: int
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[TokenLogprob, ...] = ()


class ScoredPrompt(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Log-probabilities of a row's whole prompt, once it is computed, if the row asked for them.

    Attributes:
        logprobs: One entry for each token but the first.
    """

    slot_index: int
    logprobs: tuple[PromptLogprob, ...]


RowOutput: TypeAlias = SampledToken | ScoredPrompt
"""Output of a row, which its request gets. Tokens make the completion; every other kind comes once, before them."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """One row failed; ``cause`` goes to the log, never to the client.

    Attributes:
        cause: A panic in a library written in Rust is a BaseException and no Exception.
    """

    slot_index: int
    cause: BaseException = field(compare=False)

    def release_frames(self) -> None:
        """Let go of the failed computation, once it is logged.

        A traceback holds its functions' variables: an image's pixels, a graph. One of them is the list of faults, so
        that only the garbage collector, which may be minutes away, would free them.
        """
        error: BaseException | None = self.cause
        while error is not None and error.__traceback__ is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Result of one verification of a row's draft tokens; forced tokens do not count.

    Attributes:
        drafted_tokens: At least one.
        accepted_tokens: Draft tokens that were right, from the first on.
    """

    slot_index: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class DraftFault:
    """A failure of a row's proposer; the row continues without drafts. ``cause`` goes to the log."""

    slot_index: int
    cause: BaseException = field(compare=False)


@dataclass(frozen=True, slots=True)
class EncodeOutcome:
    """Result of a step's encoding.

    Attributes:
        encoded: Digests of what is ready.
        faults: Rows whose image or video cannot be encoded.
        duration_s: Time that it took.
    """

    encoded: tuple[bytes, ...]
    faults: tuple[RowFault, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        outputs: In the order in which each row's request gets them.
        faults: Rows that failed and have no output.
        held_blocks: Blocks that are in memory since this step, with their size.
        lost_blocks: Numbers of blocks that could not be stored or loaded.
        unsaved_blocks: Digests of blocks that the disk tier could not keep since earlier steps.
        drafts: One entry for each verification of draft tokens.
        draft_faults: Rows whose proposer failed.
        span_tokens: Tokens of the longest span that was decoded; 0 if no row was.
        encoded: Digests of what the plan asked to encode and is ready.
        encoding_s: Time of the step that encoding took.
        tokens: Those of the outputs: at least one for each row that the plan decodes, its accepted tokens ahead, and one.
    """

    outputs: tuple[RowOutput, ...] = ()
    faults: tuple[RowFault, ...] = ()
    held_blocks: tuple[HeldBlock, ...] = ()
    lost_blocks: tuple[int, ...] = ()
    unsaved_blocks: tuple[bytes, ...] = ()
    drafts: tuple[DraftOutcome, ...] = ()
    draft_faults: tuple[DraftFault, ...] = ()
    span_tokens: int = 0
    encoded: tuple[bytes, ...] = ()
    encoding_s: float = 0.0
    tokens: tuple[SampledToken, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Pick the tokens, which several parts of the scheduler count."""
        tokens = [one for one in self.outputs if isinstance(one, SampledToken)]
        object.__setattr__(self, "tokens", tuple(tokens))
