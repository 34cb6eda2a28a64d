"""Clients that start together and keep one request open each, level after level."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from machd_bench.answer import Answer, all_gaps_s, tokens_per_second, wall_s
from machd_bench.bench import Bench, Mode, together
from machd_bench.report import Row, percentiles
from machd_bench.scenario import SERVED, Scenario
from machd_bench.scenarios.ceiling import add_ceiling


async def _sweep(bench: Bench) -> AsyncGenerator[Row]:
    plan = bench.plan
    for clients in plan.concurrencies:
        bench.progress.say(f"{bench.mode}, {clients} clients")
        await bench.warm_up(clients)
        # Made beforehand: the client should do nothing but wait while it measures.
        prompts = bench.prompts(f"level-{clients}", plan.level_requests(clients))
        left = iter(prompts)

        async def work() -> list[Answer]:
            return [await bench.ask(prompt) for prompt in left]  # noqa: B023 - awaited in the turn

        answers = [one for done in await together(work() for _ in range(clients)) for one in done]
        width = {Mode.SINGLE: 1, Mode.REMOTE: None}.get(bench.mode, clients)
        row = Row(
            case=f"{clients} client{'s' * (clients > 1)}",
            figures={
                "clients": clients,
                "batch_width": width,
                "requests": len(answers),
                "prompt_tokens": sum(one.prompt_tokens for one in answers),
                "completion_tokens": sum(one.completion_tokens for one in answers),
                "wall_s": wall_s(answers),
                **percentiles("ttft", (one.ttft_s for one in answers)),
                **percentiles("gap", all_gaps_s(answers)),
                **percentiles("latency", (one.latency_s for one in answers)),
                "prompt_tps": sum(one.prompt_tokens for one in answers) / wall_s(answers),
                "tps": tokens_per_second(answers),
                "tokens_per_event": sum(one.completion_tokens for one in answers)
                / sum(len(one.text_s) for one in answers),
            },
        )
        await add_ceiling(bench, row, prompts[: width or 1])
        yield row


SWEEP = Scenario(
    name="sweep",
    about="clients that keep one request open each",
    run=_sweep,
    modes=SERVED | {Mode.STATIC},
    columns=(
        *("ttft_p50_s", "ttft_p99_s", "gap_p50_s", "gap_p99_s", "latency_p50_s"),
        *("tps", "ceiling_share"),
    ),
    streams=lambda plan: max(plan.concurrencies),
    requests=lambda plan: sum(map(plan.level_requests, plan.concurrencies)),
    has_goal=False,
)
