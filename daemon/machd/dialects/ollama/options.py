"""``options`` of Ollama's requests: how to sample.

How Ollama's own runner would load a model (``num_ctx``, ``num_gpu``, …) changes no answer here and
is ignored; what would change one is done or refused by name.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct

from machd.dialects.wire.bounds import (
    WHOLE_ROOM,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from machd.dialects.wire.generation_request import SamplingFields
from machd.dialects.wire.other_servers import OneOnly, TrueOnly, ZeroOnly
from machd.dialects.wire.refusal import Ignored, neutral_values, refuse_unsupported
from machd.errors import UnsupportedParameterError
from machd.request.generation import GenerationOptions

_TEMPERATURE = 0.8
_TOP_P = 0.9
_TOP_K = 40
"""Ollama's documented defaults, on which a client that names no number counts."""

_FRESH_SEED = -1
_WHOLE_TEXT = -1

_Tokens: TypeAlias = Annotated[int, Meta(ge=-2, le=2**31 - 1)]
_LastTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """How to sample. Null means the default.

    Attributes:
        num_predict: Tokens of completion; -1 and -2 for all that fit, 0 names no number.
        repeat_last_n: Tokens over which penalties look. machd's look at the whole text (-1); 0
            switches penalties off.
        num_ctx: Ignored, as the context is always as long as the model's.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    num_predict: _Tokens | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: _LastTokens | None = None

    typical_p: OneOnly = UNSET
    tfs_z: OneOnly = UNSET
    mirostat: ZeroOnly = UNSET
    penalize_newline: TrueOnly = UNSET

    mirostat_tau: Ignored = UNSET
    mirostat_eta: Ignored = UNSET
    num_ctx: Ignored = UNSET
    num_keep: Ignored = UNSET
    num_batch: Ignored = UNSET
    num_gpu: Ignored = UNSET
    main_gpu: Ignored = UNSET
    num_thread: Ignored = UNSET
    numa: Ignored = UNSET
    low_vram: Ignored = UNSET
    f16_kv: Ignored = UNSET
    use_mmap: Ignored = UNSET
    use_mlock: Ignored = UNSET
    logits_all: Ignored = UNSET
    vocab_only: Ignored = UNSET
    embedding_only: Ignored = UNSET

    def check(self) -> None:
        """Refuse options that machd cannot follow.

        Raises:
            UnsupportedParameterError: One of them asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL_OPTIONS, where="options.")
        penalises = (
            self.repeat_penalty not in (None, 1.0)
            or self.presence_penalty
            or self.frequency_penalty
        )
        if penalises and self.repeat_last_n not in (None, _WHOLE_TEXT, 0):
            raise UnsupportedParameterError(
                "options.repeat_last_n: penalties look at the whole text; leave it out, or send -1",
                param="options.repeat_last_n",
            )

    def generation_options(self, *, top_logprobs: int | None, stream: bool) -> GenerationOptions:
        """What is asked of the generation, free of this dialect."""
        asked_tokens = self.num_predict or None
        looks_back = self.repeat_last_n != 0
        shared = SamplingFields(
            temperature=_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=_TOP_P if self.top_p is None else self.top_p,
            top_k=_TOP_K if self.top_k is None else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty if looks_back else None,
            presence_penalty=self.presence_penalty if looks_back else None,
            frequency_penalty=self.frequency_penalty if looks_back else None,
            seed=None if self.seed == _FRESH_SEED else self.seed,
            stop=self.stop,
            stream=stream,
        )
        return shared.shared_options(
            max_tokens=None if asked_tokens is None else max(asked_tokens, WHOLE_ROOM),
            top_logprobs=top_logprobs,
        )


_NEUTRAL_OPTIONS = neutral_values(OllamaOptions)
