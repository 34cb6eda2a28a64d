"""Scores of continuations follow from distributions of next tokens."""

from __future__ import annotations

import math

import pytest

from machd.generations.continuations import ContinuedPrompt, Reads, log_sum, softmax

PROMPT = (1, 2)


def test_continuations_with_a_common_beginning_share_reads() -> None:
    """A read for the prompt, and one for each token that a longer continuation goes on from."""
    one = ContinuedPrompt(PROMPT, (((5, 6),), ((5, 7),), ((8,),)))
    other = ContinuedPrompt((1, 2, 5), (((6,),), ((9,),)))
    assert Reads([one]).prompts == ((1, 2), (1, 2, 5))
    assert Reads([one, other]).prompts == ((1, 2), (1, 2, 5)), "an equal read is done once"


def test_options_name_every_token_of_a_continuation_once() -> None:
    """One token a prompt, chosen without a draw, which no end of text keeps back."""
    options = Reads([ContinuedPrompt(PROMPT, (((5, 6),), ((6, 5), (7,))))]).options(
        priority="batch", cache_salt="s"
    )
    assert options.sampling.logprob_token_ids == (5, 6, 7)
    assert (options.max_tokens, options.ignore_eos, options.in_turns) == (1, True, True)
    assert (options.priority, options.cache_salt, options.sampling.temperature) == ("batch", "s", 0)


@pytest.mark.parametrize("shift", [0.0, -1000.0])
def test_softmax_and_log_sum_are_exact_far_from_zero(shift: float) -> None:
    """Log-probabilities whose probabilities would all be 0 keep their shares."""
    logprobs = [shift + math.log(one) for one in (0.2, 0.1, 0.1)]
    assert softmax(logprobs) == pytest.approx([0.5, 0.25, 0.25])
    assert log_sum(logprobs) == pytest.approx(shift + math.log(0.4))
    assert softmax(logprobs, temperature=0.5) == pytest.approx([4 / 6, 1 / 6, 1 / 6])


def test_options_that_are_impossible_get_equal_shares() -> None:
    """Minus infinity is a probability of 0, not an error."""
    assert softmax([-math.inf, -math.inf]) == [0.5, 0.5]
    assert softmax([-math.inf, -3.0]) == [0.0, 1.0]
    assert log_sum([]) == log_sum([-math.inf]) == -math.inf
