"""The kept events of the log: bounded, as they were logged, and nothing that was not."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from support.clocks.manual_clock import ManualClock
from support.daemon.admin_daemon import kept_logging

from machd.link.logged_event import LoggedEvent
from machd.telemetry.log_ring import MAX_EVENTS, LogRing
from machd.telemetry.logs import configure_logs

CANARY = "my secret prompt"


@pytest.fixture(name="ring")
def _ring() -> Iterator[LogRing]:
    with kept_logging():
        ring = LogRing()
        configure_logs(
            level="info",
            log_format="json",
            stream=io.StringIO(),
            clock=ManualClock(),
            on_event=ring.add,
        )
        yield ring


def _event(number: int, level: str = "info") -> LoggedEvent:
    return LoggedEvent(
        timestamp="1970-01-01T00:00:00.000+00:00",
        level=level,
        logger="machd.test",
        event=f"test.{number}",
        model=None,
        fields={},
    )


def test_only_the_newest_events_are_kept() -> None:
    """Memory does not grow with the log."""
    ring = LogRing()
    for number in range(MAX_EVENTS + 30):
        ring.add(_event(number))
    events, count = ring.newest()
    assert [one.event for one in events] == [f"test.{n}" for n in range(30, MAX_EVENTS + 30)]
    assert count == MAX_EVENTS + 30
    assert ring.newest(since=count) == ([], count)
    assert [one.event for one in ring.newest(since=count - 2)[0]] == ["test.528", "test.529"]
    assert len(ring.newest(since=3)[0]) == MAX_EVENTS


def test_lower_levels_are_left_out() -> None:
    """A level and what is worse."""
    ring = LogRing()
    for number, level in enumerate(("debug", "info", "warning", "error", "critical")):
        ring.add(_event(number, level))
    assert [one.level for one in ring.newest("warning")[0]] == ["warning", "error", "critical"]
    assert len(ring.newest("debug")[0]) == 5


def test_an_event_is_kept_as_it_was_logged(ring: LogRing) -> None:
    """Event, level, logger, model and time, and all other fields as text; what is null is left out."""
    log = structlog.get_logger("machd.test", model="m")
    log.info("test.happened", count=3, names=["a", "b"], text="plain", nothing=None)
    log.debug("test.hidden")
    (one,), _ = ring.newest()
    assert (one.event, one.level, one.logger, one.model) == (
        "test.happened", "info", "machd.test", "m"
    )  # fmt: skip
    assert one.fields == {"count": "3", "names": '["a", "b"]', "text": "plain"}
    assert one.timestamp.endswith("+00:00")


def test_lines_of_libraries_are_kept_with_their_level(ring: LogRing) -> None:
    """Arguments are part of the message, as in the log."""
    logging.getLogger("some.library").warning("%s of %d", "one", 2)
    (one,), _ = ring.newest()
    assert (one.event, one.level, one.logger) == ("one of 2", "warning", "some.library")


def test_a_traceback_is_kept_without_locals_and_bounded(ring: LogRing) -> None:
    """A prompt in a local variable is in no line of the log, and so in no kept event; a long field keeps its end."""

    def fail() -> None:
        prompt = CANARY + "x" * 5000
        raise ValueError(len(prompt))

    log = structlog.get_logger("machd.test")
    try:
        fail()
    except ValueError:
        log.exception("test.failed", long="y" * 10_000 + "end")
    (one,), _ = ring.newest()
    assert "ValueError" in one.fields["exception"]
    assert CANARY not in json.dumps(dict(one.fields))
    assert len(one.fields["long"]) == 4096
    assert one.fields["long"].endswith("end")


def test_repeats_that_are_not_written_are_not_kept(ring: LogRing) -> None:
    """The ring holds what the log holds: a flood is one event."""
    log = structlog.get_logger("machd.test")
    for _ in range(100):
        log.warning("test.flood")
    assert len(ring.newest()[0]) == 1


def test_a_watcher_is_woken_by_each_event_until_it_leaves() -> None:
    """One that has left costs nothing."""
    ring, woken = LogRing(), []
    ring.watch(lambda: woken.append(1))
    ring.add(_event(1))
    ring.watch(None)
    ring.add(_event(2))
    assert woken == [1]
