"""What guessing ahead gained, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from machd.bench.cells import NONE, columns, number, right_aligned, seconds, titled
from machd.bench.goal import Verdict
from machd.bench.speculation.figures import (
    GuessFigures,
    SpeculationFigures,
    Spread,
    WorkloadFigures,
)
from machd.bench.speculation.plan import LEAST_JUDGED_ROUNDS

_POSITIONS_SHOWN = 8


def speculation_tables(figures: SpeculationFigures) -> Iterable[RenderableType]:
    """A table for each thing that was measured, and what is to be known of them."""
    yield _ratios(figures)
    yield _rounds(figures.workloads)
    yield _guesses(figures.workloads)
    if any(one.guesses and one.guesses.drafted_by_position for one in figures.workloads):
        yield _positions(figures.workloads)
    yield _prompts(figures.workloads)
    if lines := list(_notes(figures)):
        yield Text("\n".join(lines))


def _ratios(figures: SpeculationFigures) -> RenderableType:
    mode = figures.mode
    if figures.active_mode not in {None, mode}:
        mode = f"{mode} (so {figures.active_mode})"
    title = (
        f"Guessing ahead, {mode}, against off: {figures.tokens} tokens an answer, "
        f"{figures.rounds} rounds"
    )
    table = right_aligned(
        *("workload", "tokens/s,\noff", "tokens/s,\non", "on over\noff"),
        *("half of the\nrounds", "goal"),
        no_wrap=True,
    )
    table.add_column("", no_wrap=True)
    for one in figures.workloads:
        ratio = one.ratio
        table.add_row(
            *(one.workload.value, number(one.off_tps.p50), number(one.on_tps.p50)),
            *(f"{ratio.p50:.2f} x", f"{ratio.p25:.2f} to {ratio.p75:.2f}"),
            *(f"{one.goal:.2f} x", one.verdict.value),
        )
    return titled(title, table)


def _rounds(workloads: Sequence[WorkloadFigures]) -> RenderableType:
    quartiles = columns("p25", "p50", "p75")
    table = right_aligned(
        *("workload", f"tokens/s, off\n{quartiles}", f"tokens/s, on\n{quartiles}"),
        *("first token,\noff", "first token,\non"),
        no_wrap=True,
    )
    for one in workloads:
        table.add_row(
            *(one.workload.value, _quartiles(one.off_tps), _quartiles(one.on_tps)),
            *(seconds(one.off_ttft.p50_s), seconds(one.on_ttft.p50_s)),
        )
    return titled("Tokens/s of the rounds, from an answer's first token to its last", table)


def _guesses(workloads: Sequence[WorkloadFigures]) -> RenderableType:
    table = right_aligned(
        "workload",
        *("guessed", "right", "share", "passes\nwith"),
        *("tokens\na pass", "given\nup", "same\ntexts"),
        no_wrap=True,
    )
    for one in workloads:
        same = f"{one.pairs - one.different_texts} of {one.pairs}"
        table.add_row(one.workload.value, *_guess_cells(one.guesses), same)
    return titled("Guesses: tokens, and passes that verified any", table)


def _guess_cells(guesses: GuessFigures | None) -> list[str]:
    if guesses is None:
        return [NONE] * 6
    return [
        str(guesses.drafted_tokens),
        str(guesses.accepted_tokens),
        _share(guesses.acceptance),
        _count(guesses.cycles),
        f"{guesses.tokens_per_pass:.2f}",
        _count(guesses.fallbacks),
    ]


def _positions(workloads: Sequence[WorkloadFigures]) -> RenderableType:
    shares = {
        one.workload.value: one.guesses.acceptance_by_position[:_POSITIONS_SHOWN]
        for one in workloads
        if one.guesses is not None
    }
    width = max(len(one) for one in shares.values())
    table = right_aligned(
        "workload", *(str(position + 1) for position in range(width)), no_wrap=True
    )
    for workload, row in shares.items():
        table.add_row(workload, *map(_share, row), *[NONE] * (width - len(row)))
    return titled("Share of guesses that were right with all before them, by position", table)


def _prompts(workloads: Sequence[WorkloadFigures]) -> RenderableType:
    table = right_aligned(
        *("prompt", "tokens\nof it", "on over\noff", "guessed", "right", "share"),
        *("tokens\na pass", "same\ntexts"),
        no_wrap=True,
    )
    for workload in workloads:
        for one in workload.prompts:
            rounds = workload.pairs // len(workload.prompts)
            guessed, right, share, _, per_pass, _ = _guess_cells(one.guesses)
            table.add_row(
                *(f"{workload.workload.value}, {one.prompt}", str(one.prompt_tokens)),
                *(f"{one.ratio:.2f} x", guessed, right, share, per_pass),
                f"{rounds - one.different_texts} of {rounds}",
            )
    return titled("Each prompt", table)


def _notes(figures: SpeculationFigures) -> Iterable[str]:
    workloads = figures.workloads
    if all(one.guesses is not None and not one.guesses.drafted_tokens for one in workloads):
        reason = f": {figures.reason}" if figures.reason else ""
        yield f"note: nothing was guessed{reason}"
    different = sum(one.different_texts for one in workloads)
    if different:
        pairs = sum(one.pairs for one in workloads)
        yield (
            f"note: {different} of {pairs} answers differ with and without guesses: where two "
            "tokens are as likely as each other, another width of a pass may choose the other"
        )
    if figures.rounds < LEAST_JUDGED_ROUNDS:
        yield f"note: goals are judged from {LEAST_JUDGED_ROUNDS} rounds on"
    elif any(one.verdict is Verdict.NOT_SHOWN for one in workloads):
        yield "note: not shown is what rounds do not agree on: ask for more --speculation-rounds"


def _quartiles(spread: Spread) -> str:
    return columns(*(number(one) for one in (spread.p25, spread.p50, spread.p75)))


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _count(count: int | None) -> str:
    return NONE if count is None else str(count)
