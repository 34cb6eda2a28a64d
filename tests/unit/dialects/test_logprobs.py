"""Log-probabilities as OpenAI's clients read them."""

from __future__ import annotations

from machd.dialects.logprobs import completion_logprobs, prompt_columns
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.step import PromptLogprob, SampledToken, TokenLogprob

_LIKELIEST = (TokenLogprob(ord("a"), -0.5), TokenLogprob(ord("b"), -1.5))


def test_alternatives_of_a_completion_hold_the_chosen_token() -> None:
    """A token that is none of the likeliest comes behind them; one that is comes once."""
    tokens = [
        SampledToken(0, ord("c"), -7.0, _LIKELIEST),
        SampledToken(0, ord("b"), -1.5, _LIKELIEST),
    ]
    columns = completion_logprobs(tokens, FakeTokenizer(), text_offsets=[0, 1], with_top=True)
    assert columns.top_logprobs == [{"a": -0.5, "b": -1.5, "c": -7.0}, {"a": -0.5, "b": -1.5}]


def test_alternatives_of_an_echoed_prompt_hold_its_tokens() -> None:
    """The prompt's own token is there, however few alternatives were asked for."""
    logprobs = [PromptLogprob(1, ord("d"), -9.0, rank=4, top_logprobs=_LIKELIEST)]
    columns = prompt_columns(list(b"xd"), logprobs, FakeTokenizer(), text="xd", top_logprobs=1)
    assert columns.top_logprobs == [None, {"a": -0.5, "d": -9.0}]
