"""The most that the machine could do: a bare loop around the model, as wide as each level."""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator, Iterable, Sequence

from machd_bench.bench import Bench, Mode
from machd_bench.prompts import Prompt
from machd_bench.report import Row
from machd_bench.scenario import Scenario

_STEADY = 1.05
"""The most by which medians of steps may differ before comparisons with them get a note."""


async def add_ceiling(bench: Bench, level: Row, prompts: Sequence[Prompt]) -> None:
    """Run the bare loop while the server is idle, and hold a level against all runs so wide.

    In turns with the levels, so that a machine whose speed drifts slows both.
    """
    width = level.figures["batch_width"]
    if bench.bare is None or width is None:
        return
    if bench.bare.leaves_room:
        await _run(bench, prompts)
    runs = [run for run in bench.bare.runs if run.width == width]
    step_s = statistics.median(run.step_p50_s for run in runs)
    ceiling_tps = statistics.median(run.tps for run in runs)
    level.figures["ceiling_share"] = level.number("tps") / ceiling_tps
    if step_s and level.number("gap_p50_s"):
        level.figures["step_ratio"] = level.number("gap_p50_s") / step_s


async def _ceiling(bench: Bench) -> AsyncGenerator[Row]:
    """Sum up what has run before and between the levels; without levels, run now."""
    bare = bench.bare
    assert bare is not None, "the mode has one"
    if not bare.runs:
        await run_ceiling(bench, bench.plan.concurrencies)
    for width in sorted({run.width for run in bare.runs}):
        runs = [run for run in bare.runs if run.width == width]
        steps = [run.step_p50_s for run in runs]
        if max(steps) > _STEADY * min(steps):
            bench.notes.append(
                f"bare steps took {min(steps) * 1000:.1f} to {max(steps) * 1000:.1f} ms at width"
                f" {width}: the machine was not steady, compare ratios"
            )
        yield Row(
            case=f"width {width}",
            figures={
                "batch_width": width,
                "runs": len(runs),
                "prompt_tokens": statistics.fmean(run.prompt_tokens for run in runs),
                "prefill_s": statistics.median(run.prefill_s for run in runs),
                "step_p50_s": statistics.median(steps),
                "decode_tps": width / statistics.median(steps) if min(steps) else None,
                "tps": statistics.median(run.tps for run in runs),
            },
            samples={"run_step_p50_s": steps},
        )


async def run_ceiling(bench: Bench, widths: Iterable[int]) -> None:
    """Run the bare loop once at each width, with the prompts of the level that is so wide."""
    for width in widths:
        bench.progress.say(f"bare loop, width {width}")
        await _run(bench, bench.prompts(f"level-{width}", width))


async def _run(bench: Bench, prompts: Sequence[Prompt]) -> None:
    assert bench.bare is not None, "the mode has one"
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    await bench.bare.run_loop(texts, bench.plan.max_tokens - 1)
    bench.progress.advance()


CEILING = Scenario(
    name="ceiling",
    about="a bare loop around the model: no server, no text, a forward pass and an argmax",
    run=_ceiling,
    modes=frozenset({Mode.BARE}),
    columns=("runs", "prompt_tokens", "prefill_s", "step_p50_s", "decode_tps", "tps"),
    has_goal=False,
)
