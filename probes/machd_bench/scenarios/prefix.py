"""The prefix cache: what each prompt should find in it, what it found, and how soon it answered.

``1a`` to ``1d`` are steps that people know from other servers; then come the beginning of a longer
prompt, the next turn of a conversation, a namespace of its own, and the same after restarts. First
tokens are medians over prompts that are new (cold), known (warm), and known in their beginning.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from machd_bench.answer import Answer
from machd_bench.bench import Bench, Mode
from machd_bench.prompts import Prompt, make_prompts
from machd_bench.report import Figure, Goal, Row, percentiles
from machd_bench.scenario import SERVED, Scenario
from machd_bench.scenarios.lookup import Lookup, is_met
from machd_bench.server import Server

_GOALS = {"warm": 0.10, "restarted": 0.25}
"""The most that a known prompt may take, over a new one: in memory, and from disk."""
_LEAST_JUDGED_TOKENS = 500
"""Below, a request costs so much beside its prompt that shares of a prompt's time say little."""
_NEW_TOKENS = 20
_STEP_TOKENS = 16
_TIMED_TOKENS = 2
_PROMPTS = 40


@dataclass(slots=True)
class _Walk:
    """The steps and times of one mode; prompts are kept over restarts."""

    bench: Bench
    prompts: list[Prompt]
    knows_lengths: bool
    steps: list[Row] = field(default_factory=list)
    times_s: dict[str, list[float]] = field(default_factory=dict)

    async def step(
        self, server: Server, name: str, prompt: Prompt, expected: Lookup, least: int = 0,
        **fields: object,
    ) -> Answer:  # fmt: skip
        answer = await server.ask(prompt, _STEP_TOKENS, fields=fields)
        self.bench.progress.advance()
        first_s = self.steps[0].number("ttft_s") if self.steps else answer.ttft_s
        is_chat = server.dialect.is_chat
        passed = is_met(expected, least, answer, first_s, is_chat=is_chat)
        figures = {
            "expected": expected.value,
            "actual": Lookup.of(answer).value,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "least_cached_tokens": least,
            "ttft_s": answer.ttft_s,
            "verdict": "PASS" if passed else "MISSED",
        }
        self.steps.append(Row(case=name, figures=figures))
        return answer

    async def walk(self, server: Server) -> None:
        first, second, new, turn = self.prompts[:4]
        one = await self.step(server, "1a first request", first, Lookup.MISS)
        await self.step(server, "1b same prompt", first, Lookup.HIT)
        await self.step(server, "1c different prompt", second, Lookup.MISS)
        await self.step(server, "1d first one again", first, Lookup.HIT)
        nine_tenths = round(0.9 * one.prompt_tokens)
        longer = _joined(first, new[:_NEW_TOKENS])
        await self.step(server, "2a longer prompt", longer, Lookup.PREFIX_HIT, nine_tenths)
        answer: Prompt = one.text.split()
        if self.knows_lengths:
            answer = await server.token_ids(one.text)
            # Half of the answer leaves room for an end that becomes other tokens than it was made
            # of; one that becomes more or fewer, as nonsense does, may part from them at once.
            same = len(answer) == one.completion_tokens
            nine_tenths = one.prompt_tokens + (one.completion_tokens // 2 if same else -1)
        next_turn = _joined(first, answer, turn[:_NEW_TOKENS])
        await self.step(server, "2b next turn", next_turn, Lookup.PREFIX_HIT, nine_tenths)
        if await server.takes(cache_salt="machd-bench"):
            await self.step(server, "3a other cache_salt", first, Lookup.MISS, cache_salt="other")
        else:
            self.bench.notes.append("step 3a left out: the server does not take cache_salt")

    async def walk_restarted(self, server: Server) -> None:
        first, second, new = self.prompts[:3]
        one = await self.step(server, "4a restarted, same", first, Lookup.HIT)
        # Of the other prompt: the first one is in memory by now.
        longer, least = _joined(second, new[:_NEW_TOKENS]), round(0.9 * one.prompt_tokens)
        await self.step(server, "4b restarted, longer", longer, Lookup.PREFIX_HIT, least)

    async def time(self, server: Server, name: str, prompt: Prompt) -> None:
        answer = await server.ask(prompt, _TIMED_TOKENS)
        self.bench.progress.advance()
        self.times_s.setdefault(name, []).append(answer.ttft_s)

    def latencies(self) -> Iterator[Row]:
        cold_s = statistics.median(self.times_s["cold"])
        shown = len(self.prompts[0]) >= _LEAST_JUDGED_TOKENS
        for name, times_s in self.times_s.items():
            ratio = statistics.median(times_s) / cold_s
            figures: dict[str, Figure] = {"ttft_s": statistics.median(times_s), "ratio": ratio}
            row = Row(case=name, figures=figures | percentiles("ttft", times_s))
            if (goal := _GOALS.get(name)) is not None:
                text = f"first token, {name} over cold"
                row.goals.append(Goal.judge(text, "at most", goal, ratio, shown=shown))
            yield row


async def _prefix(bench: Bench) -> AsyncGenerator[Row]:
    is_judged = bench.plan.prefix_tokens >= _LEAST_JUDGED_TOKENS
    rounds, restarts = (4, 2) if is_judged else (2, 1)
    with tempfile.TemporaryDirectory(prefix="machd-bench-") as folder:
        args = ("--cache-prefix", "--cache-disk-dir", str(Path(folder) / "blocks"))
        async with bench.serve(*args) as server:
            vocabulary = await server.vocabulary()
            seed = f"{bench.plan.started_unix_s}/prefix"
            prompts = make_prompts(seed, _PROMPTS, bench.plan.prefix_tokens, vocabulary)
            walk = _Walk(bench, prompts, isinstance(vocabulary[0], int))
            bench.progress.say(f"{bench.mode}, steps and times")
            await walk.walk(server)
            timed, rest = walk.prompts[4 : 4 + rounds], walk.prompts[4 + rounds :]
            for prompt, new in zip(timed, rest, strict=False):
                await walk.time(server, "cold", prompt)
                await walk.time(server, "warm", prompt)
                await walk.time(server, "prefix", _joined(prompt, new[:_NEW_TOKENS]))
        if bench.mode is Mode.REMOTE:
            bench.notes.append(
                "prefix after a restart left out: a server at --url is not restarted"
            )
            restarts = 0
        for number in range(restarts):
            async with bench.serve(*args) as server:
                if number == 0:
                    await walk.walk_restarted(server)
                for prompt in timed[number::restarts]:
                    await walk.time(server, "restarted", prompt)
    passed = sum(step.figures["verdict"] == "PASS" for step in walk.steps)
    found = Goal.judge(
        "lookups that found what they should", "at least", len(walk.steps), passed, unit="steps"
    )
    walk.steps[-1].goals.append(found)
    for row in (*walk.steps, *walk.latencies()):
        yield row


def _joined(*parts: Prompt) -> Prompt:
    return [piece for part in parts for piece in part]


PREFIX = Scenario(
    name="prefix",
    about="what prompts find in the prefix cache, and first tokens over those of new prompts",
    run=_prefix,
    modes=SERVED,
    columns=(*("expected", "actual", "ttft_s", "ratio", "verdict"),),
    requests=lambda plan: 25 if plan.prefix_tokens >= _LEAST_JUDGED_TOKENS else 17,
    starts_servers=True,
)
