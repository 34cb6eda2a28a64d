"""What the scheduler and the serving loop know of an engine: plain data and four verbs.

A step is a message: :class:`StepPlan` in, :class:`StepResult` out, both frozen and free of
tensors, so that several ranks can run one plan and a fake can answer it.

The rules of the seam, which the contract suite proves for every engine:

- ``run`` first makes ``plan.blocks``, frees ``plan.release``, then prefills, then decodes.
- A block that could not be stored or loaded is in ``StepResult.lost_blocks``; nothing else fails.
- A row with ``prompt_logprobs`` gets one entry in ``StepResult.prompt_logprobs`` for each token of
  its prompt but the first: a chunk's own tokens in the chunk's result, in order of position.
- A row none of whose chunks is the last one never decodes.
- The last chunk of a prompt may yield the row's first token in the same result. If it does not,
  the next step that decodes the row's lane does, or the one after it where the engine was already
  computing that step when the row joined.
- From its first token on a decode row yields a token a step, and more where its grammar leaves no
  choice for the next ones. The engine may already be computing the next one when it answers.
- Where the plan allows drafts, the engine may guess a row's next tokens, compute them together and
  yield those that it would have chosen anyway: what a row says does not depend on it.
- The rows of :attr:`Lane.BATCH` compute together: a plan decodes all of them or none. A row of
  :attr:`Lane.SERIAL` computes alone, with its own cache.
- A row that fails is reported in ``StepResult.faults`` and yields no token; the other rows do.
- ``run`` raising anything is an engine fault: nothing of the step counts.
- Every method is called on the one engine thread, except ``tokenizer``'s, which are thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from machd.api.constraint import Constraint
from machd.capabilities.facts import CacheFacts
from machd.capabilities.model_code import ModelCode
from machd.engine.protocol.blocks import BlockChange, HeldBlock, ReusedPrefix, SavedBlock
from machd.engine.protocol.chat_format import ChatFormat
from machd.engine.protocol.fill_format import FillFormat

__all__ = [
    "LEAST_BATCHED_GAIN",
    "ChatMessages",
    "DecodeRow",
    "Detokenizer",
    "DiskReading",
    "DraftFault",
    "DraftOutcome",
    "Engine",
    "Grammar",
    "GrammarCompiler",
    "Lane",
    "MemoryReading",
    "ModelDescription",
    "PrefillChunk",
    "PromptLogprob",
    "ProposerKind",
    "RowFault",
    "SampledToken",
    "SamplingParams",
    "StepMemoryError",
    "StepPlan",
    "StepResult",
    "Thinking",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerInfo",
    "slab_rows",
]

ChatMessages = Sequence[dict[str, object]]
"""Chat messages as a template sees them: ``role``, ``content`` and what else the template reads."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion may say, compiled once and shared by all rows that say it.

    Attributes:
        source: The compiler's own text, which decides alone whether two grammars are the same.
        compiled: What the engine makes matchers from; opaque to everything else.
        ignored_keywords: Keywords of a JSON schema that the grammar cannot express, sorted.
    """

    source: str
    compiled: object = field(compare=False, repr=False)
    ignored_keywords: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where a completion's thoughts begin and end. No grammar holds inside of them.

    Attributes:
        start_token_ids: What opens them.
        end_token_ids: What closes them; at least one token.
        is_open: The prompt ends inside of them.
        budget_tokens: Tokens of thought after which the engine itself closes them; None for never.
    """

    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    is_open: bool
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's tokens are chosen. The same whatever other rows share the batch.

    The order is: penalties and ``logit_bias`` on the logits, then temperature, then ``top_k``,
    ``top_p`` and ``min_p`` on the resulting distribution. Temperature 0 is greedy.

    Attributes:
        seed: With the token's position it alone decides the row's random draw.
        logit_bias: Pairs of token id and addend; ids are inside the vocabulary.
        top_logprobs: None for no log-probabilities, else how many alternatives (0 to 20).
            They are of the model's own distribution, before penalties and temperature.
        allowed_token_ids: The only tokens that may be chosen, by id; empty for all.
        min_tokens: Tokens before which none of ``end_token_ids`` is chosen.
        end_token_ids: Tokens that end the completion; empty unless ``min_tokens`` needs them.
        predicted_token_ids: Tokens that the completion may repeat, for proposers; no token depends on
            them.
        prompt_logprobs: The same for the tokens of the prompt. Such a prompt is computed whole,
            nothing of it is reused.
        forced_token_ids: The completion's first tokens, whatever the model says; empty leaves the
            choice to it.
        grammar: What the completion may say after its thoughts; it ends with one of the model's
            end tokens. Other rows are not touched by it.
        thinking: None for a completion without thoughts.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    top_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    predicted_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    forced_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None


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
        unsaved_blocks: Digests that the second tier was to keep since earlier steps, and does not.
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


