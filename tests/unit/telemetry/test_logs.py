"""Log lines: one format for all, one line a request, never a word a user typed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S

from machd.generations.record import RequestRecord
from machd.generations.trace_context import TraceContext
from machd.scheduler.events import (
    CacheReason,
    DecodeMode,
    DecodeModeChanged,
    SequenceAdmitted,
    StepCompleted,
)
from machd.telemetry.log_repeats import RepeatFilter
from machd.telemetry.logs import RequestLog, SchedulerLog, configure_logs, log_model

CANARY = "my secret prompt"

CONTRACT_FIELDS = {
    "request_id",
    "endpoint",
    "decode_mode",
    "prompt_tokens",
    "cached_tokens",
    "images",
    "videos",
    "inputs",
    "completion_tokens",
    "total_tokens",
    "queue_ms",
    "ttft_ms",
    "prompt_tps",
    "generation_tps",
    "total_tps",
    "latency_ms",
    "finish_reason",
    "client",
}
ADDED_FIELDS = {
    "cache_parted_at_tokens",
    "cache_reason",
    "coalesced_with",
    "error",
    "normalised",
    "trace_id",
}
ENVELOPE = {"event", "level", "logger", "timestamp"}

RECORD = RequestRecord(
    request_id="r-1",
    endpoint="chat_completions",
    decode_mode=DecodeMode.SINGLE,
    prompt_tokens=110,
    first_prompt_tokens=110,
    cached_tokens=10,
    completion_tokens=21,
    queue_s=0.0123,
    prefill_s=0.5,
    ttft_s=0.51234,
    decode_s=2.0,
    duration_s=2.51267,
    finish_reason="stop",
    error_code=None,
    client="alice",
    first_cached_tokens=10,
    cache_reason=CacheReason.DIVERGED,
    cache_parted_at_tokens=12,
    applied_rules=("claude_code_billing",),
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Give every logger and structlog back as they were found."""
    manager = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in manager if isinstance(one, logging.Logger))]
    before = [(one, one.level, list(one.handlers), one.propagate) for one in loggers]
    structlog_config = structlog.get_config()
    was_configured = structlog.is_configured()
    log_model(None)  # that of a daemon of a test before
    yield
    log_model(None)
    known = {id(logger) for logger, *_ in before}
    for made in logging.root.manager.loggerDict.values():
        if isinstance(made, logging.Logger) and id(made) not in known:
            made.setLevel(logging.NOTSET)
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate
    if was_configured:
        structlog.configure(**structlog_config)
    else:
        structlog.reset_defaults()


def _configured(
    log_format: str = "json", level: str = "info", *, terminal: bool = False
) -> io.StringIO:
    stream = _Terminal() if terminal else io.StringIO()
    configure_logs(level=level, log_format=log_format, stream=stream)
    return stream


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def _fail_with_a_secret() -> None:
    prompt = {"messages": [CANARY]}
    raise ValueError(len(prompt))


# Formats


@pytest.mark.parametrize(
    ("log_format", "terminal", "is_json"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("json", True, True),
        ("console", False, False),
    ],
)
def test_lines_are_json_unless_people_read_them(
    log_format: str, *, terminal: bool, is_json: bool
) -> None:
    """``auto`` asks the stream; a named format is what it says."""
    stream = _configured(log_format, terminal=terminal)
    structlog.get_logger("machd.test").info("thing.happened", count=3)

    text = stream.getvalue()
    assert text.startswith("{") == is_json
    assert "thing.happened" in text
    assert text.count("\n") == 1


def test_colours_are_for_terminals_only() -> None:
    """A console format that is written to a file holds no escape codes."""
    plain, coloured = _configured("console"), io.StringIO()
    structlog.get_logger("machd.test").info("thing.happened")
    coloured = _configured("console", terminal=True)
    structlog.get_logger("machd.test").info("thing.happened")

    assert "\x1b[" not in plain.getvalue()
    assert "\x1b[" in coloured.getvalue()


def test_a_json_line_holds_the_event_and_its_envelope() -> None:
    """Event, level, logger and a UTC time come with every line, and values keep their types."""
    stream = _configured()
    structlog.get_logger("machd.test").warning("thing.happened", count=3, name=None)

    (line,) = _lines(stream)
    timestamp = line.pop("timestamp")
    assert isinstance(timestamp, str)
    assert timestamp.endswith("Z")
    assert line == {
        "event": "thing.happened",
        "level": "warning",
        "logger": "machd.test",
        "count": 3,
        "name": None,
    }


