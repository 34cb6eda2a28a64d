"""The same deterministic request from several clients at once: does it cost one decode or many?

One stream runs alone, then three clients send another prompt of the same length at the same time.
A server that lets them share a decode takes about as long for the three as for the one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing

from msgspec import Struct

from machd.bench.client import ClientMaker
from machd.bench.level import together
from machd.bench.timing import RequestTiming, wall_s
from machd.bench.workload import Workload

COALESCING_GOAL = 1.1
"""The most that several identical streams may take, over one alone."""

COPIES = 3
_ROUNDS = 3
COALESCING_REQUESTS = _ROUNDS * (1 + COPIES)


class CoalescingFigures(Struct, frozen=True, kw_only=True):
    """One stream against several identical ones, medians of a few rounds.

    Attributes:
        copies: Identical requests sent at once.
        alone_s: From sending one request to its last token.
        together_s: From sending the first of the copies to the last token of all.
        ratio: ``together_s`` over ``alone_s``.
        coalesced: How many of the copies got the answer of another, as the server says; the
            least of all rounds.
    """

    mode: str
    copies: int
    rounds: int
    alone_s: float
    together_s: float
    ratio: float
    coalesced: int


async def run_coalescing(
    make_client: ClientMaker,
    workload: Workload,
    *,
    mode: str,
    on_request: Callable[[], None],
) -> CoalescingFigures:
    """Send one request, then the copies of another, a few times.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    alone: list[float] = []
    shared: list[float] = []
    coalesced: list[int] = []
    for number in range(_ROUNDS):
        # Another prompt for the copies: the first one's may be remembered by now.
        one, other = workload.prompts(f"coalescing-{number}", 2)
        alone.append(wall_s(await _send(make_client, workload, [one], on_request)))
        timings = await _send(make_client, workload, [other] * COPIES, on_request)
        shared.append(wall_s(timings))
        coalesced.append(sum(timing.leader_id is not None for timing in timings))
    alone_s, together_s = statistics.median(alone), statistics.median(shared)
    return CoalescingFigures(
        mode=mode,
        copies=COPIES,
        rounds=_ROUNDS,
        alone_s=alone_s,
        together_s=together_s,
        ratio=together_s / alone_s,
        coalesced=min(coalesced),
    )


async def _send(
    make_client: ClientMaker,
    workload: Workload,
    prompts: Sequence[str],
    on_request: Callable[[], None],
) -> list[RequestTiming]:
    timings: list[RequestTiming] = []

    async def ask(prompt: str) -> None:
        async with aclosing(make_client()) as client:
            timings.append(await client.complete(prompt, workload.max_tokens))
            on_request()

    await together(ask(prompt) for prompt in prompts)
    return timings
