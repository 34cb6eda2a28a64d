"""How many tokens ahead a pass takes: as many as make the most tokens a second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from machd.engine.protocol.step import SpanCost
from machd.engine.step.span_choice import Offer, worthwhile_tokens
from machd.scheduler.draft_reading import LEAST_BATCHED_GAIN


def _cost(rows: int) -> SpanCost:
    """Cost where a pass takes as long before its first token as for 20 tokens of one row."""
    return SpanCost(rows / (20 + rows), least_batched_gain=LEAST_BATCHED_GAIN)


def _forced(*tokens: int) -> list[Offer]:
    return [Offer(one, 0, 0.0) for one in tokens]


def test_lone_row_takes_all_its_forced_tokens() -> None:
    """Alone, a pass of several tokens costs little more than one of one."""
    assert worthwhile_tokens(_forced(0), _cost(1)) == 0
    assert worthwhile_tokens(_forced(16), _cost(1)) == 16


def test_one_row_in_sixteen_does_not_slow_the_others() -> None:
    """Padding fifteen rows for the forced tokens of one is not worth it."""
    assert worthwhile_tokens(_forced(6, *[0] * 15), _cost(16)) == 0


def test_rows_take_the_tokens_ahead_that_pay_together() -> None:
    """Where most rows have forced tokens, the pass takes them."""
    assert worthwhile_tokens(_forced(8, 8), _cost(2)) > 4
    assert worthwhile_tokens(_forced(3, 3, 3, 3), _cost(4)) == 3


def test_forced_tokens_and_drafts_share_a_pass() -> None:
    """One row's forced tokens make room for another row's drafts: padding is paid for already."""
    forced, drafting = Offer(6, 0, 0.0), Offer(0, 6, 0.6)
    alone = worthwhile_tokens([drafting, Offer(0, 0, 0.0)], _cost(2))
    assert worthwhile_tokens([drafting, forced], _cost(2)) > alone


def test_draft_that_could_lose_more_than_the_balance_is_cut() -> None:
    """If every draft is wrong, the pass is longer by no more than the plan allows."""
    offer = [Offer(0, 8, 0.9)]
    assert worthwhile_tokens(offer, SpanCost(0.1)) == 8
    assert worthwhile_tokens(offer, SpanCost(0.1, max_lost_passes=0.35)) == 3
    assert worthwhile_tokens(offer, SpanCost(0.1, max_lost_passes=0.0)) == 0


def test_forced_tokens_need_no_balance() -> None:
    """Forced tokens are never wrong, so nothing can be lost with them."""
    assert worthwhile_tokens(_forced(5), SpanCost(0.1, max_lost_passes=0.0)) == 5


def test_unlikely_drafts_are_left_out() -> None:
    """A draft that is seldom right does not pay for its token."""
    assert worthwhile_tokens([Offer(0, 8, 0.04)], SpanCost(0.05)) == 0
    assert worthwhile_tokens([Offer(0, 8, 0.5)], SpanCost(0.05)) > 1


@given(
    st.lists(
        st.builds(Offer, st.integers(0, 16), st.integers(0, 16), st.floats(0, 1)),
        min_size=1,
        max_size=32,
    ),
    st.floats(0, 1),
)
def test_pass_never_yields_fewer_tokens_a_second_than_a_plain_one(
    offers: list[Offer], token_cost: float
) -> None:
    """The expected gain is at least 1, at least LEAST_BATCHED_GAIN where other rows wait."""
    cost = SpanCost(token_cost, least_batched_gain=LEAST_BATCHED_GAIN)
    ahead = worthwhile_tokens(offers, cost)
    rows, length = len(offers), 1 + token_cost * ahead
    tokens = 1 + sum(one.expected_tokens(ahead) for one in offers) / rows
    assert ahead <= max(one.forced_tokens + one.draft_tokens for one in offers)
    assert tokens / length >= 1
    assert ahead == 0 or rows == 1 or length == 1 or tokens / length > LEAST_BATCHED_GAIN
    assert rows == 1 or length <= 2
