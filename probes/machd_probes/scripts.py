"""Scripts in which rows share a batch: when each row joins, with what parameters, and when it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import Lane, SampledToken
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join, play

LENGTHS = (5, 7, 17, 18, 41, 44, 1)
"""Prompt lengths that share no block size."""

MIXED = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.5, top_k=7, seed=2, top_logprobs=0),
    SamplingParams(temperature=1.0, top_p=0.7, seed=3, frequency_penalty=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, top_logprobs=5),
    SamplingParams(temperature=0.0, logit_bias=((7, 4.0), (90, -100.0)), top_logprobs=2),
    SamplingParams(temperature=2.5, min_p=0.05, seed=-4, top_logprobs=3, repetition_penalty=0.9),
)
"""As different as parameters can be, one for each of :data:`LENGTHS`."""


@dataclass(frozen=True)
class Script:
    """Rows that join and leave, and how many may run at once."""

    joins: tuple[Join, ...]
    slots: int | None = None
    prefills_alone: bool = False

    def play(self, engine: Engine) -> list[list[SampledToken]]:
        """Each row's tokens."""
        return play(engine, self.joins, slots=self.slots, prefills_alone=self.prefills_alone)


def random_prompt(length: int, seed: int, vocabulary_tokens: int = 128) -> tuple[int, ...]:
    """Token ids that are the same every time, 0 not among them."""
    random = np.random.default_rng((seed, length))
    return tuple(int(one) for one in random.integers(1, vocabulary_tokens, length))


def scripts(prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Script]:
    """The ways in which seven rows can share a batch, each row with some ``tokens`` to say."""
    assert len(prompts) == len(MIXED), "one prompt for each set of parameters"
    rows = [Join(prompt, tokens) for prompt in prompts]
    staggered = [replace(row, at_step=2 * number) for number, row in enumerate(rows)]
    mixed = [
        replace(row, sampling=sampling) for row, sampling in zip(staggered, MIXED, strict=True)
    ]
    return {
        "two": Script(tuple(rows[3:5])),
        "three": Script(tuple(rows[1:4])),
        "four": Script(tuple(rows[2:6])),
        "seven": Script(tuple(rows)),
        "staggered": Script(tuple(staggered)),
        "early leaves": _early_leaves(rows),
        "down to one and up again": _down_to_one(rows, tokens),
        "slots taken again": _taken_again(rows),
        "mixed parameters": Script(tuple(mixed)),
        "mixed parameters, one greedy row": Script(
            tuple(replace(row, sampling=MIXED[1 - number % 2]) for number, row in enumerate(rows))
        ),
        "chunked prefill": _chunked(mixed),
        "chunked prefill, nobody decoding": replace(_chunked(staggered), prefills_alone=True),
        "two lanes": Script(
            tuple(
                replace(row, lane=(Lane.BATCH, Lane.SERIAL)[number % 2])
                for number, row in enumerate(mixed)
            )
        ),
        "two lanes in one plan": Script(
            tuple(
                replace(row, at_step=2, lane=(Lane.SERIAL, Lane.BATCH)[number % 2])
                for number, row in enumerate(rows)
            )
        ),
        "short prompts in one plan": _short_prompts(rows),
        "prompts of one token": _one_token(rows),
    }


def _early_leaves(rows: Sequence[Join]) -> Script:
    """The middle row, the first and the last leave, with the next token in flight."""
    leaving = {3: 2, 0: 4, 6: 6}
    return Script(
        tuple(replace(row, leaves_after=leaving.get(number)) for number, row in enumerate(rows))
    )


def _down_to_one(rows: Sequence[Join], tokens: int) -> Script:
    """All but one end or leave, it goes on alone for a while, then others join."""
    first = [
        replace(rows[0], tokens=3),
        rows[4],
        replace(rows[2], leaves_after=2),
    ]
    later = [replace(row, at_step=tokens // 2) for row in (rows[1], rows[5])]
    return Script((*first, *later))


def _taken_again(rows: Sequence[Join]) -> Script:
    """Twice as many rows as slots, of different lengths, some of them leaving early."""
    lives = [
        replace(row, tokens=3 + 2 * number, leaves_after=2 if number % 3 == 1 else None)
        for number, row in enumerate(rows)
    ]
    return Script((*lives, *(replace(row, sampling=MIXED[1]) for row in lives)), slots=3)


def _chunked(rows: Sequence[Join]) -> Script:
    """Prompts come in pieces of three to nine tokens beside rows that decode."""
    return Script(
        tuple(replace(row, chunk_tokens=3 + number) for number, row in enumerate(rows)), slots=5
    )


def _one_token(rows: Sequence[Join]) -> Script:
    """Rows that nothing is computed of join a batch while others take their last tokens."""
    ending = [replace(row, tokens=2 + number) for number, row in enumerate(rows[:3])]
    single = [replace(row, prompt=row.prompt[:1], at_step=at) for at, row in enumerate(rows[:4])]
    return Script((*ending, rows[5], *single))


def _short_prompts(rows: Sequence[Join]) -> Script:
    """Four short prompts, of which two are equal, are computed in one plan beside two rows."""
    short = [
        replace(row, prompt=row.prompt[:length], at_step=3)
        for row, length in zip(rows[2:6], (3, 5, 3, 8), strict=True)
    ]
    return Script((*rows[:2], *short, replace(short[0], sampling=MIXED[1])))
