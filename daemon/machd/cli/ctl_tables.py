"""What ``machd ctl`` shows to a person: 80 columns, and no colour in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from machd.api.admin_events import AdminEvent
from machd.api.admin_requests import OpenRequest
from machd.api.admin_status import AdminStatus, ModeStatus
from machd.cli.ctl_text import plain, say

__all__ = ["event_line", "print_requests", "print_status"]

_STATE_STYLES = {"ready": "bold green", "draining": "bold yellow", "failed": "bold red"}
_MB = 1_000_000


def print_status(status: AdminStatus) -> None:
    """Write a line for each thing."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in _status_lines(status):
        table.add_row(label, text if isinstance(text, Text) else plain(text))
    _print(table)


def print_requests(requests: Iterable[OpenRequest]) -> None:
    """Write two lines for each request: how far it is, and whose it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ID", overflow="fold")
    for name in ("STATE", "AGE", "TTFT", "PROMPT", "DONE"):
        table.add_column(name, no_wrap=True, justify="left" if name == "STATE" else "right")
    for one in requests:
        table.add_row(
            plain(one.id),
            plain((one.state == "running" and one.decode_mode) or one.state),
            plain(f"{one.age_s:.1f} s"),
            plain("-" if one.ttft_s is None else f"{one.ttft_s:.2f} s"),
            plain(str(one.prompt_tokens)),
            plain(str(one.completion_tokens)),
        )
        table.add_row(plain(f"  {one.endpoint}, {one.client}, {one.request_id}", "dim"))
    if table.row_count:
        _print(table)
    else:
        say("no open requests")


def event_line(event: AdminEvent, time_of_day: str) -> str:
    """One event as one line: when, what, and its facts."""
    facts = msgspec.structs.asdict(event)
    del facts["at"]
    told = " ".join(f"{name}={_fact(value)}" for name, value in facts.items() if value is not None)
    return f"{time_of_day} {event.__struct_config__.tag:<9} {told}"


def _status_lines(status: AdminStatus) -> Iterator[tuple[str, Text | str]]:
    state = plain(status.state, _STATE_STYLES.get(status.state, ""))
    yield "state", state if status.reason is None else state + plain(f": {status.reason}")
    yield "up", f"{_duration(status.uptime_s)}, machd {status.version}"
    yield "model", status.model or "loading"
    if status.decode_mode is not None:
        yield "decode mode", _mode(status.decode_mode)
    sequences = f"{status.running} running in {status.slots} slots, {status.waiting} waiting"
    yield "requests", f"{status.open_requests} open; sequences: {sequences}"
    yield "speed", f"{status.tokens_per_s:.1f} tokens/s over the last ten seconds"
    if status.kv is not None:
        used_mb, reserved_mb = status.kv.used_bytes / _MB, status.kv.reserved_bytes / _MB
        budget_mb = status.kv.budget_bytes / _MB
        yield (
            "KV cache",
            f"{used_mb:.1f} MB used, {reserved_mb:.1f} MB reserved of {budget_mb:.0f} MB",
        )
    responses = status.responses
    yield "responses", f"{responses.count} stored, {responses.size_bytes / _MB:.1f} MB"
    lag_ms = status.event_loop_lag_s * 1000
    yield "engine", f"heartbeat {status.heartbeat_age_s:.1f} s ago; event loop {lag_ms:.0f} ms late"
    yield "settings", _settings(status)
    yield "faults", f"{status.faults.row} of sequences, {status.faults.engine} of the engine"


def _mode(mode: ModeStatus) -> str:
    switching = f", switching to {mode.requested}" if mode.is_switching else ""
    wanted = "" if mode.requested == mode.active else f" ({mode.requested} is asked for)"
    return f"{mode.active}{switching or wanted}: {mode.reason}"


def _settings(status: AdminStatus) -> Text:
    change = status.config
    if not change.ok:
        text = f"{change.kind} at {change.at} was refused: {'; '.join(change.problems)}"
        return plain(text, "yellow")
    changed = f"; changed {', '.join(change.changed)}" if change.changed else ""
    return plain(f"as of the {change.kind} at {change.at}{changed}")


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _fact(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _print(table: Table) -> None:
    console = Console(highlight=False)
    with console.capture() as written:
        console.print(table)
    # rich fills every line up to the width, which a file or a pipe does not want.
    lines = (line.rstrip() for line in written.get().splitlines())
    click.echo("\n".join(lines), color=True)