def test_every_line_of_an_engine_process_names_the_model() -> None:
    """From the moment that its name is known, on every thread, libraries' too; a field of that name stays."""
    first = _configured()
    structlog.get_logger("machd.engine").info("thing.happened")
    log_model("some/model")
    second = _configured()
    thread = threading.Thread(
        target=structlog.get_logger("machd.engine").info, args=["thing.happened"]
    )
    thread.start()
    thread.join(CEILING_S)
    logging.getLogger("some.library").warning("it is late")
    structlog.get_logger("machd.daemon").critical("model.load_failed")
    structlog.get_logger("machd.daemon").info("daemon.ready", model="another")

    assert [line.get("model") for line in _lines(first)] == [None]
    assert [line["model"] for line in _lines(second)] == [*["some/model"] * 3, "another"]


def test_a_line_of_the_front_names_no_model_but_its_own() -> None:
    """Lines of the daemon, and lines about a model that has no name yet, have no such field."""
    stream = _configured()
    structlog.get_logger("machd.daemon").info("daemon.stopped")
    structlog.get_logger("machd.scheduler", model=None).info("thing.happened")
    structlog.get_logger("machd.scheduler", model="some/model").info("thing.happened")
    lines = _lines(stream)
    assert ["model" in line for line in lines] == [False, False, True]
    assert lines[2]["model"] == "some/model"


def test_lines_of_two_models_name_their_own() -> None:
    """Observers of two models in one process write each model's name, from the moment that it is known."""
    stream = _configured(level="debug")
    name: list[str | None] = [None]
    first, second = SchedulerLog(lambda: "first"), SchedulerLog(lambda: name[0])
    change = DecodeModeChanged(DecodeMode.SINGLE, DecodeMode.BATCHED)
    second.on_events([change])
    name[0] = "second"
    for log in (first, second):
        log.on_events([change, _admission(coalesced_with="req-a", fanout=2)])
    for model in ("first", "second"):
        RequestLog().on_request(replace(RECORD, model=model))

    assert [line.get("model") for line in _lines(stream)] == [
        None, *["first"] * 3, *["second"] * 3, "first", "second",
    ]  # fmt: skip


def test_a_line_is_the_same_whoever_names_the_model() -> None:
    """A line of the only model has the same fields in the same order, named by the process or by itself."""
    lines = []
    for process_model, line_model in (("m", None), (None, "m"), ("m", "m")):
        stream = _configured()
        log_model(process_model)
        structlog.get_logger("machd.scheduler", model=line_model).info("thing.happened", count=3)
        lines.append([one for one in _lines(stream)[0].items() if one[0] != "timestamp"])
    assert lines[0] == lines[1] == lines[2]
    assert [name for name, _ in lines[0]] == ["count", "event", "logger", "model", "level"]


def test_libraries_write_the_same_lines() -> None:
    """A record of the standard logging module has the same shape and place as ours."""
    stream = _configured()
    logging.getLogger("some.library").warning("it is %s", "late")

    (line,) = _lines(stream)
    assert set(line) == ENVELOPE
    assert (line["event"], line["logger"]) == ("it is late", "some.library")


def test_a_newline_in_a_value_does_not_make_a_line() -> None:
    """A value cannot forge a log line."""
    stream = _configured()
    structlog.get_logger("machd.test").info("a", client='x\n{"event": "forged"}')
    assert [line["event"] for line in _lines(stream)] == ["a"]


def test_configuring_again_replaces_the_first_one() -> None:
    """A reload neither doubles lines nor writes to the old place."""
    first = _configured()
    second = _configured(level="debug")
    structlog.get_logger("machd.test").debug("thing.happened")

    assert first.getvalue() == ""
    assert len(_lines(second)) == 1


# Levels


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_levels_are_respected(level: str) -> None:
    """Exactly the events of the level and above are written, ours and the libraries'."""
    stream = _configured(level=level)
    names = ["debug", "info", "warning", "error"]
    for name in names:
        getattr(structlog.get_logger("machd.test"), name)("ours")
        getattr(logging.getLogger("some.library"), name)("theirs")

    wanted = names[names.index(level) :]
    assert [(line["event"], line["level"]) for line in _lines(stream)] == [
        (who, name) for name in wanted for who in ("ours", "theirs")
    ]


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "asyncio"])
def test_chatter_of_the_server_is_left_out(name: str) -> None:
    """Access lines are ours to write; warnings of the server's are shown."""
    own = logging.StreamHandler(io.StringIO())
    logging.getLogger(name).addHandler(own)
    stream = _configured(level="debug")
    logging.getLogger(name).info("GET /v1/models 200")
    logging.getLogger(name).warning("trouble")

    assert [line["event"] for line in _lines(stream)] == ["trouble"]
    assert own.stream.getvalue() == ""


# Secrets


