"""mlx-lm's own static batching, with which ``machd bench`` compares machd.

``batch_generate`` prefills and decodes a list of prompts, and returns when the last one is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx.nn.layers.base import Module
from mlx_lm.generate import batch_generate

from machd.engine.protocol.tokenizer import Tokenizer

_MLX_LM_WIDTH = 32
"""Rows that ``batch_generate`` decodes together unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class StaticReading:
    """Token counts of one batch, in the order of its prompts."""

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]


class StaticBatch:
    """A model and its tokenizer, borrowed. Used on the thread that loaded the model."""

    def __init__(self, model: Module, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def run(self, prompts: Sequence[str], *, max_tokens: int) -> StaticReading:
        """Tokenise, generate ``max_tokens`` greedily, whatever ends the text, and detokenise, as a server would."""
        rows = [self._tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
        answer = batch_generate(
            self._model,
            _Endless(self._tokenizer),
            rows,
            max_tokens=max_tokens,
            return_token_ids=True,
            completion_batch_size=max(len(rows), _MLX_LM_WIDTH),
        )
        return StaticReading(tuple(map(len, rows)), tuple(map(len, answer.token_ids)))


class _Endless:
    """A tokenizer without end tokens, for ``batch_generate``."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)
