"""Structured logs: JSON lines for machines, colours on a terminal, never a word a user typed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, Processor

from machd.clock import Clock, SystemClock
from machd.generations.record import RequestRecord
from machd.scheduler.events import DecodeModeChanged, Event, SequenceAdmitted, SequenceResumed
from machd.telemetry.log_repeats import RepeatFilter
from machd.telemetry.log_ring import EventKeeper, OnEvent
from machd.telemetry.terminal_lines import TerminalRenderer

_QUIET = (
    "uvicorn",
    "uvicorn.error",
    "uvicorn.access",
    "litestar",
    "asyncio",
    "httpx",
    "httpcore",
    "urllib3",
)
"""Libraries whose own chatter is shown from warnings on; access lines are ours to write."""


class _ModelField:
    """The processor that puts ``model`` on lines: what a line binds by itself, else the process's only model.

    A field of the process, and no context variable: those do not reach the threads that log.
    """

    def __init__(self) -> None:
        self.model_id: str | None = None

    def __call__(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        """Return the event, with the model's name if it is about one and the name is known."""
        # Taken out first: whatever names the model, the field has one place on the line.
        model_id = event.pop("model", None) or self.model_id
        if model_id is not None:
            event["model"] = model_id
        return event


_MODEL_FIELD = _ModelField()


def log_model(model_id: str | None) -> None:
    """Name the model on each line of a process that computes one, from now on, however the logs are configured.

    In the front, which may serve several, a line about a model binds ``model`` by itself; None is not shown.

    Args:
        model_id: As ``/v1/models`` names it; None for no name.
    """
    _MODEL_FIELD.model_id = model_id


def configure_logs(
    *,
    level: str,
    log_format: str,
    stream: TextIO | None = None,
    clock: Clock | None = None,
    on_event: OnEvent | None = None,
) -> None:
    """Send machd's and every library's log events to one place in one format.

    Args:
        level: The lowest that is written.
        log_format: ``json``, ``console``, or ``auto``: console on a terminal, else JSON.
        stream: Where lines go; None for standard error.
        clock: Reads time; None for the machine's.
        on_event: Called with each line that is written, on the thread that logs.
    """
    target = stream or sys.stderr
    is_console = log_format == "console" or (log_format == "auto" and target.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        _MODEL_FIELD,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(
            fmt="%H:%M:%S" if is_console else "iso", utc=not is_console
        ),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            _add_repeats,
            *([] if on_event is None else [EventKeeper(on_event)]),
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers(is_console=is_console, is_terminal=is_console and target.isatty()),
        ],
    )
    handler = logging.StreamHandler(stream) if stream else _StandardError()
    handler.setFormatter(formatter)
    handler.addFilter(RepeatFilter(clock or SystemClock()))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.setLevel(logging.WARNING)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is now: a progress bar stands in for it while it draws."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        raise AttributeError("standard error is looked up each time")


def _add_repeats(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Say on a line how many like it were left out before it."""
    if repeats := getattr(event["_record"], "repeats", 0):
        event["repeats"] = repeats
    return event


def _renderers(*, is_console: bool, is_terminal: bool) -> list[Processor]:
    """The last processors. Tracebacks are plain: one that shows locals would show prompts."""
    if is_terminal:
        return [TerminalRenderer()]
    if is_console:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


class SchedulerLog:
    """Of one model: a line for each admission, each resumption, each shared decode and each change of how tokens are made."""

    def __init__(self, model_id: Callable[[], str | None]) -> None:
        """Write to the configured log; ``model_id`` reads the model's name, None until it is known."""
        self._model_id = model_id

    def on_events(self, events: Sequence[Event]) -> None:
        """Write the lines of a step."""
        for event in events:
            if isinstance(event, SequenceAdmitted):
                self._write_admission(event)
            elif isinstance(event, SequenceResumed):
                self._log.info(
                    "sequence.resumed",
                    request_id=event.request_id,
                    reason=event.reason.value,
                    completion_tokens=event.completion_tokens,
                )
            elif isinstance(event, DecodeModeChanged):
                self._log.debug(
                    "decode_mode.changed", previous=event.previous.value, mode=event.mode.value
                )

    @property
    def _log(self) -> BoundLogger:
        log: BoundLogger = structlog.get_logger("machd.scheduler", model=self._model_id())
        return log

    def _write_admission(self, event: SequenceAdmitted) -> None:
        self._log.debug(
            "sequence.admitted",
            request_id=event.request_id,
            slot_index=event.slot_index,
            decode_mode=event.decode_mode.value,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            active_loops=event.active_loops,
            active_limit=event.active_limit,
        )
        if event.coalesced_with is not None:
            self._log.info(
                "sequence.coalesced",
                request_id=event.request_id,
                coalesced_with=event.coalesced_with,
                fanout=event.fanout,
            )


class RequestLog:
    """One ``request.finished`` line a request, whatever its model."""

    def on_request(self, record: RequestRecord) -> None:
        """Write the line."""
        log = structlog.get_logger("machd.request.generation", model=record.model or None)
        log.info(
            "request.finished",
            request_id=record.request_id,
            endpoint=record.endpoint,
            decode_mode=record.decode_mode.value if record.decode_mode else None,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            cache_reason=record.cache_reason.value if record.cache_reason else None,
            cache_parted_at_tokens=record.cache_parted_at_tokens,
            normalised=list(record.applied_rules),
            images=record.images,
            videos=record.videos,
            inputs=record.inputs,
            completion_tokens=record.completion_tokens,
            total_tokens=record.prompt_tokens + record.completion_tokens,
            queue_ms=milliseconds(record.queue_s),
            ttft_ms=milliseconds(record.ttft_s),
            prompt_tps=tokens_per_s(
                record.first_prompt_tokens - record.first_cached_tokens, record.prefill_s
            ),
            generation_tps=tokens_per_s(record.completion_tokens - 1, record.decode_s),
            total_tps=tokens_per_s(
                record.prompt_tokens + record.completion_tokens, record.duration_s
            ),
            latency_ms=milliseconds(record.duration_s),
            finish_reason=record.finish_reason,
            error=record.error_code,
            client=record.client,
            coalesced_with=record.coalesced_with,
            trace_id=record.trace.trace_id if record.trace else None,
        )


def milliseconds(seconds_s: float | None) -> float | None:
    """Round a time as a log line shows it."""
    return None if seconds_s is None else round(seconds_s * 1000, 1)


def tokens_per_s(tokens: int, seconds_s: float | None) -> float | None:
    """Round a rate as a log line shows it; None where there is none."""
    return round(tokens / seconds_s, 1) if seconds_s and tokens > 0 else None