@pytest.mark.parametrize("logger", ["structlog", "stdlib"])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_local_variables_of_a_traceback_are_never_written(
    log_format: str, logger: str, *, terminal: bool
) -> None:
    """The traceback is there, and the prompt that lay in a local variable is not."""
    stream = _configured(log_format, terminal=terminal)
    try:
        _fail_with_a_secret()
    except ValueError as error:
        if logger == "structlog":
            structlog.get_logger("machd.test").error("request.failed", exc_info=error)
        else:
            logging.getLogger("some.library").exception("request.failed")

    text = stream.getvalue()
    assert "_fail_with_a_secret" in text
    assert "ValueError" in text
    assert CANARY not in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_causes_are_written_without_their_locals(log_format: str) -> None:
    """A chain of exceptions shows each link, and no link shows what its function held."""
    stream = _configured(log_format)
    try:
        with contextlib.ExitStack():
            try:
                _fail_with_a_secret()
            except ValueError as cause:
                raise RuntimeError("outer") from cause
    except RuntimeError:
        structlog.get_logger("machd.test").exception("request.failed", exc_info=True)

    text = stream.getvalue()
    assert "outer" in text
    assert "ValueError" in text
    assert CANARY not in text


# One line a request


def test_a_request_is_one_line_with_the_promised_fields() -> None:
    """Exactly the contract's fields, the error's code beside them, and the envelope."""
    stream = _configured()
    RequestLog().on_request(RECORD)

    (line,) = _lines(stream)
    assert set(line) == CONTRACT_FIELDS | ADDED_FIELDS | ENVELOPE
    assert line["event"] == "request.finished"
    assert line["level"] == "info"


def test_the_figures_of_a_request_are_what_their_names_say() -> None:
    """Milliseconds to a tenth; tokens a second over what was computed, and over the gaps."""
    stream = _configured()
    RequestLog().on_request(RECORD)

    (line,) = _lines(stream)
    assert {name: line[name] for name in CONTRACT_FIELDS | ADDED_FIELDS} == {
        "request_id": "r-1",
        "endpoint": "chat_completions",
        "decode_mode": "single",
        "prompt_tokens": 110,
        "cached_tokens": 10,
        "cache_reason": "diverged",
        "cache_parted_at_tokens": 12,
        "normalised": ["claude_code_billing"],
        "images": 0,
        "videos": 0,
        "inputs": 0,
        "completion_tokens": 21,
        "total_tokens": 131,
        "queue_ms": 12.3,
        "ttft_ms": 512.3,
        "prompt_tps": 200.0,
        "generation_tps": 10.0,
        "total_tps": 52.1,
        "latency_ms": 2512.7,
        "finish_reason": "stop",
        "error": None,
        "client": "alice",
        "coalesced_with": None,
        "trace_id": None,
    }


def test_a_request_that_never_ran_has_no_rates() -> None:
    """What was not measured is null, never zero and never a division by zero."""
    stream = _configured()
    never = replace(
        RECORD,
        decode_mode=None,
        completion_tokens=0,
        prefill_s=None,
        ttft_s=None,
        decode_s=None,
        finish_reason="reject",
        error_code="queue_full",
    )
    RequestLog().on_request(never)
    RequestLog().on_request(replace(RECORD, decode_s=0.0, prefill_s=0.0, completion_tokens=1))

    first, second = _lines(stream)
    for name in ("decode_mode", "ttft_ms", "prompt_tps", "generation_tps"):
        assert first[name] is None
    assert (first["finish_reason"], first["error"]) == ("reject", "queue_full")
    assert (second["prompt_tps"], second["generation_tps"]) == (None, None)


def test_the_trace_of_a_request_is_named_and_nothing_else_of_it() -> None:
    """The id leads from the log to the trace; the caller's state is other systems' business."""
    stream = _configured()
    trace = TraceContext(
        "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", is_sampled=True, state=f"a={CANARY}"
    )
    RequestLog().on_request(replace(RECORD, trace=trace))

    (line,) = _lines(stream)
    assert line["trace_id"] == trace.trace_id
    assert CANARY not in stream.getvalue()


def test_request_lines_are_left_out_above_info() -> None:
    """At level warning requests have no lines."""
    stream = _configured(level="warning")
    RequestLog().on_request(RECORD)
    assert stream.getvalue() == ""


# Decode modes


def test_a_hand_over_is_a_line_for_those_who_look_closely() -> None:
    """At debug, one line a change, and nothing of other events."""
    stream = _configured(level="debug")
    change = DecodeModeChanged(DecodeMode.SPECULATIVE, DecodeMode.BATCHED)
    SchedulerLog(lambda: None).on_events([StepCompleted(1, 0, 0.1), change])
    (line,) = _lines(stream)
    assert (line["event"], line["level"]) == ("decode_mode.changed", "debug")
    assert (line["previous"], line["mode"]) == ("speculative", "batched")


