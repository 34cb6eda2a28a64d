"""A row's sampling state moves over tokens in one way, whether they are sampled, drafted or resumed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.engine.fake.tokenizer import END_OF_TEXT, VOCABULARY_TOKENS, FakeTokenizer
from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.grammar.matcher import matcher_for
from machd.engine.sampling.sampling_state import SamplingState
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import SamplingParams

_VOCABULARY = 8
_TOKENS = st.lists(st.integers(0, _VOCABULARY - 1), max_size=6)


def _counts(state: SamplingState) -> list[float]:
    assert state.counts is not None
    return [float(one) for one in np.array(state.counts)]


@settings(deadline=None, max_examples=40)
@given(first=_TOKENS, second=_TOKENS)
def test_state_behind_tokens_does_not_depend_on_how_they_came(
    first: list[int], second: list[int]
) -> None:
    """Tokens at once, in two parts, or unread on the device give the same position and counts."""
    state = SamplingState.for_prompt(SamplingParams(presence_penalty=1.0), (1,), _VOCABULARY)
    both = state.after([*first, *second])
    unread = mx.array([*first, *second], dtype=mx.int32)

    for other in (state.after(first).after(second), state.after(unread)):
        assert other.position == both.position == len(first) + len(second)
        assert _counts(other) == _counts(both)
    assert state.position == 0
    assert not any(_counts(state))


@pytest.mark.parametrize("text", [b"ab", b"a-long-b"])
def test_fork_of_a_state_moves_alone(text: bytes) -> None:
    """What a grammar allows next depends on the tokens of its own state, forced ones among them."""
    compiler = LlguidanceCompiler(FakeTokenizer(), VOCABULARY_TOKENS, frozenset({END_OF_TEXT}))
    grammar = compiler.compile(Constraint(ConstraintKind.REGEX, "a(-long-)?b{2}", "test"))
    params = SamplingParams(grammar=grammar)
    state = SamplingState.for_prompt(params, (1,), VOCABULARY_TOKENS, matcher_for(params))

    ahead = state.fork().after(text)

    assert ahead.matcher is not None
    assert ahead.matcher.allows(ord("b"))
    assert ahead.position == len(text)
    assert state.matcher is not None
    assert state.matcher.allows(ord("a"))
    assert state.position == 0
