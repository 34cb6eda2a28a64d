"""``machd ctl requests``, ``memory`` and ``log``: what the daemon does, has done, and holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import get_args

import click

from machd.admin.finished_requests import FinishedRequest, FinishedRequestList
from machd.admin.log import LoggedEventList
from machd.admin.memory import MemoryReport
from machd.admin.memory_history import MemorySample
from machd.admin.open_requests import OpenRequest
from machd.admin.requests import OpenRequestList
from machd.cli.ctl_tables import duration, request_counts, shown_size, words_table
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import json_option, plain, print_lines, say, show_answer, table_lines
from machd.link.logged_event import LoggedEvent
from machd.settings.model import LogLevel
from machd.settings.problems import printable

_LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


@click.command(short_help="List the open requests, or those that have ended.")
@click.option("--finished", "is_finished", is_flag=True, help="List the last 200 that have ended.")
@target_options
@json_option
def requests(*, is_finished: bool, as_json: bool) -> None:
    """List the open requests: what each does or waits for, and how far it is."""
    client = admin_client()
    if is_finished:
        done = client.ask("GET", "/admin/requests/finished", FinishedRequestList)
        show_answer(done, lambda one: print_finished(one.requests), as_json=as_json)
        return
    found = client.ask("GET", "/admin/requests", OpenRequestList)
    show_answer(found, lambda one: print_requests(one.requests), as_json=as_json)


@click.command()
@target_options
@json_option
def memory(*, as_json: bool) -> None:
    """Show the memory of models, processes and machine."""
    report = admin_client().ask("GET", "/admin/memory", MemoryReport)
    show_answer(report, print_memory, as_json=as_json)


@click.command(name="log")
@click.option("--level", type=click.Choice(get_args(LogLevel)), help="Leave out lower levels.")
@target_options
@json_option
def log_(*, level: str | None, as_json: bool) -> None:
    """Show the last 500 events of the log."""
    path = "/admin/log" if level is None else f"/admin/log?level={level}"
    found = admin_client().ask("GET", path, LoggedEventList)
    show_answer(found, lambda one: print_log(one.events), as_json=as_json)


WATCHING_COMMANDS = (requests, memory, log_)


def print_requests(requests: Sequence[OpenRequest]) -> None:
    """Write a line for each request with how far it is, and below it whose it is."""
    if not requests:
        say("no open requests")
        return
    table = words_table("PHASE", "AGE", "TTFT", "PROMPT", "LEFT", "DONE", "TOKENS/S")
    for one in requests:
        table.add_row(
            plain(one.phase if one.waits_for is None else f"waiting: {one.waits_for}"),
            plain(f"{one.age_s:.1f} s"),
            plain("-" if one.ttft_s is None else f"{one.ttft_s:.2f} s"),
            plain(_prompt_progress(one)),
            plain("-" if one.prefill_left_s is None else f"{one.prefill_left_s:.1f} s"),
            plain(str(one.completion_tokens)),
            plain(_rate(one)),
        )
    head, *rows = table_lines(table)
    click.echo(head, color=True)
    for one, row in zip(requests, rows, strict=True):
        click.echo(row, color=True)
        # Outside of the table, whose columns the ids would widen, and whole, for whoever copies them.
        say(f"  {one.id}")
        mode = "" if one.decode_mode is None else f", {one.decode_mode}"
        say(f"  {one.endpoint}, {one.client}, {one.request_id}{mode}{_model(one)}")
    running = sum(one.state == "running" for one in requests)
    say(request_counts(running, len(requests) - running))


def print_finished(requests: Sequence[FinishedRequest]) -> None:
    """Write a line for each request with its end and its times, and below it whose it was."""
    if not requests:
        say("no request has ended yet")
        return
    table = words_table("END", "QUEUE", "TTFT", "ALL", "PROMPT", "CACHED", "DONE", "TOKENS/S")
    for one in requests:
        table.add_row(
            plain(one.finish_reason if one.error is None else one.error),
            plain(_seconds(one.queue_ms)),
            plain(_seconds(one.ttft_ms)),
            plain(_seconds(one.latency_ms)),
            plain(str(one.prompt_tokens)),
            plain(str(one.cached_tokens)),
            plain(str(one.completion_tokens)),
            plain("-" if one.generation_tps is None else f"{one.generation_tps:.1f}"),
        )
    head, *rows = table_lines(table)
    click.echo(head, color=True)
    for one, row in zip(requests, rows, strict=True):
        click.echo(row, color=True)
        say(f"  {one.id}")
        adapter = "" if one.adapter is None else f":{one.adapter}"
        served = f"{one.model}{adapter}"
        say(f"  {_time(one.finished_at)}, {one.endpoint}, {one.client}, {one.request_id}, {served}")


def print_memory(report: MemoryReport) -> None:
    """Write a line for each kind, with the most that it was in the history."""
    print_lines(_memory_lines(report))


def print_log(events: Sequence[LoggedEvent]) -> None:
    """Write a line for each event, with its fields."""
    if not events:
        say("no event has been logged")
    for one in events:
        model = "" if one.model is None else f" model={one.model}"
        fields = "".join(f" {name}={text}" for name, text in one.fields.items())
        line = f"{_time(one.timestamp)} {one.level:<8} {one.event}{model}{fields}"
        click.secho(printable(line), fg=_LEVEL_COLOURS.get(one.level))


def _memory_lines(report: MemoryReport) -> Iterator[tuple[str, str]]:
    now, all_ = report.now, [*report.history, report.now]
    yield "weights", shown_size(now.weights_bytes)
    kv = f"{shown_size(now.kv_used_bytes)} used, {shown_size(now.kv_reserved_bytes)} reserved"
    yield "KV cache", f"{kv} of {shown_size(now.kv_budget_bytes)}"
    yield "prefix cache", shown_size(now.prefix_bytes)
    yield "buffers", f"{shown_size(now.buffers_bytes)} kept for reuse"
    most_bytes = max(one.process_bytes for one in all_)
    yield "processes", f"{shown_size(now.process_bytes)}; at most {shown_size(most_bytes)}"
    least_bytes = min(one.available_bytes for one in all_)
    of_all = f"{shown_size(now.available_bytes)} of {shown_size(now.total_bytes)}"
    yield "available", f"{of_all}; at least {shown_size(least_bytes)}"
    yield "swap", f"{shown_size(now.swap_used_bytes)} used"
    yield "pressure", _pressure(now, all_)
    yield "history", f"of {duration(now.at - all_[0].at)}, which at most and at least are of"


def _pressure(now: MemorySample, all_: Sequence[MemorySample]) -> str:
    if now.pressure is None:
        return "not told by this system"
    most = max(one.pressure or 0.0 for one in all_)
    return f"{now.pressure:.1f} % of the last ten seconds waited for memory; at most {most:.1f} %"


def _prompt_progress(request: OpenRequest) -> str:
    """The prompt's tokens, behind those that are computed while some are not."""
    whole, done = request.prompt_tokens, request.prefilled_tokens
    return str(whole) if done == whole else f"{done}/{whole}"


def _rate(request: OpenRequest) -> str:
    """Tokens a second of the phase that the request is in."""
    rate = request.prefill_tokens_per_s if request.phase == "prefill" else request.tokens_per_s
    return "-" if rate is None else f"{rate:.1f}"


def _model(request: OpenRequest) -> str:
    model = f", {request.model}" if isinstance(request.model, str) else ""
    return model if request.adapter is None else f"{model}, adapter {request.adapter}"


def _seconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1000:.2f} s"


def _time(at: str) -> str:
    """A moment in RFC 3339 as this machine's time of day."""
    return f"{datetime.fromisoformat(at).astimezone():%H:%M:%S}"
