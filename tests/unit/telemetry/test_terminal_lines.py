"""A finished request is one line of the terminal's width."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from machd.telemetry.logs import configure_logs
from machd.telemetry.terminal_lines import request_line

_FINISHED = {
    "event": "request.finished",
    "timestamp": "14:13:19",
    "request_id": "req-7c50bb30bf1fca897fbed993",
    "endpoint": "chat_completions",
    "decode_mode": "speculative",
    "prompt_tokens": 37,
    "cached_tokens": 36,
    "completion_tokens": 20,
    "ttft_ms": 186.1,
    "generation_tps": 6.8,
    "latency_ms": 2986.0,
    "finish_reason": "length",
    "error": None,
    "client": "anonymous",
}


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Give the root logger and structlog back as they were found."""
    level, handlers, config = (
        logging.root.level,
        list(logging.root.handlers),
        structlog.get_config(),
    )
    yield
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers
    structlog.configure(**config)


def test_a_request_says_what_a_person_looks_for() -> None:
    """What came in and went out, how fast, and how it ended; more of it on a wider terminal."""
    assert request_line(_FINISHED, 100) == (
        "14:13:19 chat_completions 37 in (36 cached), 20 out, ttft 186 ms, 6.8 tokens/s, in all 3.0 s, length"
    )
    assert request_line(_FINISHED, 80) == (
        "14:13:19 chat_completions 37 in, 20 out, ttft 186 ms, 6.8 tokens/s, length"
    )
    assert request_line(_FINISHED, 160).endswith("length, req-7c50bb30bf1fca897fbed993")


def test_a_failed_request_names_its_error_and_its_id() -> None:
    """The id is what the client has, and what the reader looks for."""
    failed = {**_FINISHED, "error": "request_timeout", "finish_reason": "error"}

    assert request_line(failed, 100).endswith("request_timeout, req-7c50bb30bf1fca897fbed993")


_FIELDS = {
    "prompt_tokens": st.integers(0, 999_999),
    "cached_tokens": st.integers(0, 999_999),
    "completion_tokens": st.integers(0, 99_999),
    "ttft_ms": st.none() | st.floats(0, 1e8),
    "latency_ms": st.none() | st.floats(0, 1e8),
    "generation_tps": st.none() | st.integers(0, 10_000_000).map(lambda tenths: tenths / 10),
    "client": st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=64),
    "error": st.sampled_from([None, "kv_budget_exceeded", "client_disconnected"]),
}


@given(columns=st.integers(80, 240), fields=st.fixed_dictionaries(_FIELDS))
def test_a_request_never_takes_two_lines(columns: int, fields: dict[str, object]) -> None:
    """Whatever its figures and names, the line is not longer than the terminal is wide."""
    line = request_line({**_FINISHED, **fields}, columns)

    assert len(line) <= columns
    assert "\n" not in line
    assert f"{fields['completion_tokens']} out" in line
    assert str(fields["error"] or "length") in line


def test_a_pipe_gets_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a terminal's line is short: a file has no width, and is searched by names."""
    monkeypatch.setenv("COLUMNS", "100")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = {}
    for stream in (io.StringIO(), Terminal()):
        configure_logs(level="info", log_format="console", stream=stream)
        fields = {
            name: one for name, one in _FINISHED.items() if name not in {"event", "timestamp"}
        }
        structlog.get_logger("machd.request.generation").info("request.finished", **fields)
        written[type(stream)] = stream.getvalue()

    assert "request_id=req-7c50bb30bf1fca897fbed993" in written[io.StringIO]
    assert "request_id" not in written[Terminal]
    assert written[Terminal].count("\n") == 1
    assert "chat_completions 37 in" in written[Terminal]


def test_other_events_keep_their_names_and_fields_without_what_is_empty() -> None:
    """An event is found in the reference by its name; a field without a value says nothing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure_logs(level="info", log_format="auto", stream=stream)
    structlog.get_logger("machd.daemon").info(
        "daemon.ready", url="http://here", evidence=None, last_lines=("written above",)
    )

    assert "daemon.ready" in stream.getvalue()
    assert "http://here" in stream.getvalue()
    assert "evidence" not in stream.getvalue()
    assert "written above" not in stream.getvalue()
    assert "machd.daemon" not in stream.getvalue()
