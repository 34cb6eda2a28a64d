"""A model that makes vectors or labels of texts, as the serving loop and the front know it: plain data, no tensor.

Such a model has no cache and no tokens to sample: all positions of its texts are computed in one pass, and the texts of a
pass do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from machd.engine.protocol.media import PlainArray
from machd.engine.protocol.memory import MemoryReading

if TYPE_CHECKING:
    from machd.engine.protocol.engine import ModelDescription


class EncoderTask(StrEnum):
    """What comes of a text."""

    EMBED = "embed"
    """One vector."""

    CLASSIFY = "classify"
    """A logit for each label; of a pair of texts where there is one label: how well they match."""


class Activation(StrEnum):
    """What a classifier's logits are put through to be probabilities, or a score."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class EncoderDescription:
    """What a checkpoint's own files say of an encoder.

    Attributes:
        pooling: Which hidden states a vector is made of: ``mean``, ``cls``, ``last`` or ``max``; empty for a classifier.
        is_normalised: Vectors have length 1.
        dimensions: Numbers of a vector, or labels.
        max_input_tokens: Most tokens of a text, or of a pair, special tokens included.
        is_causal: A token sees those before it only.
        labels: Of a classifier, in the order of its logits.
        activation: Of a classifier.
        prompts: Texts that are put before a text, by their names.
        default_prompt: Name of the one that is used unless another one is asked for; None for no prompt.
        has_shorter_vectors: A vector may be cut, and normalised again.
    """

    task: EncoderTask
    pooling: str
    is_normalised: bool
    dimensions: int
    max_input_tokens: int
    is_causal: bool = False
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.NONE
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    has_shorter_vectors: bool = False

    @property
    def scores_pairs(self) -> bool:
        """Whether it is a cross-encoder: its one label says how well two texts match."""
        return self.task is EncoderTask.CLASSIFY and self.dimensions == 1


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """A text, or a pair of texts, as the model reads it.

    Attributes:
        token_ids: Special tokens included; at least one, at most :attr:`EncoderDescription.max_input_tokens`.
        second_from: Position from which the tokens are those of a pair's second text, of type 1; None for one text.
    """

    token_ids: tuple[int, ...]
    second_from: int | None = None


class InputTokenizer(Protocol):
    """Makes inputs of texts, in the front. Every method may be called from any thread."""

    def encode(self, texts: Sequence[str], *, truncates: bool) -> list[EncoderInput]:
        """Encode texts, special tokens included.

        Args:
            texts: Prompts have been put before them.
            truncates: Whether a text that is too long loses its end.

        Raises:
            ContextLengthExceededError: A text is too long, and is not to be cut.
            InvalidRequestError: A text cannot be encoded, or has no token.
        """
        ...

    def take(self, token_ids: Sequence[Sequence[int]], *, truncates: bool) -> list[EncoderInput]:
        """Take over texts that are encoded already, special tokens included; what is cut is cut before the last of these.

        Raises:
            ContextLengthExceededError: One is too long, and is not to be cut.
            InvalidRequestError: One lacks the special tokens that this tokenizer puts around every text.
        """
        ...

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncates: bool
    ) -> list[EncoderInput]:
        """Encode pairs of texts; what is cut is cut from the longer one.

        Raises:
            ContextLengthExceededError: A pair is too long, and is not to be cut.
            InvalidRequestError: A text cannot be encoded.
        """
        ...


class Encoder(Protocol):
    """A loaded model that makes vectors or labels. Called on one thread."""

    @property
    def model(self) -> ModelDescription:
        """Description of the model, whose ``encoder`` is not None."""
        ...

    @property
    def packs(self) -> bool:
        """Whether texts lie behind one another in a pass; otherwise all take as much as the longest."""
        ...

    def encode(self, inputs: Sequence[EncoderInput]) -> PlainArray:
        """Compute one pass.

        Returns:
            Vectors or logits in the order of the inputs: float32, [inputs, dimensions]. Vectors are pooled, have been
            through the checkpoint's dense layers, and are normalised where it says so.

        Raises:
            MemoryError: There is too little memory for this pass.
        """
        ...

    def memory(self) -> MemoryReading:
        """Bytes right now.

        Raises:
            OSError: The system cannot tell.
        """
        ...

    def close(self) -> None:
        """Give back the weights."""
        ...
