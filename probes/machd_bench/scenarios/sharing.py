"""Many users with one system prompt, at once: the memory and the time that their prompts take.

The same requests are sent twice. First all users are in one namespace, then each is in one of its
own (``cache_salt``), so that none finds what another left. What either set adds to the cache is
what the server says before and after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from msgspec import Struct

from machd_bench.bench import Bench, settled, together
from machd_bench.prompts import make_prompts
from machd_bench.report import Figure, Goal, Row, percentiles
from machd_bench.scenario import SERVED, Scenario
from machd_bench.server import Server

_GOAL = 0.80
"""The least share of the cache's bytes that a shared system prompt saves."""
_QUESTION_TOKENS = (20, 30)
_ANSWER_TOKENS = 8
_SETTLED_S = 0.2


class _PrefixStats(Struct):
    bytes: int = 0
    bytes_saved: int = 0
    shared_blocks: int = 0
    evictions: int = 0


class _CacheStats(Struct):
    prefix: _PrefixStats


async def _read(server: Server) -> _PrefixStats | None:
    stats = await server.look_up("/v1/cache/stats", _CacheStats)
    return stats.prefix if stats else None


async def _sharing(bench: Bench) -> AsyncGenerator[Row]:
    users, system_tokens = bench.plan.users, bench.plan.system_tokens
    async with bench.serve("--cache-prefix", "--cache-disk-dir", "") as server:
        if not await server.takes(cache_salt="machd-bench"):
            bench.notes.append("sharing left out: the server does not take cache_salt")
            return
        vocabulary, seed = await server.vocabulary(), f"{bench.plan.started_unix_s}/sharing"
        longest = max(_QUESTION_TOKENS[1], system_tokens)
        system, *questions = make_prompts(seed, users + 1, longest, vocabulary)
        prompts = [
            (*system[:system_tokens], *question[: _QUESTION_TOKENS[0] + user % 11])
            for user, question in enumerate(questions)
        ]
        read = partial(_read, server)
        stats = [await settled(read, _SETTLED_S)]
        own = [{"cache_salt": f"user-{user}"} for user in range(users)]
        for case, fields in ((f"{users} users, one namespace", [{}] * users), ("own ones", own)):
            asked = zip(prompts, fields, strict=True)
            answers = await together(
                server.ask(prompt, _ANSWER_TOKENS, fields=salt) for prompt, salt in asked
            )
            bench.progress.advance(users)
            stats.append(await settled(read, _SETTLED_S))
            before, after = stats[-2:]
            figures: dict[str, Figure] = {
                "prompt_tokens": sum(one.prompt_tokens for one in answers),
                "cached_tokens": sum(one.cached_tokens or 0 for one in answers),
                "added_bytes": after.bytes - before.bytes if before and after else None,
                **percentiles("ttft", (one.ttft_s for one in answers)),
            }
            yield Row(case=case, figures=figures)
    start, middle, end = stats
    if start and middle and end and end.bytes > middle.bytes:
        saved_share = 1.0 - (middle.bytes - start.bytes) / (end.bytes - middle.bytes)
        # At best all but one copy of the system prompt is saved.
        own_tokens = users * (_QUESTION_TOKENS[0] + _ANSWER_TOKENS - 1)
        most_share = (users - 1) * system_tokens / (users * system_tokens + own_tokens)
        shown = max(most_share, saved_share) >= _GOAL
        name = "share of bytes that a shared system prompt saves"
        figures = {
            "saved_share": saved_share,
            "most_saved_share": most_share,
            "bytes_saved": middle.bytes_saved - start.bytes_saved,
            "shared_blocks": middle.shared_blocks - start.shared_blocks,
            "evictions": end.evictions - start.evictions,
        }
        goals = [Goal.judge(name, "at least", _GOAL, saved_share, shown=shown)]
        yield Row(case="saved by sharing", figures=figures, goals=goals)


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
