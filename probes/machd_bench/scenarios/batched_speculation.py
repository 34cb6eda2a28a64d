"""Speculative decoding in a batch against none: several streams that quote, and several of free prose.

Two daemons with continuous batching run side by side, one with ``speculation.mode = "off"``. Every
load is sent to both, in turns of which is first. Each stream has a prompt of its own, and no two begin alike.
Before the first round each load is sent once: prompts are in the prefix cache from then on, so that
what is timed is decoding, and the daemon has measured what its passes cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from machd.served.capabilities import Capabilities
from machd_bench.answer import Answer, tokens_per_second
from machd_bench.bench import Bench, Mode, settled, together
from machd_bench.report import Row, percentiles
from machd_bench.scenario import Scenario
from machd_bench.scenarios.draft_counters import read_counters
from machd_bench.scenarios.speculation import OFF, SETTLED_S, as_chat, prompt_text
from machd_bench.server import Server

STREAMS = (1, 2, 4, 8)
_NAMES = {
    "quote": ("letter", "story", "ferry", "orchard", "minutes", "recipe", "station", "code"),
    "prose": ("fisherman", "bread", "train", "harbour", "letter", "bees", "clock", "walk"),
}
"""A load of N streams has the first N of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One load's answers without drafts and with them, and the counters of drafts."""

    off: Sequence[Answer]
    on: Sequence[Answer]
    counters: Counter[str]

    @property
    def ratio(self) -> float:
        """Tokens/s with drafts over those without, each by the wall time of the whole load."""
        return tokens_per_second(self.on) / tokens_per_second(self.off)


def batch_row(workload: str, streams: int, batches: Sequence[Batch], reason: str | None) -> Row:
    """Sum up the rounds of one load.

    Args:
        workload: What the streams do.
        streams: How many there are.
        batches: One for each round.
        reason: What the daemon says of drafts in a batch after the last of them.
    """
    first, ratio, third = np.percentile([one.ratio for one in batches], (25, 50, 75)).tolist()
    counters = sum((one.counters for one in batches), Counter[str]())
    drafted, accepted = counters["draft_tokens"], counters["accepted_tokens"]
    answers = [answer for one in batches for answer in one.on]
    tokens = sum(answer.completion_tokens for answer in answers)
    pairs = [pair for one in batches for pair in zip(one.off, one.on, strict=True)]
    return Row(
        case=f"{workload}, {streams} stream{'s' * (streams > 1)}",
        figures={
            "workload": workload,
            "streams": streams,
            "off_tps": float(np.median([tokens_per_second(one.off) for one in batches])),
            "on_tps": float(np.median([tokens_per_second(one.on) for one in batches])),
            "p25_ratio": first,
            "ratio": ratio,
            "p75_ratio": third,
            **percentiles("off_ttft", (off.ttft_s for off, _ in pairs)),
            **percentiles("on_ttft", (on.ttft_s for _, on in pairs)),
            "differ": sum(off.text != on.text for off, on in pairs),
            "rounds": len(batches),
            "completion_tokens": tokens,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "drafted_share": drafted / tokens,
            "accepted_share": accepted / drafted if drafted else None,
            # Of a row: passes without drafts included, each of which makes one token.
            "tokens_per_pass": tokens / max(1, tokens - accepted),
            "fallbacks": counters["fallbacks"],
            "reason": reason,
        },
        samples={"round_ratio": [one.ratio for one in batches]},
    )


async def _batched_speculation(bench: Bench) -> AsyncGenerator[Row]:
    plan, width = bench.plan, max(STREAMS)
    loads = [(workload, streams) for workload in _NAMES for streams in STREAMS]
    args = ("--continuous-batching", "--continuous-batching-max-b", str(width), "--cache-prefix")
    async with bench.serve(*args, "--speculation-mode", OFF) as off:
        if not bench.has_room(off, "speculation-batched") or not _is_batched(bench, off):
            return
        async with bench.serve(*args, "--speculation-mode", plan.speculation_mode) as on:
            servers = (await as_chat(off), await as_chat(on))
            batches: dict[tuple[str, int], list[Batch]] = {load: [] for load in loads}
            reasons: dict[tuple[str, int], str | None] = {}
            for number in range(-1, plan.speculation_rounds):
                bench.progress.say(
                    f"batched speculation, round {number + 1} of {plan.speculation_rounds}"
                )
                for index, load in enumerate(loads):
                    batch = await _ask_both(
                        bench, servers, load, is_on_first=bool((number + index) % 2)
                    )
                    if number >= 0:
                        batches[load].append(batch)
                        reasons[load] = await _reason(servers[1])
    for workload, streams in loads:
        of_load = batches[workload, streams]
        yield batch_row(workload, streams, of_load, reasons[workload, streams])
    said = {reason for (_, streams), reason in reasons.items() if streams == width and reason}
    bench.notes.extend(f"drafts in a batch of {width}: {reason}" for reason in sorted(said))


async def _ask_both(
    bench: Bench, servers: tuple[Server, Server], load: tuple[str, int], *, is_on_first: bool
) -> Batch:
    """Send one load to both servers, the one without drafts being the first of the pair."""
    workload, streams = load
    texts = [prompt_text(workload, name) for name in _NAMES[workload][:streams]]
    read = partial(read_counters, servers[1])
    before = await settled(read, SETTLED_S)
    answers: dict[bool, list[Answer]] = {}
    for is_on in (is_on_first, not is_on_first):
        server, tokens = servers[is_on], bench.plan.speculation_tokens
        answers[is_on] = await together(server.ask(text, tokens) for text in texts)
        bench.progress.advance(streams)
    counters = await settled(read, SETTLED_S)
    counters.subtract(before)
    return Batch(answers[False], answers[True], counters)


def _is_batched(bench: Bench, server: Server) -> bool:
    """Tell whether the model is decoded in batches; note what is left out if not."""
    mode = server.capabilities.decode_mode if server.capabilities else None
    if mode is None or mode.active == "batched":
        return True
    bench.notes.append(f"speculation-batched left out: {mode.active}: {mode.reason}")
    return False


async def _reason(server: Server) -> str | None:
    """Ask the daemon what it says of drafts in a batch by now, its estimate of their gain included."""
    found = await server.look_up("/v1/capabilities", Capabilities)
    verdict = found.batched_specdec if found else None
    return verdict.reason if verdict else None


BATCHED_SPECULATION = Scenario(
    name="speculation-batched",
    about="streams at once without drafts and with them; drafted: of the tokens that came",
    run=_batched_speculation,
    modes=frozenset({Mode.SETTINGS}),
    columns=(
        *("on_tps", "p25_ratio", "ratio", "p75_ratio"),
        *("drafted_share", "accepted_share", "differ"),
    ),
    streams=lambda _plan: max(STREAMS),
    requests=lambda plan: 2 * (plan.speculation_rounds + 1) * sum(STREAMS) * len(_NAMES),
    starts_servers=True,
    has_goal=False,
)
