"""Scores of short continuations: their log-probabilities behind prompts, read from distributions of next tokens.

A continuation of several tokens is read a token at a time: its first token behind the prompt, its second behind prompt
and first token. Continuations with a common beginning share these reads, and reads share what their prompts have in
common through the prefix cache. Nothing is generated but the one token that carries a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from machd.errors import MachdError, RowFaultError
from machd.generations.generation import Generation
from machd.request.generation import GenerationOptions, PriorityName, SamplingParams

TokenIds: TypeAlias = tuple[int, ...]

_IDLE_S = 60.0
"""Seconds after which a wait for news begins anew; any number would do."""


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """A prompt and the options to score behind it.

    Attributes:
        options: Continuations that mean the option, each at least one token; none begins another one.
    """

    prompt: TokenIds
    options: tuple[tuple[TokenIds, ...], ...]

    @property
    def reads(self) -> list[TokenIds]:
        """Return the texts behind which a next token is read: the prompt, and the prompt with each longer beginning."""
        beginnings = {
            tokens[:length]
            for option in self.options
            for tokens in option
            for length in range(len(tokens))
        }
        return [(*self.prompt, *one) for one in sorted(beginnings)]


class Reads:
    """The reads of several prompts, as one generation computes them."""

    def __init__(self, prompts: Sequence[ContinuedPrompt]) -> None:
        """Take the prompts; equal reads of two prompts are done once."""
        self._prompts = tuple(prompts)
        self.prompts: tuple[TokenIds, ...] = tuple(
            dict.fromkeys(read for one in prompts for read in one.reads)
        )
        continuations = {tokens for one in prompts for option in one.options for tokens in option}
        self._token_ids = tuple(sorted({token for tokens in continuations for token in tokens}))

    def options(
        self, *, priority: PriorityName = "normal", cache_salt: str | None = None
    ) -> GenerationOptions:
        """Return the options under which each prompt yields one token, with the log-probabilities that are read."""
        return GenerationOptions(
            sampling=SamplingParams(temperature=0.0, logprob_token_ids=self._token_ids),
            max_tokens=1,
            ignore_eos=True,
            in_turns=True,
            priority=priority,
            cache_salt=cache_salt,
        )

    async def scores(self, generation: Generation) -> list[list[float]]:
        """Wait for a generation of :attr:`prompts` under :meth:`options`, and close it.

        Returns:
            For each prompt, the log-probability of each option, in order.

        Raises:
            MachdError: The generation failed.
        """
        found = await _named_logprobs(generation)
        if len(found) != len(self.prompts):
            raise RowFaultError("the generation failed inside the server")
        reads = {
            prompt: dict(zip(self._token_ids, found[index], strict=True))
            for index, prompt in enumerate(self.prompts)
        }
        return [
            [
                log_sum(_score(one.prompt, tokens, reads) for tokens in option)
                for option in one.options
            ]
            for one in self._prompts
        ]


def _score(
    prompt: TokenIds, tokens: TokenIds, reads: Mapping[TokenIds, Mapping[int, float]]
) -> float:
    return sum(reads[(*prompt, *tokens[:length])][token] for length, token in enumerate(tokens))


async def _named_logprobs(generation: Generation) -> dict[int, tuple[float, ...]]:
    """Return the named log-probabilities of each choice's token, by its index, once all are there."""
    found: dict[int, tuple[float, ...]] = {}
    error: MachdError | None = None
    try:
        async for batch in generation.deltas(idle_s=_IDLE_S):
            for delta in batch:
                found.update((delta.index, one.named_logprobs) for one in delta.tokens)
    except MachdError as failed:
        error = failed
        raise
    finally:
        generation.close(error)
    return found


def log_sum(logprobs: Iterable[float]) -> float:
    """Return the log of the sum of probabilities; minus infinity for none."""
    given = list(logprobs)
    most = max(given, default=-math.inf)
    if most == -math.inf:
        return most
    return most + math.log(math.fsum(math.exp(one - most) for one in given))


def softmax(logprobs: Sequence[float], *, temperature: float = 1.0) -> list[float]:
    """Return probabilities that sum to 1 from log-probabilities, at least one; equal ones if each is minus infinity."""
    most = max(logprobs)
    if most == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((one - most) / temperature) for one in logprobs]
    whole = math.fsum(weights)
    return [one / whole for one in weights]
