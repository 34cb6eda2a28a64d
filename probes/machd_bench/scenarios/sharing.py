"""Many users with one system prompt, at once: what their prompts take in memory, and how long.

The same requests are sent twice. First all users are in one namespace, then each is in one of its
own (``cache_salt``), so that nobody finds what another left. What either set adds to the cache is
what the server says before and after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise

from machd_bench.answer import Answer
from machd_bench.bench import Bench
from machd_bench.prompts import make_prompts
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import SERVED, Scenario
from machd_bench.scenarios.cache_readings import PrefixStats, read_settled_prefix
from machd_bench.together import together

_GOAL = 0.80
"""The least share of the cache's bytes that a shared system prompt saves."""
_QUESTION_TOKENS = (20, 30)
_ANSWER_TOKENS = 8


async def _sharing(bench: Bench) -> AsyncGenerator[Row]:
    users = bench.plan.users
    async with bench.serve("--cache-prefix", "--cache-disk-dir", "") as server:
        if not await server.takes(cache_salt="machd-bench"):
            bench.notes.append("sharing left out: the server does not take cache_salt")
            return
        bench.progress.say(f"{bench.mode}, a shared prompt")
        vocabulary, seed = await server.vocabulary(), f"{bench.plan.seed}/sharing"
        longest = max(_QUESTION_TOKENS[1], bench.plan.system_tokens)
        system, *questions = make_prompts(seed, users + 1, longest, vocabulary)
        system = system[: bench.plan.system_tokens]
        prompts = [
            (*system, *question[: _QUESTION_TOKENS[0] + user % 11])
            for user, question in enumerate(questions)
        ]
        readings = [await read_settled_prefix(server)]
        sets: list[list[Answer]] = []
        for salts in ([None] * users, [f"user-{user}" for user in range(users)]):
            asked = [
                server.ask(prompt, _ANSWER_TOKENS, fields={"cache_salt": salt} if salt else {})
                for prompt, salt in zip(prompts, salts, strict=True)
            ]
            sets.append(await together(asked))
            bench.progress.advance(users)
            readings.append(await read_settled_prefix(server))
    added = [_added(*pair) for pair in pairwise(readings)]
    for name, answers, added_bytes in zip(("one namespace", "own ones"), sets, added, strict=True):
        figures = {
            "prompt_tokens": sum(one.prompt_tokens for one in answers),
            "cached_tokens": sum(one.cached_tokens or 0 for one in answers),
            "added_bytes": added_bytes,
            **percentiles("ttft", (one.ttft_s for one in answers)),
        }
        yield Row(case=f"{users} users, {name}", figures=figures)
    start, middle, end = readings
    if start and middle and end and added[0] is not None and added[1]:
        saved_share = 1.0 - added[0] / added[1]
        best_share = _most_saved_share(users, bench.plan.system_tokens)
        shown = best_share >= _GOAL or saved_share >= _GOAL
        yield Row(
            case="saved by sharing",
            figures={
                "saved_share": saved_share,
                "most_saved_share": best_share,
                "bytes_saved": middle.bytes_saved - start.bytes_saved,
                "shared_blocks": middle.shared_blocks - start.shared_blocks,
                "evictions": end.evictions - start.evictions,
            },
            goals=[
                Goal.at_least(
                    "share of bytes that a shared system prompt saves",
                    _GOAL,
                    saved_share,
                    shown=shown,
                )
            ],
        )


def _most_saved_share(users: int, system_tokens: int) -> float:
    """What a cache could save at best: all but one copy of the system prompt."""
    own_tokens = users * (_QUESTION_TOKENS[0] + _ANSWER_TOKENS - 1)
    return (users - 1) * system_tokens / (users * system_tokens + own_tokens)


def _added(before: PrefixStats | None, after: PrefixStats | None) -> int | None:
    return after.bytes - before.bytes if before and after else None


SHARING = Scenario(
    name="sharing",
    about="users with one system prompt ask at once, in one namespace and in one each",
    run=_sharing,
    modes=SERVED,
    columns=("added_bytes", "prompt_tokens", "cached_tokens", "ttft_p50_s", "saved_share"),
    streams=lambda plan: plan.users,
    requests=lambda plan: 2 * plan.users,
    starts_servers=True,
)