def test_a_hand_over_is_no_news_otherwise() -> None:
    """With requests that come and go it happens all the time."""
    stream = _configured(level="info")
    SchedulerLog(lambda: None).on_events([DecodeModeChanged(DecodeMode.SINGLE, DecodeMode.BATCHED)])
    assert _lines(stream) == []


# Admissions


def _admission(**fields: Any) -> SequenceAdmitted:
    return SequenceAdmitted(
        sequence_id="s-1",
        slot_index=2,
        decode_mode=DecodeMode.BATCHED,
        active_loops=3,
        at_s=1.0,
        request_id="req-b",
        prompt_tokens=571,
        max_tokens=512,
        active_limit=4,
        **fields,
    )


def test_an_admission_is_a_line_for_those_who_look_closely() -> None:
    """At debug, with what the sequence asks for and how many may decode at once."""
    stream = _configured(level="debug")
    SchedulerLog(lambda: None).on_events([_admission()])
    (line,) = _lines(stream)
    assert {name: line[name] for name in set(line) - ENVELOPE} == {
        "request_id": "req-b",
        "slot_index": 2,
        "decode_mode": "batched",
        "prompt_tokens": 571,
        "max_tokens": 512,
        "active_loops": 3,
        "active_limit": 4,
    }
    assert (line["event"], line["level"]) == ("sequence.admitted", "debug")


def test_a_shared_decode_is_a_line_with_its_fanout() -> None:
    """At info, and only for the sequence that joins."""
    stream = _configured(level="info")
    SchedulerLog(lambda: None).on_events(
        [_admission(), _admission(coalesced_with="req-a", fanout=3)]
    )
    (line,) = _lines(stream)
    assert line["event"] == "sequence.coalesced"
    assert (line["request_id"], line["coalesced_with"], line["fanout"]) == ("req-b", "req-a", 3)


# Repeats


def _repeating() -> tuple[io.StringIO, ManualClock]:
    stream, clock = io.StringIO(), ManualClock()
    configure_logs(level="debug", log_format="json", stream=stream, clock=clock)
    return stream, clock


@pytest.mark.parametrize("level", ["warning", "error", "critical"])
@pytest.mark.parametrize("logger", ["structlog", "stdlib"])
def test_a_repeated_warning_is_one_line_a_second_when_it_floods(logger: str, level: str) -> None:
    """Ten thousand of a kind are one line; the next one that is written has their number."""
    stream, clock = _repeating()

    def log() -> None:
        if logger == "structlog":
            getattr(structlog.get_logger("machd.test"), level)("thing.failed", number=1)
        else:
            getattr(logging.getLogger("asyncio"), level)("it is %s", object())

    for _ in range(10_000):
        log()
    clock.advance(1)
    log()
    clock.advance(1)
    log()

    assert [line.get("repeats") for line in _lines(stream)] == [None, 9_999, None]


def test_warnings_of_another_kind_are_written() -> None:
    """Logger, level, event, first line of a message and type of exception tell kinds apart."""
    stream, _ = _repeating()
    for _ in range(2):
        structlog.get_logger("machd.a").warning("thing.failed")
        structlog.get_logger("machd.b").warning("thing.failed")
        structlog.get_logger("machd.a").error("thing.failed")
        structlog.get_logger("machd.a").warning("other.failed")
        structlog.get_logger("machd.a").warning("thing.failed", exc_info=ValueError("x"))
        structlog.get_logger("machd.a").warning("thing.failed", exc_info=KeyError("x"))
        logging.getLogger("asyncio").error("never retrieved\nTask-%d", id(object()))
        logging.getLogger("asyncio").error("another")
    assert len(_lines(stream)) == 8


def test_tasks_that_fail_alike_are_one_kind() -> None:
    """What asyncio writes of a task differs from its second line on."""
    stream, _ = _repeating()
    for number in range(5):
        logging.getLogger("asyncio").error(f"never retrieved\nfuture: Task-{number}")  # noqa: G004
    assert len(_lines(stream)) == 1


def test_information_is_written_each_time() -> None:
    """Only warnings and worse are left out: a line a request stays a line a request."""
    stream, _ = _repeating()
    for _ in range(3):
        structlog.get_logger("machd.test").info("thing.happened")
    assert len(_lines(stream)) == 3


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    """Messages that all differ take no memory for ever."""
    clock = ManualClock()
    repeats = RepeatFilter(clock)
    for number in range(5000):
        assert repeats.filter(logging.makeLogRecord({"levelno": 40, "msg": f"message {number}"}))
    assert len(repeats._passed) <= 1024
