"""The prefix cache's figures as a person reads them: what was found, and what it saves and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from machd.bench.cells import (
    NONE,
    number,
    p50_ms,
    plain_table,
    right_aligned,
    seconds,
    titled,
)
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.full_cache import FULL_CACHE_GOAL, FullCacheFigures
from machd.bench.prefix.kv_formats import (
    JUDGED_FORMAT,
    KV_ROWS_GOAL,
    KV_SPEED_GOAL,
    KvFormatFigures,
)
from machd.bench.prefix.latency import (
    LEAST_JUDGED_TOKENS,
    RESTARTED_GOAL,
    WARM_GOAL,
    PrefixLatencyFigures,
)
from machd.bench.prefix.sharing import SHARING_GOAL, SharingFigures, SharingSide
from machd.bench.prefix.steps import StepFigures

_MB = 1_000_000


def prefix_tables(figures: PrefixFigures) -> Iterable[RenderableType]:
    """A table for each thing that was measured."""
    yield _steps(figures.mode, figures.steps)
    yield _latency(figures.latency)
    if figures.sharing is not None:
        yield _sharing(figures.sharing)
    if figures.full_cache is not None:
        yield _full_cache(figures.full_cache)
    if figures.kv_formats:
        yield _kv_formats(figures.kv_formats)
    if figures.skipped:
        yield Text("\n".join(f"not measured: {one}" for one in figures.skipped))


def _steps(mode: str, steps: Sequence[StepFigures]) -> RenderableType:
    table = plain_table()
    for heading in ("Step", "Description", "Expected", "Actual"):
        table.add_column(heading, no_wrap=True)
    table.add_column("TTFT", justify="right", no_wrap=True)
    table.add_column("Status", no_wrap=True)
    for one in steps:
        table.add_row(
            *(one.step, one.description, one.expected.value, one.actual.value),
            *(seconds(one.ttft_s), "PASS" if one.passed else "MISSED"),
        )
    return titled(f"The prefix cache, {mode}", table, list(_failures(steps)))


def _failures(steps: Sequence[StepFigures]) -> Iterable[str]:
    for one in steps:
        if one.passed or one.cached_tokens is None:
            continue
        line = f"{one.step}: {one.cached_tokens} of {one.prompt_tokens} tokens from the cache"
        wanted = f", at least {one.least_cached_tokens} expected" if one.least_cached_tokens else ""
        yield line + wanted


def _latency(latency: PrefixLatencyFigures) -> RenderableType:
    title = (
        f"First token of {latency.prompt_tokens or 'many'} prompt tokens, "
        f"medians of {latency.rounds}"
    )
    table = right_aligned("prompt", "first token", "of cold", "goal", "")
    table.add_row("cold: new", seconds(latency.cold.p50_s), NONE, NONE, "")
    for name, sample, ratio, goal in (
        ("warm: the same again", latency.warm, latency.warm_ratio, WARM_GOAL),
        (
            f"prefix: {latency.new_tokens} new at its end",
            latency.prefix,
            latency.prefix_ratio,
            None,
        ),
        ("after a restart", latency.restarted, latency.restarted_ratio, RESTARTED_GOAL),
    ):
        if sample is not None and ratio is not None:
            goal_cells = _most(ratio, goal, is_judged=latency.is_judged)
            table.add_row(name, seconds(sample.p50_s), f"{ratio:.3f} x", *goal_cells)
    lines = (
        [] if latency.is_judged else [f"The goals are for {LEAST_JUDGED_TOKENS} tokens and more"]
    )
    return titled(title, table, lines)


def _sharing(sharing: SharingFigures) -> RenderableType:
    title = (
        f"{sharing.users} users at once, one system prompt of {sharing.system_tokens} tokens "
        f"(goal: {SHARING_GOAL:.0%} less)"
    )
    table = right_aligned(
        "users", "cache holds\nmore, MB", "cached of\nprompt tokens", "first token"
    )
    for name, side in (
        ("in one namespace", sharing.shared),
        ("one namespace each", sharing.separate),
    ):
        table.add_row(name, _mb(side.added_bytes), _cached(side), seconds(side.ttft.p50_s))
    lines = []
    if sharing.saved_share is not None:
        is_reached = sharing.saved_share >= SHARING_GOAL
        verdict = _verdict(is_reached=is_reached, is_judged=sharing.is_judged or is_reached)
        lines.append(f"Sharing takes {sharing.saved_share:.1%} less: {verdict}")
        if not sharing.is_judged:
            lines.append(f"These prompts could take {sharing.most_saved_share:.1%} less at best")
    if sharing.bytes_saved is not None:
        lines.append(
            f"The server says: {_mb(sharing.bytes_saved)} MB saved, "
            f"{sharing.shared_blocks} shared blocks"
        )
    if sharing.evictions:
        lines.append(f"note: {sharing.evictions} blocks were driven out meanwhile")
    return titled(title, table, lines)


def _full_cache(full: FullCacheFigures) -> RenderableType:
    title = (
        f"New prompts of {full.prompt_tokens} tokens in a full cache of {_mb(full.limit_bytes)} MB "
        f"(goal: at most {FULL_CACHE_GOAL:.0%} more)"
    )
    table = right_aligned("cache", "first token", "cache held at\nmost, MB", "process at\nmost, MB")
    table.add_row(
        "full", seconds(full.full.p50_s), _mb(full.highest_bytes), _mb(full.full_rss_bytes)
    )
    table.add_row("none", seconds(full.without.p50_s), NONE, _mb(full.without_rss_bytes))
    first, third = full.cost_quartiles
    verdict = _verdict(is_reached=full.is_goal_reached, is_judged=full.is_judged)
    lines = [
        f"The full cache costs {full.cost_share:+.1%}, median of {full.pairs} pairs: {verdict}",
        f"Half of the pairs lie between {first:+.1%} and {third:+.1%}",
    ]
    if full.evictions is not None and full.highest_bytes is not None:
        within = "within its limit" if full.highest_bytes <= full.limit_bytes else "OVER ITS LIMIT"
        lines.append(f"{full.evictions} blocks were driven out; {within} whenever it was asked")
    return titled(title, table, lines)


def _kv_formats(rows: Sequence[KvFormatFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"{first.streams} streams, keys and values in other formats (goals of {JUDGED_FORMAT}: "
        f"{KV_SPEED_GOAL:g} x, {KV_ROWS_GOAL:g} x)"
    )
    table = right_aligned(
        *("format", "decodes", "tokens/s", f"of\n{first.format}"),
        *("gaps,\np50, ms", "bytes a\ntoken", "rows in\nas much", ""),
    )
    for row in rows:
        rows_ratio = row.rows_ratio
        table.add_row(
            *(row.format, row.decode_mode or NONE, number(row.generation_tps)),
            *(f"{row.speed_ratio:.2f} x", p50_ms(row.itl)),
            NONE if row.bytes_per_token is None else f"{row.bytes_per_token:,}",
            NONE if rows_ratio is None else f"{rows_ratio:.2f} x",
            _verdict(is_reached=_is_reached(row)) if row.format == JUDGED_FORMAT else "",
        )
    return titled(title, table)


def _most(ratio: float, goal: float | None, *, is_judged: bool) -> tuple[str, str]:
    if goal is None:
        return NONE, ""
    return f"{goal:.2f} x", _verdict(is_reached=ratio <= goal, is_judged=is_judged)


def _is_reached(row: KvFormatFigures) -> bool | None:
    """Whether a format reaches both goals; None where nobody knows how many rows it has room for."""
    if row.speed_ratio < KV_SPEED_GOAL:
        return False
    return None if row.rows_ratio is None else row.rows_ratio >= KV_ROWS_GOAL


def _verdict(*, is_reached: bool | None, is_judged: bool = True) -> str:
    if not is_judged:
        return "not judged"
    if is_reached is None:
        return "not known"
    return "reached" if is_reached else "missed"


def _cached(side: SharingSide) -> str:
    cached = NONE if side.cached_tokens is None else str(side.cached_tokens)
    return f"{cached} of {side.prompt_tokens}"


def _mb(size_bytes: int | None) -> str:
    return NONE if size_bytes is None else number(size_bytes / _MB)
