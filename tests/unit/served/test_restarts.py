"""How often an engine process is replaced, and how soon."""

from __future__ import annotations

import pytest
from support.clocks.manual_clock import ManualClock

from machd.errors import EngineFaultError
from machd.served.restarts import MAX_RESTARTS, Restarts


def _noted(restarts: Restarts, count: int) -> None:
    for _ in range(count):
        restarts.note()


def test_backoff_doubles_after_the_first_replacement() -> None:
    """The first is made at once."""
    restarts, waits_s = Restarts(ManualClock(0.0)), []
    for _ in range(MAX_RESTARTS):
        restarts.note()
        waits_s.append(restarts.backoff_s)

    assert waits_s == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_one_end_too_many_raises() -> None:
    """The bound is of ends without a whole answer between them."""
    restarts = Restarts(ManualClock(0.0))
    _noted(restarts, MAX_RESTARTS)

    with pytest.raises(EngineFaultError):
        restarts.note()


def test_a_whole_answer_begins_the_count_anew() -> None:
    """So processes that end now and then are replaced for ever."""
    restarts = Restarts(ManualClock(0.0))
    for _ in range(3):
        _noted(restarts, MAX_RESTARTS)
        assert restarts.is_isolating
        restarts.forget()

    assert (restarts.backoff_s, restarts.is_isolating) == (0.0, False)


def test_old_ends_do_not_count() -> None:
    """An idle daemon gives no answer that could show that its engine works."""
    clock = ManualClock(0.0)
    restarts = Restarts(clock)
    for _ in range(3 * MAX_RESTARTS):
        restarts.note()
        clock.advance(200.0)

    assert restarts.backoff_s < 8.0


def test_a_process_that_cannot_be_replaced_ends_once() -> None:
    """As with ranks."""
    with pytest.raises(EngineFaultError):
        Restarts(ManualClock(0.0), 0).note()
