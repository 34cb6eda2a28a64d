"""Worker threads exist before there is work, and hold up no end."""

from __future__ import annotations

import threading

import pytest
from support.clocks.polling import CEILING_S

from machd.generations.workers import Workers


def _names(prefix: str) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(prefix)]


def test_workers_need_no_thread_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is done although the system starts no thread any more."""
    workers = Workers(3, name="early")
    assert len(_names("early")) == 3

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [workers.submit(pow, 2, one).result(CEILING_S) for one in range(6)] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    workers.shutdown()


def test_shutdown_does_not_wait_for_a_call_that_never_returns() -> None:
    """The thread is left to its call."""
    workers, has_begun, is_over = Workers(1, name="stuck"), threading.Event(), threading.Event()

    def hang() -> None:
        has_begun.set()
        is_over.wait()

    stuck = workers.submit(hang)
    assert has_begun.wait(CEILING_S)
    workers.shutdown()
    assert not stuck.done()
    is_over.set()
    stuck.result(CEILING_S)
