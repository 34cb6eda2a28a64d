"""Prompts of questions about one text begin with the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.chat_format import ChatFormat
from machd.engine.protocol.tokenizer import ChatMessages
from machd.errors import UnsupportedParameterError
from machd.reading.shared_prompt import shared_prompts


def test_prompts_are_the_conversations_own() -> None:
    """Each is what a chat with the text and the question would have, thoughts left out."""
    prompts = shared_prompts(FakeTokenizer(), "the text", [" one?", " two?"])
    assert [bytes(one).decode() for one in prompts] == [
        "user: the text\n\nQuestion: one?\nassistant: ",
        "user: the text\n\nQuestion: two?\nassistant: ",
    ]


def test_text_may_hold_the_mark_of_questions() -> None:
    """Whatever a client sends, its text stands in the prompt once and whole."""
    (prompt,) = shared_prompts(FakeTokenizer(), "zq7question zq7questionq", ["?"])
    assert bytes(prompt).decode() == "user: zq7question zq7questionq\n\nQuestion:?\nassistant: "


class _Thinking(FakeTokenizer):
    def render_chat(self, messages: ChatMessages, **_: object) -> str:
        return f"{messages[0]['content']}<think>\n"


def test_thought_that_a_template_opens_is_closed() -> None:
    """A template without a switch opens thoughts all the same; the answer comes behind them."""
    (prompt,) = shared_prompts(_Thinking(), "t", ["?"])
    assert bytes(prompt).decode() == "t\n\nQuestion:?<think>\n</think>"


class _Severally(FakeTokenizer):
    @property
    def chat_format(self) -> ChatFormat:
        return replace(super().chat_format, first_state="commentary")


class _Twice(FakeTokenizer):
    def render_chat(self, messages: ChatMessages, **_: object) -> str:
        return f"{messages[0]['content']} {messages[0]['content']}"


@pytest.mark.parametrize("tokenizer", [_Severally(), _Twice()], ids=["several messages", "twice"])
def test_model_whose_reply_does_not_begin_with_its_answer_is_refused(
    tokenizer: FakeTokenizer,
) -> None:
    """Probabilities of its first token would mean nothing."""
    with pytest.raises(UnsupportedParameterError) as refused:
        shared_prompts(tokenizer, "t", ["?"])
    assert refused.value.param == "model"
