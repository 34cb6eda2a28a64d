"""Comparison of a row in company with the same row alone, to the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import SampledToken
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join, play
from machd_probes.scripts import Script

NOISE = 1e-3
"""Log-probabilities may differ by so much: rounding was measured at 5e-5 and less in float32."""


class Alone:
    """The tokens of rows that run alone. Each row is computed once, by an engine that has no other row then."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        """Take what makes an engine of the class under test."""
        self._make_engine = make_engine
        self._known: dict[Join, list[SampledToken]] = {}
        self._idle_engine: Engine | None = None

    def differences(self, script: Script, together: list[list[SampledToken]]) -> list[str]:
        """Return where the script's rows said something else than alone."""
        return [
            f"row {number}, {join.sampling}: {difference}"
            for number, (join, tokens) in enumerate(zip(script.joins, together, strict=True))
            for difference in differences(self.tokens(join), tokens, join.sampling)
        ]

    def tokens(self, join: Join) -> list[SampledToken]:
        """The row's tokens, its prompt cut as in the script, with two log-probabilities at least."""
        asked = max(2, join.sampling.top_logprobs or 0)
        row = Join(
            join.prompt,
            tokens=0,
            sampling=replace(join.sampling, top_logprobs=asked),
            chunk_tokens=min(join.chunk_tokens, len(join.prompt)),
        )
        known = self._known.get(row, [])
        if len(known) < join.given_tokens:
            # A row's first tokens are the same however many follow.
            known = self._known[row] = self._play(replace(row, tokens=join.given_tokens))
        return known[: join.given_tokens]

    def _play(self, row: Join) -> list[SampledToken]:
        # An engine that failed is not used again.
        engine, self._idle_engine = self._idle_engine or self._make_engine(), None
        (tokens,) = play(engine, [row])
        engine.reset()
        self._idle_engine = engine
        return tokens


def differences(
    alone: Sequence[SampledToken], together: Sequence[SampledToken], sampling: SamplingParams
) -> list[str]:
    """Tokens and log-probabilities that differ by more than noise.

    A greedy row is followed up to the first place where its two best tokens are as near to one
    another as noise: from there on both answers are right.
    """
    if len(alone) != len(together):
        return [f"{len(together)} tokens instead of {len(alone)}"]
    found: list[str] = []
    for position, (one, other) in enumerate(zip(alone, together, strict=True)):
        if one.token_id != other.token_id:
            if _is_undecided(one, sampling):
                return found
            return [*found, f"token {position} is {other.token_id} instead of {one.token_id}"]
        if sampling.top_logprobs is not None and _logprob_error(one, other, sampling) > NOISE:
            found.append(f"log-probabilities of token {position} are off")
    return found


def margins(tokens: Sequence[SampledToken]) -> list[float]:
    """By how much the most likely token beat the next, in nats."""
    return [_margin(token) for token in tokens]


def _margin(token: SampledToken) -> float:
    best, second = token.top_logprobs[:2]
    return best.logprob - second.logprob


def _is_undecided(token: SampledToken, sampling: SamplingParams) -> bool:
    plain = replace(sampling, top_logprobs=None, seed=0) == GREEDY
    return plain and _margin(token) <= NOISE


def _logprob_error(one: SampledToken, other: SampledToken, sampling: SamplingParams) -> float:
    """The largest difference; infinite where something is missing or too much."""
    asked = sampling.top_logprobs or 0
    if one.logprob is None or other.logprob is None or len(other.top_logprobs) != asked:
        return float("inf")
    pairs = [
        (one.logprob, other.logprob),
        # By rank: two tokens that are equally likely may swap places.
        *(
            (first.logprob, second.logprob)
            for first, second in zip(one.top_logprobs[:asked], other.top_logprobs, strict=True)
        ),
    ]
    return max(abs(first - second) for first, second in pairs)
