"""Questions of System One: what is asked, what is refused, and how answers follow from probabilities."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from machd.dialects.systemone.answer import ChoiceAnswer, NoulAnswer, ScoreAnswer
from machd.dialects.systemone.questions import Option, choice, noul, score
from machd.dialects.systemone.request import SystemOneRequest
from machd.dialects.wire.decoding import decode_body
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.errors import InvalidRequestError, UnsupportedParameterError

NOUL = {"type": "noul", "instructions": "Is it so?"}


def read(**fields: Any) -> SystemOneRequest:
    """Read a request of these fields."""
    body = {"state": "s", "questions": {"q": NOUL}, **fields}
    return decode_body(json.dumps(body).encode(), SystemOneRequest).checked()


def text_of(question: dict[str, object]) -> str:
    """What is asked."""
    return read(questions={"q": question}).asked()[1][0].text


def test_each_type_of_question_lists_its_options() -> None:
    """The instructions, a line for each option that says something, and how to answer."""
    assert text_of({**NOUL, "criteria": {"true": "it is", "false": None}}) == (
        " Is it so?\nyes: it is\nAnswer yes or no only."
    )
    assert text_of({**NOUL, "criteria": "of the weather"}) == (
        " Is it so?\nof the weather\nAnswer yes or no only."
    )
    assert text_of({"type": "choice", "criteria": {"x": "an x", "y": None, "z": {"of": [1]}}}) == (
        '\nA: x - an x\nB: y\nC: z - {"of":[1]}\nAnswer with the letter of one option only.'
    )
    assert text_of({"type": "score", "instructions": ["how"], "criteria": ["low", "high"]}) == (
        ' ["how"]\n0: low\n1: high\nAnswer with the number of one level only.'
    )


def test_state_is_text_or_json() -> None:
    """JSON is read as its text, in the client's order."""
    assert read(state="as it is\n").asked()[0] == "as it is\n"
    assert read(state={"b": "é", "a": [1.5, None]}).asked()[0] == '{"b":"é","a":[1.5,null]}'


@pytest.mark.parametrize("count", [1, 2, 26, 27, 255])
def test_labels_of_a_question_are_told_apart(count: int) -> None:
    """Each option has a label of its own, and none begins another one."""
    asked = choice("q", "", [Option(f"o{index}") for index in range(count)])
    tokens = [one for option in asked.continuations(FakeTokenizer()) for one in option]
    assert len(tokens) == count
    assert len({len(one) for one in tokens}) == 1
    assert len(set(tokens)) == count


def test_tokenizer_that_does_not_know_the_labels_is_refused() -> None:
    """Options with one and the same token could not be told apart."""

    class Unknowing(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            del text, add_special_tokens
            return [0]

    with pytest.raises(UnsupportedParameterError, match="does not tell"):
        noul("q", "").continuations(Unknowing())


def test_answers_follow_from_probabilities() -> None:
    """Shares among the options, their mass, the expected level, and confidence as the documents define it."""
    logprobs = [math.log(one) for one in (0.1, 0.3, 0.1)]
    chosen = choice("q", "", [Option(one) for one in "abc"]).answer(logprobs, 1.0)
    assert isinstance(chosen, ChoiceAnswer)
    assert chosen.choice == "b"
    assert chosen.probabilities == pytest.approx({"a": 0.2, "b": 0.6, "c": 0.2})
    assert chosen.confidence == pytest.approx((3 * 0.6 - 1) / 2)
    assert chosen.option_mass == pytest.approx(0.5)

    rated = score("q", "", ["low", "middle", "high"]).answer(logprobs, 1.0)
    assert isinstance(rated, ScoreAnswer)
    assert rated.score == pytest.approx(1.0)
    assert rated.legend == {"0": "low", "1": "middle", "2": "high"}
    assert list(rated.probabilities) == ["0", "1", "2"]

    told = noul("q", "").answer(logprobs[:2], 2.0)
    assert isinstance(told, NoulAnswer)
    assert told.noul == pytest.approx(1 / (1 + math.sqrt(3)))
    assert told.temperature == 2.0
    assert told.option_mass == pytest.approx(0.4)


def test_confidence_is_between_certainty_and_none() -> None:
    """1 where one option has everything, also as the only one, and 0 where all are alike; the first of equals wins."""
    even = choice("q", "", [Option(one) for one in "ab"]).answer([-1.0, -1.0], 1.0)
    assert isinstance(even, ChoiceAnswer)
    assert (even.choice, even.confidence) == ("a", 0.0)
    alone = choice("q", "", [Option("a")]).answer([-9.0], 1.0)
    assert isinstance(alone, ChoiceAnswer)
    assert (alone.confidence, alone.probabilities) == (1.0, {"a": 1.0})
    sure = choice("q", "", [Option(one) for one in "ab"]).answer([-math.inf, 0.0], 1.0)
    assert isinstance(sure, ChoiceAnswer)
    assert (sure.confidence, sure.option_mass) == (1.0, 1.0)


_WIDE = {str(index): None for index in range(256)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"state": ""}, "state"),
        ({"state": None}, "state"),
        ({"state": 3}, "state"),
        ({"state": True}, "state"),
        ({"questions": {}}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": {"": NOUL}}, "questions"),
        ({"questions": {f"q{index}": NOUL for index in range(65)}}, "questions"),
        ({"questions": {"q": {"instructions": "?"}}}, "questions.type"),
        ({"questions": {"q": {"type": "box"}}}, "questions.type"),
        ({"questions": {"q": {"type": ["noul"]}}}, "questions.type"),
        ({"questions": {"q": {**NOUL, "instructions": 1}}}, "questions[0].instructions"),
        ({"questions": {"q": {**NOUL, "criteria": {"yes": "x"}}}}, "questions[0].criteria"),
        ({"questions": {"q": {**NOUL, "criteria": {"true": 1}}}}, "questions[0].criteria.true"),
        ({"questions": {"a": NOUL, "q": {**NOUL, "criteria": 4}}}, "questions[1].criteria"),
        ({"questions": {"q": {"type": "choice"}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": ["a"]}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": {"": None}}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": {"a": 1}}}}, "questions[0].criteria"),
        ({"questions": {"q": {"type": "choice", "criteria": _WIDE}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": []}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": ["l"] * 11}}}, "questions.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": ["l", 2]}}}, "questions[0].criteria[1]"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"images": ["data:image/png;base64,AA"]}, "images"),
        ({"instructions": "Be strict."}, "instructions"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"state": [[[]] * 2] * 20_001}, "state"),
        ({"state": json.loads("[" * 80 + "]" * 80)}, "state"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_request_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequestError) as refused:
        read(**fields)
    assert refused.value.param == param


def test_half_of_a_surrogate_pair_is_refused() -> None:
    """In a state, which is read late, too."""
    body = b'{"state": "\\ud800", "questions": {"q": {"type": "noul"}}}'
    with pytest.raises(InvalidRequestError):
        decode_body(body, SystemOneRequest).checked()


def test_key_that_occurs_twice_counts_as_its_last_occurrence() -> None:
    """As everywhere in machd's API."""
    body = (
        b'{"state": "s", "questions": {"q": {"type": "choice", "criteria": {"a": "1", "a": "2"}}}}'
    )
    (question,) = decode_body(body, SystemOneRequest).checked().asked()[1]
    assert [(one.name, one.description) for one in question.options] == [("a", "2")]


def test_switches_that_ask_for_nothing_are_accepted() -> None:
    """As a client of vLLM's sends them."""
    request = read(chat_template_kwargs={"enable_thinking": False}, images=[], priority=-1)
    assert request.priority_name == "interactive"
