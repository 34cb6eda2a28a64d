"""Limits of one client's open generations and of its tokens in a minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks.manual_clock import ManualClock

from machd.errors import KeyLimitError
from machd.generations.key_limits import KeyLimits


def _use(limits: KeyLimits, client: str, tokens: int) -> None:
    """Open a generation that uses so many tokens."""
    limits.enter(client)
    limits.spend(client, tokens)


def _refusal(limits: KeyLimits, client: str = "alice") -> KeyLimitError:
    with pytest.raises(KeyLimitError) as refused:
        limits.enter(client)
    return refused.value


# Generations open at once


def test_a_client_may_have_so_many_open_and_no_more() -> None:
    """One beyond the limit is refused, and one may come again as soon as one has ended."""
    limits = KeyLimits(ManualClock(), max_requests=2)
    _use(limits, "alice", 1)
    _use(limits, "alice", 1)

    refusal = _refusal(limits)
    limits.leave("alice")
    _use(limits, "alice", 1)

    assert (refusal.http_status, refusal.code, refusal.retry_after_s) == (429, "key_limit", 1)
    assert "limits.max_requests_per_key is 2" in refusal.message


def test_a_request_counts_as_open_while_it_is_prepared() -> None:
    """Many prompts with images would otherwise be decoded for a key that may have few open; nothing is left behind."""
    limits = KeyLimits(ManualClock(), max_requests=2)
    with limits.preparing("alice"):
        _use(limits, "alice", 1)
        with pytest.raises(KeyLimitError), limits.preparing("alice"):
            raise AssertionError("it is the third")
        with limits.preparing("bob"):
            pass
        with limits.preparing(""), limits.preparing(""), limits.preparing(""):
            pass  # the operator's
    _use(limits, "alice", 1)
    limits.leave("alice")
    limits.leave("alice")
    assert len(limits) == 0


def test_counting_waits_for_no_used_tokens() -> None:
    """A client in debt may have its prompts counted, as it uses no tokens for that."""
    limits = KeyLimits(ManualClock(), max_requests=2, max_tokens_per_minute=10)
    _use(limits, "alice", 1000)
    _refusal(limits)
    with limits.preparing("alice"):
        pass


def test_clients_do_not_share_a_limit() -> None:
    """Whatever one client has open or has used, another is let in."""
    limits = KeyLimits(ManualClock(), max_requests=1, max_tokens_per_minute=10)
    _use(limits, "noisy", 1000)

    _refusal(limits, "noisy")
    _use(limits, "quiet", 5)


def test_a_refused_request_counts_for_nothing() -> None:
    """However often a client is refused, its wait grows no longer."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=60)
    _use(limits, "alice", 60)
    limits.leave("alice")

    assert {_refusal(limits).retry_after_s for _ in range(20)} == {1}
    clock.advance(1)
    _use(limits, "alice", 1)


# Tokens in a minute


def test_a_client_is_let_in_while_anything_is_left() -> None:
    """A request may use more than is left; the client then waits until the debt is paid off."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=60)
    _use(limits, "alice", 59)
    _use(limits, "alice", 1)
    limits.spend("alice", 90)

    assert _refusal(limits).retry_after_s == 91
    clock.advance(90)
    assert _refusal(limits).retry_after_s == 1
    clock.advance(1)
    _use(limits, "alice", 1)


def test_what_was_not_used_is_not_charged() -> None:
    """A generation that ends early has cost its prompt and what came of its completion."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=100)
    _use(limits, "alice", 40)
    limits.spend("alice", 59)
    limits.leave("alice")
    _use(limits, "alice", 1)

    assert _refusal(limits).retry_after_s == 1


def test_rest_does_not_pile_up() -> None:
    """After an hour of silence a client has one minute's tokens and not sixty."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=60)
    _use(limits, "alice", 1)
    clock.advance(3600)
    limits.spend("alice", 60)

    assert _refusal(limits).retry_after_s == 1


@given(
    limit=st.integers(1, 10_000),
    uses=st.lists(st.tuples(st.integers(0, 20_000), st.floats(0, 90)), min_size=1, max_size=20),
)
def test_retry_after_is_the_truth(limit: int, uses: list[tuple[int, float]]) -> None:
    """A client that waits for Retry-After is admitted; a whole second earlier it is not."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=limit)
    limits.enter("alice")
    for tokens, pause_s in uses:
        limits.spend("alice", tokens)
        clock.advance(pause_s)
    try:
        limits.check("alice")
    except KeyLimitError as refused:
        wait_s = refused.retry_after_s
        assert wait_s >= 1
        clock.advance(wait_s - 1)
        assert _refusal(limits).retry_after_s == 1
        clock.advance(1 + 1e-6)
        limits.check("alice")


# Limits that change


def test_what_was_used_outlives_a_change_of_the_limits() -> None:
    """A client at its limit is at a lower one, too; a higher limit admits it at once."""
    limits = KeyLimits(ManualClock(), max_requests=5, max_tokens_per_minute=100)
    _use(limits, "alice", 100)

    limits.set(max_requests=5, max_tokens_per_minute=50)
    assert _refusal(limits).retry_after_s == 1
    limits.set(max_requests=1, max_tokens_per_minute=1000)
    assert "max_requests_per_key" in _refusal(limits).message
    limits.set(max_requests=2, max_tokens_per_minute=1000)
    limits.enter("alice")


@given(
    used=st.integers(1, 100_000),
    old=st.integers(1, 10_000),
    new=st.integers(1, 10_000),
    pause_s=st.floats(0, 90),
)
def test_no_change_makes_a_wait_longer(used: int, old: int, new: int, pause_s: float) -> None:
    """A lower limit leaves the wait that a client was told as it is; a higher one shortens it."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_tokens_per_minute=old)
    _use(limits, "alice", used)
    clock.advance(pause_s)
    told_s = _wait_s(limits)

    limits.set(max_requests=None, max_tokens_per_minute=new)

    if new <= old:
        assert abs(_wait_s(limits) - told_s) <= 1  # rounding at the edge of a second
    else:
        assert _wait_s(limits) <= told_s


def _wait_s(limits: KeyLimits) -> int:
    try:
        limits.check("alice")
    except KeyLimitError as refused:
        return refused.retry_after_s
    return 0


def test_a_limit_holds_against_generations_that_were_open_before_it() -> None:
    """Setting a limit where there was none counts what is open now, and no tokens of the past."""
    limits = KeyLimits(ManualClock())
    _use(limits, "alice", 10_000)
    limits.spend("alice", 10_000)

    limits.set(max_requests=1, max_tokens_per_minute=10)
    assert "max_requests_per_key" in _refusal(limits).message
    limits.leave("alice")
    _use(limits, "alice", 5)


# Memory


def test_only_clients_with_something_to_remember_are_remembered() -> None:
    """Thousands of names leave nothing behind once their tokens have drained away."""
    clock = ManualClock()
    limits = KeyLimits(clock, max_requests=1, max_tokens_per_minute=60)
    for number in range(1000):
        _use(limits, f"client {number}", 10)
        limits.leave(f"client {number}")
    assert len(limits) == 1000

    clock.advance(60)
    limits.set(max_requests=1, max_tokens_per_minute=60)
    assert len(limits) == 0


def test_without_limits_nothing_is_kept_of_clients_that_have_left() -> None:
    """A daemon without limits counts open generations and nothing else."""
    limits = KeyLimits(ManualClock())
    _use(limits, "alice", 10)
    limits.spend("alice", 10)
    limits.leave("alice")
    assert len(limits) == 0