@dataclass(frozen=True, slots=True)
class DiskReading:
    """The second tier of blocks at one moment; counts are since the start.

    Attributes:
        bytes: What its files take.
        written: Blocks that were written.
        loaded: Blocks that were read back.
        damaged: Files that were not what they should be, and were deleted.
        dropped: Blocks that were not written because writing could not keep up or failed.
    """

    bytes: int = 0
    written: int = 0
    loaded: int = 0
    damaged: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment.

    Attributes:
        kv_used_bytes: KV and state held for occupied slots.
        active_bytes: Held by the array library, weights included.
        peak_bytes: The most ``active_bytes`` has been.
        cache_bytes: Kept by the array library for reuse.
        available_bytes: What the process can still take; None where that is unknown.
        step_bytes: The part of it that steps may take; the rest is for everything else that the
            process does. None where that is unknown.
        disk: The second tier of blocks; None without one.
        is_stale: Whether the memory could not be read, so that these are older bytes.
    """

    kv_used_bytes: int
    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    available_bytes: int | None = None
    step_bytes: int | None = None
    disk: DiskReading | None = None
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The loaded model, as the outside may know it.

    Attributes:
        model_id: The name that requests use.
        context_tokens: Positions that prompt and completion share.
        vocabulary_tokens: Width of the logits.
        weights_bytes: What the weights take in memory.
        dtype: Name of the dtype computed in, such as ``float32``.
        quantization: Such as ``affine 4-bit, group 64``; None when the weights are plain.
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU; None elsewhere.
        eos_token_ids: Tokens that end a completion.
        created_unix_s: When the weights were written, in seconds since 1970.
        device_memory_bytes: What the device can hold in all; 0 where nobody knows.
        block_key: Of all that decides what a block of given tokens holds: the weights, the dtype, how
            caches are kept, the versions of what computes. Blocks of another key are of no use.
        proposer: Who guesses tokens ahead.
        proposer_reason: Why that is so, for the operator.
        code: Which code computes the model; None for an engine without a model of code.
    """

    model_id: str
    architecture: str
    context_tokens: int
    vocabulary_tokens: int
    parameters: int
    weights_bytes: int
    dtype: str
    quantization: str | None
    backend: str
    blas: str | None
    eos_token_ids: frozenset[int]
    cache: CacheFacts
    created_unix_s: int
    device_memory_bytes: int = 0
    block_key: bytes = b""
    proposer: ProposerKind = ProposerKind.OFF
    proposer_reason: str = ""
    code: ModelCode | None = None


class GrammarCompiler(Protocol):
    """Makes grammars. Every method may be called from any thread."""

    def compile(self, constraint: Constraint) -> Grammar:
        """A grammar for the model's vocabulary; cached.

        Raises:
            GrammarError: It cannot be compiled or is beyond the limits; the message says why.
        """
        ...


class Detokenizer(Protocol):
    """Turns one completion's token ids into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty inside a multi-byte character."""
        ...

    def finish(self) -> str:
        """The text still held back; incomplete bytes become U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a client needs to use the tokenizer from afar.

    Attributes:
        class_name: Of the library's class that reads the tokenizer.
        special_tokens: Role, such as ``eos_token``, to the token's text.
        chat_template: Jinja source of the default template; None where there is none.
    """

    class_name: str
    special_tokens: Mapping[str, str]
    chat_template: str | None


class Tokenizer(Protocol):
    """Text to ids and back. Every method may be called from any thread."""

    @property
    def vocabulary_tokens(self) -> int:
        """Ids that text can come from: 0 up to this number, not included."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        ...

    @property
    def info(self) -> TokenizerInfo:
        """The special tokens and the chat template."""
        ...

    @property
    def knows_token_bytes(self) -> bool:
        """Whether :meth:`token_bytes` tells all: put together they are the text."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of conversations; None where there is none."""
        ...

    @property
    def fill_format(self) -> FillFormat | None:
        """How the model is asked for the text between two texts; None where it cannot be.

        Working it out may take a second the first time: ask on a worker thread.
        """
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes thoughts and calls."""
        ...

    def render_chat(
        self,
        messages: ChatMessages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: As :class:`machd.api.conversation.Conversation` has them.
            add_generation_prompt: End where the assistant's answer begins.
            continue_final_message: End inside the last message, where its text stops; then
                ``add_generation_prompt`` has to be false.
            tools: As OpenAI's chat completions write them.
            variables: What else the template reads, such as ``enable_thinking``.

        Raises:
            ChatTemplateMissingError: The model has no template.
            InvalidRequestError: The template refuses the conversation, or takes too much of time,
                memory or text to render it.
        """
        ...

    def template_notes(self) -> tuple[str, ...]:
        """What a person should know of the chat template before the first conversation comes."""
        ...

    def close(self) -> None:
        """Let go of what renders the chat template."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters."""
        ...

    def detokenizer(self, *, keeps: Sequence[str] = ()) -> Detokenizer:
        """A fresh detokenizer for one completion.

        Args:
            keeps: Texts that come out even if they are special tokens, which others are left out.
        """
        ...


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


class Engine(Protocol):
    """A loaded model that runs steps."""

    @property
    def model(self) -> ModelDescription:
        """What is loaded."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def grammars(self) -> GrammarCompiler:
        """What makes grammars for the model's vocabulary."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Raising anything but StepMemoryError is an engine fault.

        Raises:
            StepMemoryError: There is too little memory for what the plan prefills and decodes.
                Nothing of the plan was done, its releases and blocks included.
        """
        ...

    def memory(self) -> MemoryReading:
        """Bytes right now.

        Raises:
            OSError: The system cannot tell.
        """
        ...

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """The blocks of the second tier that fit :attr:`ModelDescription.block_key`, as found there."""
        ...

    def reset(self, *, max_rows: int | None = None) -> None:
        """Forget every slot, as after an engine fault. Blocks stay.

        Args:
            max_rows: Rows that the batch lane can have from now on; None for as many as before.
        """
        ...

    def close(self) -> None:
        """Give back weights and caches."""
        ...
