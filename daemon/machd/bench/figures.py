"""From noted times to the figures of a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Self

from msgspec import Struct

from machd.bench.ceiling import CeilingAnswer
from machd.bench.level import LevelTimings
from machd.bench.statistics import Distribution


class CeilingFigures(Struct, frozen=True, kw_only=True):
    """What the bare loop does at one batch width, over all its runs.

    Attributes:
        prompt_tokens: Of each row, mean of the runs: what the levels' own prompts have.
        runs: How often it ran, spread over the bench.
        run_step_p50_s: Median step of each run, in their order: how far the machine drifted.
        prefill_s: Median, from the prompts to every row's first token.
        step: Seconds of a step; its median is what servers are held against.
        decode_tps: Tokens/s while stepping: the width over the median step.
        generation_tps: Tokens/s over the whole of a run, prefill and then every step; the median
            of the runs, and what servers are held against.
    """

    batch_width: int
    prompt_tokens: float
    runs: int
    run_step_p50_s: list[float]
    prefill_s: float
    step: Distribution
    decode_tps: float
    generation_tps: float

    @classmethod
    def of(cls, answers: Sequence[CeilingAnswer]) -> Self | None:
        """Sum up runs at one width; None when none of them made a step."""
        step = Distribution.of(second for answer in answers for second in answer.step_s)
        if step is None:
            return None
        width = answers[0].batch_width
        return cls(
            batch_width=width,
            prompt_tokens=statistics.fmean(answer.prompt_tokens for answer in answers),
            runs=len(answers),
            run_step_p50_s=[
                statistics.median(answer.step_s) for answer in answers if answer.step_s
            ],
            prefill_s=statistics.median(answer.prefill_s for answer in answers),
            step=step,
            decode_tps=width / step.p50_s,
            generation_tps=statistics.median(_tps(answer) for answer in answers),
        )


class CeilingShare(Struct, frozen=True, kw_only=True):
    """How near a level comes to the bare loop at its batch width.

    Attributes:
        generation: Its generation tokens/s over the bare loop's; 1 is the ceiling.
        itl_per_step: Its median inter-token latency over the bare loop's median step; 1 is the
            floor. None for answers of one token.
    """

    generation: float
    itl_per_step: float | None


class LevelFigures(Struct, frozen=True, kw_only=True):
    """One row: a mode at a concurrency.

    Attributes:
        batch_width: Rows that the mode computes together here; None where that is not known.
        wall_s: From the first request's sending to the last token.
        ttft: From sending a request to its first token.
        itl: Between a request's events with text, over all requests; None without any.
        latency: From sending a request to the end of its answer.
        prompt_tps: Prompt tokens of all requests over ``wall_s``.
        generation_tps: Completion tokens of all requests over ``wall_s``.
        tokens_per_event: Above 1 a server sends several tokens at once, and ``itl`` is between
            such events.
        ceiling: None where the bare loop did not run.
    """

    mode: str
    concurrency: int
    batch_width: int | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    wall_s: float
    ttft: Distribution
    itl: Distribution | None
    latency: Distribution
    prompt_tps: float
    generation_tps: float
    tokens_per_event: float
    ceiling: CeilingShare | None = None

    @classmethod
    def of(
        cls,
        measured: LevelTimings,
        ceilings: Iterable[CeilingFigures],
    ) -> Self:
        """Sum up a level, and hold it against the bare loop at its width."""
        level, timings, wall_s = measured.level, measured.timings, measured.wall_s
        completion_tokens = sum(one.completion_tokens for one in timings)
        prompt_tokens = sum(one.prompt_tokens for one in timings)
        itl = Distribution.of(gap_s for one in timings for gap_s in one.gaps_s)
        generation_tps = completion_tokens / wall_s
        return cls(
            mode=level.mode,
            concurrency=level.concurrency,
            batch_width=level.batch_width,
            requests=len(timings),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            wall_s=wall_s,
            ttft=Distribution.of_some(one.ttft_s for one in timings),
            itl=itl,
            latency=Distribution.of_some(one.latency_s for one in timings),
            prompt_tps=prompt_tokens / wall_s,
            generation_tps=generation_tps,
            tokens_per_event=completion_tokens / sum(len(one.text_s) for one in timings),
            ceiling=next(
                (
                    _share(generation_tps, itl, ceiling)
                    for ceiling in ceilings
                    if ceiling.batch_width == level.batch_width
                ),
                None,
            ),
        )


def ceilings_of(answers: Iterable[CeilingAnswer]) -> list[CeilingFigures]:
    """The figures of every batch width, narrowest first."""
    of_width: dict[int, list[CeilingAnswer]] = {}
    for answer in answers:
        of_width.setdefault(answer.batch_width, []).append(answer)
    figures = (CeilingFigures.of(of_width[width]) for width in sorted(of_width))
    return [one for one in figures if one is not None]


def _tps(answer: CeilingAnswer) -> float:
    """Every row's first token and those of every step, over the time of all of it."""
    tokens = answer.batch_width * (1 + len(answer.step_s))
    return tokens / (answer.prefill_s + math.fsum(answer.step_s))


def _share(
    generation_tps: float, itl: Distribution | None, ceiling: CeilingFigures
) -> CeilingShare:
    return CeilingShare(
        generation=generation_tps / ceiling.generation_tps,
        itl_per_step=itl.p50_s / ceiling.step.p50_s if itl else None,
    )
