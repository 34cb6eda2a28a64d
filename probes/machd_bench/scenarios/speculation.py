"""Speculative decoding against none: texts to quote, texts to correct, and free prose.

Two daemons of the same settings run side by side, one with ``speculation.mode = "off"``. Each prompt
is asked of both, in turns of which is first, so that a machine whose speed drifts slows both. The
prompts are files beside this module, each one message of a user: texts of everyday kinds, chosen
because the embedded model, small as it is, does what they ask of it for as long as an answer is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files

import numpy as np

from machd.errors import EngineFaultError
from machd_bench.answer import Answer
from machd_bench.bench import Bench, Mode, settled
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import Scenario
from machd_bench.scenarios.draft_counters import read_counters
from machd_bench.server import Dialect, Server

OFF = "off"
SETTLED_S = 0.05
"""Between two readings of counters, until they stay as they are."""
LEAST_JUDGED_ROUNDS = 3
"""Fewer show nothing, whatever came out of them."""
_GOALS = {"quote": 2.5, "edit": 1.6, "prose": 0.98}
"""The least tokens/s with drafts, over those without."""
_NAMES = {
    "quote": ("letter", "story", "code"),
    "edit": ("notice", "bridge", "meeting"),
    "prose": ("fisherman", "bread", "train"),
}
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TimedDecode:
    """An answer, and its tokens at the first moment: several if the first pass accepted drafts."""

    answer: Answer
    first_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that came after the first moment."""
        return self.answer.completion_tokens - self.first_tokens

    @property
    def decode_s(self) -> float:
        """From the first moment to the last token."""
        return self.answer.text_s[-1] - self.answer.text_s[0]


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt's answers without drafts and with them."""

    workload: str
    name: str
    round_number: int
    off: TimedDecode
    on: TimedDecode
    counters: Counter[str]


async def _decode(server: Server, text: str, tokens: int) -> TimedDecode:
    answer = await server.ask(text, tokens)
    # As /tokenize counts them, which may be one off what was decoded.
    decode = TimedDecode(answer, max(1, len(await server.token_ids(answer.first_text))))
    if decode.decode_s <= 0 or decode.tokens <= 0:
        raise EngineFaultError("an answer came in one piece: ask for more --speculation-tokens")
    return decode


def prompt_text(workload: str, name: str) -> str:
    """Return one of the prompts that are files beside this module."""
    file = files("machd_bench.scenarios") / "speculation_prompts" / f"{workload}-{name}.txt"
    return file.read_text(encoding="utf-8").rstrip("\n")


async def _ask_both(
    off: Server, on: Server, prompt: tuple[str, str], tokens: int, turn: tuple[int, int]
) -> Pair:
    """One prompt of both servers; ``turn`` is the round's number and the prompt's."""
    workload, name = prompt
    text = prompt_text(workload, name)
    read = partial(read_counters, on)
    before = await settled(read, SETTLED_S)
    answers: dict[bool, TimedDecode] = {}
    is_on_first = bool(sum(turn) % 2)
    for is_on in (is_on_first, not is_on_first):
        answers[is_on] = await _decode(on if is_on else off, text, tokens)
    counters = await settled(read, SETTLED_S)
    counters.subtract(before)
    return Pair(workload, name, turn[0], answers[False], answers[True], counters)


def speculation_row(case: str, pairs: Sequence[Pair]) -> Row:
    """Sum up pairs of one workload or of one prompt; tokens/s are of a round's answers together."""
    rounds = [
        [pair for pair in pairs if pair.round_number == number]
        for number in sorted({pair.round_number for pair in pairs})
    ]
    off_tps = [_tps([pair.off for pair in one]) for one in rounds]
    on_tps = [_tps([pair.on for pair in one]) for one in rounds]
    ratios = [on / off for on, off in zip(on_tps, off_tps, strict=True)]
    first, ratio, third = np.percentile(ratios, (25, 50, 75)).tolist()
    counters = sum((pair.counters for pair in pairs), Counter[str]())
    drafted, accepted = counters["draft_tokens"], counters["accepted_tokens"]
    tokens = sum(pair.on.answer.completion_tokens for pair in pairs)
    row = Row(
        case=case,
        figures={
            "off_tps": float(np.median(off_tps)),
            "on_tps": float(np.median(on_tps)),
            "p25_ratio": first,
            "ratio": ratio,
            "p75_ratio": third,
            **percentiles("off_ttft", (pair.off.answer.ttft_s for pair in pairs)),
            **percentiles("on_ttft", (pair.on.answer.ttft_s for pair in pairs)),
            "differ": sum(pair.off.answer.text != pair.on.answer.text for pair in pairs),
            "rounds": len(rounds),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "accepted_share": accepted / drafted if drafted else None,
            # Passes without drafts included: each makes one token besides those it accepts, and
            # the last one may accept more than the answer has room for.
            "tokens_per_pass": tokens / max(1, tokens - accepted),
            "cycles": counters["cycles"],
            "fallbacks": counters["fallbacks"],
        },
    )
    if (least := _GOALS.get(case)) is not None:
        agree = not first < least <= third
        shown = agree and len(rounds) >= LEAST_JUDGED_ROUNDS
        name = f"{case}, tokens/s with drafts over without"
        row.goals.append(Goal.judge(name, "at least", least, ratio, shown=shown))
    return row


async def as_chat(server: Server) -> Server:
    """Messages are sent as chats, which is what they are, unless the model has no template."""
    chat = replace(server, dialect=Dialect(is_chat=True))
    try:
        await chat.ask("Say the days of the week.", _WARM_UP_TOKENS)
    except EngineFaultError:
        return server
    return chat


async def _speculation(bench: Bench) -> AsyncGenerator[Row]:
    plan, pairs = bench.plan, list[Pair]()
    prompts = [(workload, name) for workload, names in _NAMES.items() for name in names]
    async with bench.serve("--speculation-mode", OFF) as off:
        if not bench.has_room(off, "speculation"):
            return
        async with bench.serve("--speculation-mode", plan.speculation_mode) as on:
            off, on = await as_chat(off), await as_chat(on)  # noqa: PLW2901 - asked otherwise
            for number in range(plan.speculation_rounds):
                bench.progress.say(f"speculation, round {number + 1} of {plan.speculation_rounds}")
                for index, prompt in enumerate(prompts):
                    turn = (number, index)
                    pairs.append(await _ask_both(off, on, prompt, plan.speculation_tokens, turn))
                    bench.progress.advance(2)
    if on.capabilities is not None:
        said = on.capabilities.speculation
        bench.notes.append(f"speculation {plan.speculation_mode}: {said.mode}, {said.mode_reason}")
    for workload in _NAMES:
        yield speculation_row(workload, [pair for pair in pairs if pair.workload == workload])
    for workload, name in prompts:
        of_prompt = [pair for pair in pairs if (pair.workload, pair.name) == (workload, name)]
        yield speculation_row(f"{workload} {name}", of_prompt)


def _tps(decodes: Sequence[TimedDecode]) -> float:
    return sum(one.tokens for one in decodes) / sum(one.decode_s for one in decodes)


SPECULATION = Scenario(
    name="speculation",
    about="the same answers without drafts and with them; differ: pairs of other texts",
    run=_speculation,
    modes=frozenset({Mode.SETTINGS}),
    columns=(
        *("on_tps", "p25_ratio", "ratio", "p75_ratio"),
        *("accepted_share", "tokens_per_pass", "differ"),
    ),
    requests=lambda plan: 2 * plan.speculation_rounds * sum(map(len, _NAMES.values())),
    starts_servers=True,
)
