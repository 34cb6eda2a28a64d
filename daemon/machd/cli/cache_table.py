"""The report of ``machd check --cache-report`` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.table import Table

from machd.cli.cache_report_document import CacheReport, Cause, LookupReport, PartCost
from machd.cli.ctl_text import counted, plain, print_lines, table_lines
from machd.cli.request_changes import ChangeKind
from machd.reading.prompt_places import PromptPart
from machd.scheduler.events import CacheReason

_MAX_SHOWN_LOOKUPS = 40
_MAX_SHOWN_LINES = 8

_CACHES = {
    "positions": "a prompt goes on behind any token of a kept one",
    "state": "a prompt goes on where a kept prompt or answer ended, or where two prompts parted before",
}

_CHANGES = {
    ChangeKind.MESSAGE_TEXT: "the text changes",
    ChangeKind.MESSAGE_CALLS: "the tool calls change",
    ChangeKind.MESSAGE_THOUGHTS: "the thoughts change",
    ChangeKind.MESSAGE_IMAGES: "the images change",
    ChangeKind.MESSAGES_REPLACED: "other messages stand there",
    ChangeKind.MESSAGES_ADDED: "messages were put in",
    ChangeKind.MESSAGES_REMOVED: "messages were taken out",
    ChangeKind.TOOLS_ORDER: "the tools' order changes",
    ChangeKind.TOOL_CHANGED: "the tool's description or parameters change",
    ChangeKind.TOOLS_ADDED: "tools were put in",
    ChangeKind.TOOLS_REMOVED: "tools were taken out",
    ChangeKind.TEMPLATE: "the chat template's own text changes",
}

_REASONS = {
    CacheReason.EVICTED: "kept once, and evicted for want of room",
    CacheReason.OTHER_NAMESPACE: "kept for another API key or salt",
    CacheReason.KIND_CANNOT: "kept, but the cache cannot begin there",
}


def print_cache_report(report: CacheReport) -> None:
    """Print the sums, the causes, and a line for each prompt."""
    print_lines(_lines(report))
    if not report.lookups:
        return
    click.echo()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("line", "prompt", "found", "computed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not more", overflow="fold")
    for one in report.lookups[:_MAX_SHOWN_LOOKUPS]:
        computed = one.prompt_tokens - one.found_tokens
        figures = (one.line, one.prompt_tokens, one.found_tokens, computed)
        table.add_row(*(f"{figure:,}" for figure in figures), plain(_why(one)))
    click.echo("\n".join(table_lines(table)))
    hidden = len(report.lookups) - _MAX_SHOWN_LOOKUPS
    if hidden > 0:
        click.echo(f"and {counted(hidden, 'prompt')} more; --json has all")


def _lines(report: CacheReport) -> Iterator[tuple[str, str]]:
    yield "model", report.model
    yield "cache", _CACHES[report.cache]
    sums = f"{report.found_tokens:,} found, {report.computed_tokens:,} computed"
    yield "prompts", f"{len(report.lookups):,} with {report.prompt_tokens:,} tokens: {sums}"
    if report.parts:
        yield "computed", ", ".join(_cost(one, report.computed_tokens) for one in report.parts)
    for cause in report.causes:
        yield "computed again", _cause(cause, report.computed_tokens)
        yield "  what to do", cause.advice
    if not report.causes and report.lookups:
        yield "computed again", "nothing that an earlier prompt had"
    for skipped in report.skipped[:_MAX_SHOWN_LINES]:
        yield "left out", f"line {skipped.line}: {skipped.reason}"
    if len(report.skipped) > _MAX_SHOWN_LINES:
        yield "left out", f"{len(report.skipped) - _MAX_SHOWN_LINES:,} lines more; --json has all"
    for note in report.notes:
        yield "note", note


def _cost(cost: PartCost, computed_tokens: int) -> str:
    share = cost.computed_tokens / max(1, computed_tokens)
    return f"{_part(cost)} {cost.computed_tokens:,} ({share:.0%})"


def _part(cost: PartCost) -> str:
    match cost.part:
        case PromptPart.MESSAGE:
            return f"{cost.role} messages"
        case PromptPart.TEXT:
            return "texts without messages"
        case PromptPart.TOOLS:
            return "tools"
        case PromptPart.TEMPLATE:
            return "the template's own text"
        case None:
            return "unknown places"


def _cause(cause: Cause, computed_tokens: int) -> str:
    what = _REASONS.get(cause.reason, "") if cause.change is None else _CHANGES[cause.change]
    where = [_place(cause.message_index, cause.role, cause.tool_index)]
    if cause.characters is not None:
        start, stop = cause.characters
        is_one = stop - start <= 1
        where.append(f"character {start:,}" if is_one else f"characters {start:,} to {stop - 1:,}")
    place = ", ".join(filter(None, where))
    lines = ", ".join(map(str, cause.lines[:_MAX_SHOWN_LINES]))
    lines += ", …" if len(cause.lines) > _MAX_SHOWN_LINES else ""
    noun = "line" if len(cause.lines) == 1 else "lines"
    saving = f"{cause.saved_tokens:,} of {computed_tokens:,} tokens"
    return f"{place}{': ' * bool(place)}{what} ({noun} {lines}); without that {saving} less"


def _place(message_index: int | None, role: str | None, tool_index: int | None) -> str:
    if tool_index is not None:
        return f"tool {tool_index}"
    if message_index is None:
        return ""
    return f"message {message_index}" + (f" ({role})" if role else "")


def _why(lookup: LookupReport) -> str:
    if lookup.reason in {CacheReason.WHOLE, CacheReason.CONTINUED}:
        return lookup.reason
    where = _place(lookup.message_index, lookup.role, lookup.tool_index)
    if lookup.part is PromptPart.TEMPLATE and where:
        where = f"before {where}"
    if lookup.character is not None:
        where += f", character {lookup.character:,}"
    return f"{lookup.reason}: {where}" if where else str(lookup.reason)
