"""What is read from a page of metrics."""

from __future__ import annotations

from machd.bench.speculation.counters import DraftCounters

PAGE = b"""# HELP machd_speculation_cycles_total Passes that verified guesses.
# TYPE machd_speculation_cycles_total counter
machd_speculation_cycles_total 12.0
machd_speculation_draft_tokens_total 1.2e+06
machd_speculation_accepted_tokens_total 30.0
machd_speculation_draft_by_position_tokens_total{position="1"} 12.0
machd_speculation_draft_by_position_tokens_total{position="10"} 3.0
machd_speculation_accepted_by_position_tokens_total{position="1"} 11.0
machd_speculation_fallbacks_total 1.0
machd_speculation_mode{mode="ngram"} 1.0
machd_requests_total{endpoint="/v1/completions"} 5.0
vllm:spec_decode_num_draft_tokens_total 99.0
"""


def test_every_counter_is_read() -> None:
    """Positions above nine and numbers with an exponent among them; other metrics are not."""
    assert DraftCounters.read(PAGE) == DraftCounters(
        1_200_000, 30, {1: 12, 10: 3}, {1: 11}, cycles=12, fallbacks=1
    )


def test_a_page_without_guesses_says_nothing() -> None:
    """Nothing is not zero: a server of somebody else's may guess and not tell."""
    assert DraftCounters.read(b"machd_requests_total 5.0\n") is None
    assert DraftCounters.read(b"") is None


def test_counters_that_are_missing_are_not_known() -> None:
    """What an older daemon does not count is null, and stays it in sums and differences."""
    page = b"machd_speculation_draft_tokens_total 4.0\nmachd_speculation_accepted_tokens_total 3\n"
    old = DraftCounters.read(page)
    new = DraftCounters.read(PAGE)

    assert old == DraftCounters(4, 3, {}, {}, None, None)
    assert new is not None
    assert (new - old).cycles is None
    assert (new + old).fallbacks is None


def test_the_difference_is_what_came_between() -> None:
    """A position that was not there before begins at zero."""
    before = DraftCounters(10, 5, {1: 4}, {1: 3}, 4, 0)
    after = DraftCounters(16, 9, {1: 6, 2: 2}, {1: 5, 2: 1}, 6, 1)

    assert after - before == DraftCounters(6, 4, {1: 2, 2: 2}, {1: 2, 2: 1}, 2, 1)
    assert (after - before) + before == DraftCounters(16, 9, {1: 6, 2: 2}, {1: 5, 2: 1}, 6, 1)
