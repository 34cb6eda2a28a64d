"""Completion requests: the four spellings of a prompt, and the fields that chat has not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.dialects.completions.request import CompletionRequest, Prompt
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, RequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import GenerationOptions, SamplingParams


def _request(**fields: object) -> CompletionRequest:
    whole = {"model": "m", "prompt": "p", **fields}
    return decode_body(json.dumps(whole).encode(), CompletionRequest).checked()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompt_spellings(prompt: object, prompts: tuple[Prompt, ...]) -> None:
    """A text, texts, ids and lists of ids each give the prompts that they are."""
    assert _request(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[1], []], ["a", 1], ["a", [1]], [1, [1]], ["a"] * 129, [[1]] * 129],
)
def test_wrong_prompts_are_refused(prompt: object) -> None:
    """Nothing, a mixture, or more prompts than one request may carry is a 400 on ``prompt``."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[-1], [1.5], [True], [[-1]], [[["a"]]], {"a": 1}, None, 1])
def test_prompts_of_wrong_types_are_refused(prompt: object) -> None:
    """A prompt that is neither text nor token ids is a 400 inside ``prompt``."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(prompt=prompt)
    assert str(caught.value.param).startswith("prompt")


def test_options_arrive() -> None:
    """``logprobs`` counts alternatives here, and the rest is as in chat."""
    options = _request(max_tokens=3, logprobs=2, temperature=0.5, top_k=1, n=2, best_of=2).options()
    assert options == GenerationOptions(
        sampling=SamplingParams(top_logprobs=2, temperature=0.5, top_k=1), max_tokens=3, n=2
    )
    assert _request(logprobs=0).options().sampling.top_logprobs == 0
    assert _request().options().sampling.top_logprobs is None


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    """Prompts are scored for an echo with log-probabilities and for ``prompt_logprobs``: the larger counts."""
    assert _request(logprobs=2).options().sampling.prompt_logprobs is None
    assert _request(echo=True).options().sampling.prompt_logprobs is None
    assert _request(echo=True, logprobs=0).options().sampling.prompt_logprobs == 0
    assert (
        _request(echo=True, logprobs=2, prompt_logprobs=1).options().sampling.prompt_logprobs == 2
    )
    assert _request(logprobs=2, prompt_logprobs=3).options().sampling.prompt_logprobs == 3


def test_completion_may_have_no_token() -> None:
    """``max_tokens: 0`` computes the prompt alone; a negative number of tokens is a 400."""
    assert _request(max_tokens=0).options().max_tokens == 0


@pytest.mark.parametrize("asked", [-1, 21, True, 1.5])
def test_prompt_logprobs_out_of_bounds_are_refused(asked: object) -> None:
    """The whole vocabulary, or more alternatives than ``logprobs`` may have, is a 400."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(prompt_logprobs=asked)
    assert caught.value.param == "prompt_logprobs"


def test_prompt_logprobs_in_a_stream_are_refused() -> None:
    """A stream's chunks have no place for them."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(prompt_logprobs=0, stream=True)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x", "echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
    ],
)
def test_unsupported_fields_are_refused(fields: dict[str, object], param: str) -> None:
    """Unsupported fields that would change the answer are refused by name."""
    with pytest.raises(UnsupportedParameterError) as caught:
        _request(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"best_of": 3}, "send n: 3 with logprobs: 0"), ({"best_of": 1, "n": 2}, "fewer than the 2")],
)
def test_best_of_says_what_to_send_instead(fields: dict[str, object], words: str) -> None:
    """Every completion that is computed is in the answer, so the client can choose."""
    with pytest.raises(InvalidRequestError, match=words):
        _request(**fields)


@pytest.mark.parametrize("fields", [{"suffix": None}, {"suffix": ""}, {"best_of": 1}, {"n": None}])
def test_neutral_fields_are_accepted(fields: dict[str, object]) -> None:
    """The same fields with values that ask for nothing pass."""
    assert _request(**fields).options() == GenerationOptions()


def test_a_suffix_needs_prompts_that_are_texts() -> None:
    """The texts around a gap are encoded together with the model's own tokens, so ids are refused."""
    assert _request(prompt=["a", "b"], suffix="x").texts() == ("a", "b")
    for prompt in ([1, 2], [[1], [2]]):
        with pytest.raises(InvalidRequestError) as caught:
            _request(prompt=prompt, suffix="x")
        assert caught.value.param == "suffix"


def test_a_completion_takes_one_constraint() -> None:
    """The same shapes as of a chat completion, one at a time."""
    assert _request().constraint() is None
    constraint = _request(guided_regex="a+").constraint()
    assert constraint == Constraint(ConstraintKind.REGEX, "a+", "guided_regex")
    with pytest.raises(InvalidRequestError) as caught:
        _request(guided_regex="a", response_format={"type": "json_object"})
    assert caught.value.param == "guided_regex"


def test_prompt_ids_are_held_against_the_vocabulary() -> None:
    """An id beyond the vocabulary is refused wherever it stands, and texts are not looked at."""
    _request(prompt="100").check_vocabulary(100)
    _request(prompt=[0, 99]).check_vocabulary(100)
    for fields, param in (
        ({"prompt": [1, 100]}, "prompt"),
        ({"prompt": [[1], [100]]}, "prompt"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            _request(**fields).check_vocabulary(100)
        assert caught.value.param == param


@pytest.mark.parametrize("priority", ["urgent", "", 1.5, True])
def test_priority_is_a_word_or_an_integer(priority: object) -> None:
    """Another word, or a number with a fraction, is a 400 that names the field."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(priority=priority)
    assert caught.value.param == "priority"


_items = st.text(max_size=3) | st.integers(-2, 5) | st.lists(st.integers(-2, 5), max_size=3)


@given(prompt=st.text() | st.lists(_items, max_size=4) | st.none() | st.booleans())
def test_any_prompt_is_taken_or_refused(prompt: object) -> None:
    """Accepted prompts are homogeneous and never an empty list; the rest is a request error."""
    try:
        prompts = _request(prompt=prompt).prompts()
    except RequestError:
        return
    assert prompts
    assert len({type(one) for one in prompts}) == 1
    assert () not in prompts
