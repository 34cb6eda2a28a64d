"""What passes cost is learnt in spite of noise, and forgotten where it no longer holds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.engine.speculation.pass_costs import PassCosts, RecentTimes


def known(plain_s: float = 0.05) -> PassCosts:
    """Of one row, with passes over one token measured."""
    costs = PassCosts(1)
    for _ in range(12):
        costs.observe(1, plain_s)
    return costs


def test_nothing_is_known_before_five_passes() -> None:
    """Four may be two hiccups and a cold start."""
    costs = PassCosts(1)
    for _ in range(4):
        costs.observe(1, 0.05)
        assert costs.plain_s == 0
    costs.observe(1, 0.05)
    assert costs.plain_s == pytest.approx(0.05)


@given(
    st.lists(st.floats(0.9, 1.1), min_size=12, max_size=12),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_hiccups_do_not_move_the_middle(durations: list[float], hiccups: list[int]) -> None:
    """Three of twelve may take a hundred times as long."""
    recent = RecentTimes()
    for i, one in enumerate(durations):
        recent.add(one * (100 if i in hiccups else 1))
    assert 0.9 <= recent.middle <= 1.1


def test_what_was_never_measured_costs_what_usual_machines_take() -> None:
    """A token more is a twentieth of a pass of one row; the scale is the measured one."""
    costs = known(0.2)
    assert costs.expected_s(2) == pytest.approx(0.2 * (1 + 1 / 21))
    assert costs.reach_tokens == 2


def test_ratios_are_learnt_in_noise() -> None:
    """After some passes of each length all are known to a tenth, whatever shape they have."""
    random = Random(1)
    true = {1: 1.0, 2: 1.3, 3: 1.32, 5: 1.4, 9: 2.0}
    costs = PassCosts(1)
    for _ in range(60):
        for tokens, ratio in true.items():
            hiccup = 4 if random.random() < 0.05 else 1
            costs.observe(tokens, 0.05 * ratio * hiccup * random.lognormvariate(0, 0.08))
    for tokens, ratio in true.items():
        assert costs.expected_s(tokens) / costs.plain_s == pytest.approx(ratio, rel=0.1)
    assert costs.expected_s(5) <= costs.expected_s(7) <= costs.expected_s(9)


def test_beyond_what_was_measured_hope_and_fear_differ() -> None:
    """Hope takes the usual slope, fear the measured one; neither goes below the other."""
    costs = known()
    for _ in range(12):
        costs.observe(2, 0.1)
    assert costs.expected_s(4) == pytest.approx(costs.expected_s(2) + 2 / 21 * 0.05)
    assert costs.feared_s(4) > 0.19
    assert costs.reach_tokens == 4


def test_a_first_hiccup_of_a_length_is_bounded() -> None:
    """Twice the tokens take at most twice the time: what took longer was something else."""
    costs = known()
    costs.observe(2, 5.0)
    assert costs.feared_s(2) <= 0.1


def test_what_seemed_dear_is_hoped_for_again_one_day() -> None:
    """Hope fades back to the usual cost with passes that do not measure it; fear does not."""
    costs = known()
    for _ in range(12):
        costs.observe(2, 0.1)
    feared_s = costs.feared_s(2)
    for _ in range(4000):
        costs.observe(1, 0.05)
    assert costs.expected_s(2) < 0.06
    assert costs.feared_s(2) == pytest.approx(feared_s)


def test_a_longer_pass_that_is_shorter_corrects_the_plain_one() -> None:
    """After a long context passes get shorter; the first longer ones tell, before any plain one."""
    costs = known(0.1)
    for _ in range(8):
        costs.observe(2, 0.05)
    assert costs.plain_s < 0.06


def test_tokens_never_seem_to_be_free() -> None:
    """Whatever was measured, a longer pass costs more than a plain one."""
    costs = known()
    for _ in range(12):
        costs.observe(4, 0.048)
    assert costs.expected_s(4) > costs.plain_s
    assert costs.feared_s(4) > costs.plain_s


def test_it_counts_the_passes_since_a_plain_one() -> None:
    """So that a measure that is old can be renewed."""
    costs = known()
    for passes in range(1, 4):
        costs.observe(3, 0.06)
        assert costs.longer_since_plain == passes
    costs.observe(1, 0.05)
    assert costs.longer_since_plain == 0
