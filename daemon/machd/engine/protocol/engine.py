"""The engine as the scheduler and the serving loop know it: plain data and four verbs.

A step is a message: :class:`StepPlan` in, :class:`StepResult` out, both frozen and free of
tensors, so that several ranks can run one plan and a fake can answer it.

The rules of the seam, which the contract suite proves for every engine:

- ``run`` first makes ``plan.blocks``, frees ``plan.release``, then prefills, then decodes.
- A block that could not be stored or loaded is in ``StepResult.lost_blocks``; nothing else fails.
- A row with ``prompt_logprobs`` gets one :class:`machd.engine.protocol.step.ScoredPrompt`, in the result of the chunk that ends its prompt.
- A row none of whose chunks is the last one never decodes.
- The last chunk of a prompt may yield the row's first token in the same result. If it does not,
  the next step that decodes the row's lane does, or the one after it where the engine was already
  computing that step when the row joined.
- From its first token on a decode row yields a token a step, and more where tokens ahead of it are right:
  those that its grammar forces, and drafts where the plan allows them. A row's tokens do not depend on
  it. The engine may already be computing the next step when it answers.
- The rows of ``Lane.BATCH`` compute together: a plan decodes all of them or none. A row of
  ``Lane.SERIAL`` computes alone, with its own cache.
- A row that fails is reported in ``StepResult.faults`` and yields no output; the other rows do.
- ``run`` raising anything is an engine fault: nothing of the step counts.
- Every method is called on the one engine thread, except those of :class:`ModelFront`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from machd.capabilities.facts import CacheFacts
from machd.capabilities.model_code import LoadedCode
from machd.engine.protocol.adapters import AdapterRoom
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.encoder import EncoderDescription, InputTokenizer
from machd.engine.protocol.media import MediaProcessor
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.reranker import RerankerDescription
from machd.engine.protocol.step import ProposerKind, StepPlan, StepResult
from machd.engine.protocol.tokenizer import Tokenizer
from machd.request.constraint import Constraint
from machd.request.generation import NO_DEFAULT_SAMPLING, DefaultSampling, Grammar
from machd.request.media import MediaKind


@dataclass(frozen=True, slots=True)
class VisionDescription:
    """Images and videos that a model takes.

    Attributes:
        kinds: Kinds of media that it takes.
        processor: Class of its processor.
        example_tokens: Tokens of an image of :data:`machd.engine.loading.vision.EXAMPLE_PIXELS` pixels a side.
        processed_bytes: Memory for processed images and videos.
    """

    kinds: tuple[MediaKind, ...]
    processor: str
    example_tokens: int
    processed_bytes: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of the loaded model, without a tensor.

    Attributes:
        model_id: The name that requests use.
        context_tokens: Positions that prompt and completion share.
        vocabulary_tokens: Width of the logits.
        weights_bytes: What the weights take in memory.
        dtype: Name of the dtype computed in, such as ``float32``.
        quantization: Such as ``affine 4-bit, group 64``; None when the weights are plain.
        backend: ``cpu``, ``metal`` or ``cuda``.
        blas: The library that multiplies matrices on the CPU; None elsewhere.
        blas_refused: Libraries that were not loaded because they multiply wrongly, each with its reason.
        is_native: machd's own kernels compute every layer of a kind that they know; False without them.
        eos_token_ids: Tokens that end a completion.
        created_unix_s: When the weights were written, in seconds since 1970.
        device_memory_bytes: What the device can hold in all; 0 if unknown.
        device_name: What a GPU calls itself; None on the CPU.
        block_key: Hash of everything that a block's contents depend on besides its tokens: weights,
            dtype, KV format, versions. Blocks of another key are of no use.
        proposer: Source of draft tokens.
        proposer_reason: Why that is so, for the operator.
        code: Which code computes the model; None for an engine without a model of code.
        experts_on_disk: Experts are read from disk when a step needs them.
        kv_format: How keys and values are stored, as ``cache.kv_quantization`` spells it.
        has_length_classes: A row's keys and values take the columns of its length class; otherwise those of the
            longest row of the batch.
        shares_prefixes: Rows of the batch can read the beginning that they have in common in one place.
        vision: Images and videos that the model takes; None for a model that takes text only.
        vision_reason: Why it takes text only although its checkpoint has a vision tower; else empty.
        default_sampling: What holds where a request says nothing, as its checkpoint has it.
        encoder: What it makes of texts, of a model that generates none; else None.
        reranker: How it scores documents; None for a model that is no reranker.
        adapter_obstacle: Why it is computed without adapters, whatever its code allows; else empty.
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
    device_name: str | None = None
    block_key: bytes = b""
    proposer: ProposerKind = ProposerKind.OFF
    proposer_reason: str = ""
    code: LoadedCode | None = None
    blas_refused: tuple[str, ...] = ()
    is_native: bool = False
    experts_on_disk: bool = False
    kv_format: str = "none"
    has_length_classes: bool = False
    shares_prefixes: bool = False
    vision: VisionDescription | None = None
    vision_reason: str = ""
    default_sampling: DefaultSampling = NO_DEFAULT_SAMPLING
    encoder: EncoderDescription | None = None
    reranker: RerankerDescription | None = None
    adapter_obstacle: str = ""


class GrammarCompiler(Protocol):
    """Makes grammars. Every method may be called from any thread."""

    def is_separate(self, constraint: Constraint) -> bool:
        """Tell whether compiling a constraint may take seconds; then it runs in a process of its own.

        Raises:
            GrammarError: It is beyond the limits; the message says why.
        """
        ...

    def compile(self, constraint: Constraint, *, is_wanted: Callable[[], bool] = ...) -> Grammar:
        """A grammar for the model's vocabulary; cached. ``is_wanted`` is asked now and then, and False ends the work.

        Raises:
            GrammarError: It cannot be compiled or is beyond the limits; the message says why.
            OverloadedError: There is no room for its process.
        """
        ...


class ModelFront(Protocol):
    """A loaded model as its front knows it: it describes, reads and writes texts, and computes nothing.

    Every method may be called from any thread.
    """

    @property
    def model(self) -> ModelDescription:
        """Description of the model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for the model's vocabulary."""
        ...

    @property
    def media(self) -> MediaProcessor | None:
        """Decoder and processor of images and videos; None for a model that takes text only."""
        ...

    @property
    def inputs(self) -> InputTokenizer | None:
        """Makes the inputs of an encoder; None for a model that generates."""
        ...


class Engine(ModelFront, Protocol):
    """A loaded model that runs steps."""

    @property
    def adapters(self) -> AdapterRoom:
        """Adapters of the model in memory; a row is computed with those of its sampling parameters, which are held."""
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
        """The blocks of the disk tier that fit :attr:`ModelDescription.block_key`, as found there."""
        ...

    def reset(self, *, max_rows: int | None = None) -> None:
        """Remove every row, as after an engine fault, and change the rows of the batch lane if given. Blocks stay."""
        ...

    def close(self) -> None:
        """Give back weights and caches."""
        ...
