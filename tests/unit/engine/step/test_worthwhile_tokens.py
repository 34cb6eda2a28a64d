"""How many forced tokens go into one pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from machd.engine.step.forced_tokens import worthwhile_tokens

COSTS = 20
"""Tokens that a pass costs before its first one, as the decoder reckons."""


def test_a_row_alone_takes_all_forced_tokens() -> None:
    """Alone, a pass of several tokens costs little more than one of one, up to a limit."""
    assert worthwhile_tokens([0]) == 1
    assert worthwhile_tokens([5]) == 6
    assert worthwhile_tokens([500]) == 17


def test_one_row_in_sixteen_does_not_slow_the_others() -> None:
    """Padding fifteen rows for the sake of one is not worth it."""
    assert worthwhile_tokens([6, *[0] * 15]) == 1


def test_a_few_rows_share_what_pays() -> None:
    """Where most rows have forced tokens, the pass takes them."""
    assert worthwhile_tokens([8, 8]) > 4
    assert worthwhile_tokens([3, 3, 3, 3]) == 4


@given(st.lists(st.integers(0, 40), min_size=1, max_size=32))
def test_a_pass_never_makes_fewer_tokens_in_its_time(waiting: list[int]) -> None:
    """What is chosen is at least as fast as one token each, and at most twice as long with company."""
    chosen = worthwhile_tokens(waiting)
    rows = len(waiting)
    made = rows + sum(min(one, chosen - 1) for one in waiting)
    assert made / (COSTS + rows * chosen) >= rows / (COSTS + rows)
    assert rows == 1 or COSTS + rows * chosen <= 2 * (COSTS + rows)
    assert chosen == 1 or max(waiting) >= chosen - 1
