"""Log events on a terminal: a request is one line of its width, other events are their name and fields.

A file or a pipe gets every field; a person who watches gets what fits.
"""

from __future__ import annotations

import shutil

import structlog
from structlog.typing import EventDict, WrappedLogger

_DIM, _RED, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"


_UNSEEN = frozenset({"logger", "last_lines"})
"""Fields that a terminal does not show: an engine process's last lines stand there above the event."""


class TerminalRenderer:
    """The last processor of a log on a terminal."""

    def __init__(self) -> None:
        """Render in colours; tracebacks are plain, since one that shows locals would show prompts."""
        self._others = structlog.dev.ConsoleRenderer(
            colors=True,
            exception_formatter=structlog.dev.plain_traceback,
            pad_event_to=0,
            pad_level=False,
        )

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        """Return the event's text."""
        if event.get("event") == "request.finished":
            line = request_line(event, shutil.get_terminal_size().columns)
            time, _, rest = line.partition(" ")
            colour = _RED if event.get("error") else ""
            return f"{_DIM}{time}{_RESET} {colour}{rest}{_RESET}"
        fields = {
            name: one for name, one in event.items() if one is not None and name not in _UNSEEN
        }
        return self._others(logger, method, fields)


def request_line(event: EventDict, columns: int) -> str:
    """The line of a finished request, with as many of its facts as fit, the most telling ones first."""
    begin = f"{event['timestamp']} {event['endpoint']} {event['prompt_tokens']} in"
    cached = event["cached_tokens"]
    facts = [
        # In the order of the line, each with its rank.
        (4, f" ({cached} cached)" if cached else ""),
        (0, f", {event['completion_tokens']} out"),
        (2, _time(", ttft ", event["ttft_ms"])),
        (3, "" if event["generation_tps"] is None else f", {event['generation_tps']} tokens/s"),
        (7, "" if event["decode_mode"] is None else f", {event['decode_mode']}"),
        (5, _time(", in all ", event["latency_ms"])),
        (0, f", {event['error'] or event['finish_reason']}"),
        (6, "" if event["client"] == "anonymous" else f", {event['client']}"),
        (1 if event["error"] else 8, f", {event['request_id']}"),
    ]
    kept = {0}
    for rank in sorted({rank for rank, _ in facts} - kept):
        tried = kept | {rank}
        if len(begin) + sum(len(text) for one, text in facts if one in tried) > columns:
            break
        kept = tried
    return begin + "".join(text for rank, text in facts if rank in kept)


def _time(label: str, duration_ms: float | None) -> str:
    if duration_ms is None:
        return ""
    shown = f"{duration_ms / 1000:.1f} s" if duration_ms >= 1000 else f"{duration_ms:.0f} ms"
    return label + shown
