"""The same deterministic request from several clients at once: does it cost one decode or many?

One stream runs alone, then three clients send another prompt of the same length at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator

from machd_bench.answer import wall_s
from machd_bench.bench import Bench
from machd_bench.report import Goal, Row
from machd_bench.scenario import BATCHED, Scenario

_COPIES = 3
_ROUNDS = 3
_GOAL = 1.1
"""The most that several identical streams may take, over one alone."""


async def _coalescing(bench: Bench) -> AsyncGenerator[Row]:
    alone_s: list[float] = []
    together_s: list[float] = []
    coalesced: list[int] = []
    for number in range(_ROUNDS):
        # Another prompt for the copies: the first one's may be remembered by now.
        one, other = bench.prompts(f"coalescing-{number}", 2)
        alone_s.append(wall_s([await bench.ask(one)]))
        answers = await bench.ask_all([(other, {})] * _COPIES)
        together_s.append(wall_s(answers))
        coalesced.append(sum(answer.is_coalesced for answer in answers))
    ratio = statistics.median(together_s) / statistics.median(alone_s)
    yield Row(
        case=f"{_COPIES} identical requests",
        figures={
            "alone_s": statistics.median(alone_s),
            "together_s": statistics.median(together_s),
            "ratio": ratio,
            "copies": _COPIES,
            "coalesced": min(coalesced),
        },
        goals=[Goal.judge(f"time of {_COPIES} together over one alone", "at most", _GOAL, ratio)],
    )


COALESCING = Scenario(
    name="coalescing",
    about="the same request from several clients at once; coalesced: those that got a copy",
    run=_coalescing,
    modes=BATCHED,
    columns=("alone_s", "together_s", "ratio", "coalesced"),
    streams=lambda _plan: _COPIES,
    requests=lambda _plan: _ROUNDS * (1 + _COPIES),
)
