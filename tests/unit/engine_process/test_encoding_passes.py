"""Texts of one pass: like lengths together where padding costs, order otherwise; the oldest is always among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.engine_process.encoding_passes import MAX_PASS_TOKENS, next_pass

_LENGTHS = st.lists(st.integers(1, 3 * MAX_PASS_TOKENS), min_size=1, max_size=200)


@given(lengths=_LENGTHS, packs=st.booleans())
def test_a_pass_has_the_oldest_text_and_keeps_its_bounds(
    lengths: list[int], *, packs: bool
) -> None:
    """No text twice; several texts take at most the tokens of a pass, and few of them for padding."""
    chosen = next_pass(lengths, packs=packs)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    taken = [lengths[place] for place in chosen]
    computed = sum(taken) if packs else max(taken) * len(taken)
    assert len(taken) == 1 or computed <= MAX_PASS_TOKENS
    assert computed <= 1.25 * sum(taken)


@given(lengths=_LENGTHS, packs=st.booleans())
def test_every_text_has_its_turn(lengths: list[int], *, packs: bool) -> None:
    """Pass after pass all texts are computed, each once."""
    waiting = list(enumerate(lengths))
    done = list[int]()
    while waiting:
        chosen = next_pass([length for _, length in waiting], packs=packs)
        done += [waiting[place][0] for place in chosen]
        waiting = [one for place, one in enumerate(waiting) if place not in chosen]
    assert sorted(done) == list(range(len(lengths)))


@pytest.mark.parametrize(("packs", "chosen"), [(False, [0, 2, 4]), (True, [0, 1, 2, 3, 4])])
def test_like_lengths_go_together_where_padding_costs(*, packs: bool, chosen: list[int]) -> None:
    """A text of another length waits for its own pass, unless texts lie behind one another."""
    assert sorted(next_pass([10, 400, 10, 300, 11], packs=packs)) == chosen
