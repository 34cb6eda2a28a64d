"""A place in a conversation is right or unknown, whatever a family's template does with texts, thoughts, tools and calls."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.family_templates import FAMILY_TEMPLATES
from support.engines.fake_engine import FakeEngine
from support.engines.tiny_models import tiny_tokenizer

from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import InvalidRequestError
from machd.reading.conversation import prepare_conversation
from machd.reading.prompt_places import PromptPart, PromptPlace
from machd.request.conversation import Conversation, FunctionTool

_WORD = re.compile(r"([mrct])(\d)w\d+")
"""A word of a message's text (m), thought (r) or call (c), or of a tool (t), with the number of that."""


@functools.cache
def _tokenizer(family: str) -> MlxTokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.wrapped._tokenizer.chat_template = FAMILY_TEMPLATES[family]
    return tokenizer


@dataclass
class _Talk:
    """A conversation whose words tell where they are from."""

    messages: list[dict[str, object]] = field(default_factory=list)
    words: int = 0

    def text(self, kind: str, number: int, gaps: tuple[str, str, str]) -> str:
        """Two words, with white space around and between them."""
        words = [f"{kind}{number}w{self.words + one}" for one in range(2)]
        self.words += 2
        return gaps[0] + gaps[1].join(words) + gaps[2]

    def tools(self, count: int) -> tuple[FunctionTool, ...]:
        """Tools whose names, descriptions and parameters have such words."""
        return tuple(
            FunctionTool(
                f"f{one}",
                self.text("t", one, ("", " {} ", "")),
                {
                    "type": "object",
                    "properties": {self.text("t", one, ("", "_", "")): {"type": "string"}},
                },
            )
            for one in range(count)
        )


_gaps = st.tuples(
    *[st.sampled_from(["", " ", "\n", "\n\n"]), st.sampled_from([" ", "\n", '"'])] * 2
)


@st.composite
def _talks(
    draw: st.DrawFn, *, calls: bool, system: bool
) -> tuple[list[dict[str, object]], tuple[FunctionTool, ...]]:
    talk = _Talk()

    def said(kind: str = "m") -> str:
        outer, inner, end, _ = draw(_gaps)
        return talk.text(kind, len(talk.messages), (outer, inner, end))

    def add(role: str, content: str, **more: object) -> None:
        talk.messages.append({"role": role, "content": content, **more})

    if system and draw(st.booleans()):
        add("system", said())
    for turn in range(draw(st.integers(1, 3))):
        add("user", said())
        if calls and draw(st.booleans()):
            arguments = {"a": said("c"), "b": {"c": said("c")} if draw(st.booleans()) else 1}
            more: dict[str, object] = {}
            if draw(st.booleans()):
                more["reasoning_content"] = said("r")
            call = {
                "id": f"abcdefg{turn:02}",
                "type": "function",
                "function": {"name": "f0", "arguments": arguments},
            }
            add("assistant", draw(st.sampled_from(["", said()])), tool_calls=[call], **more)
            add("tool", said(), tool_call_id=call["id"], name="f0")
        thought = draw(st.sampled_from(["", "<think>\n{}\n</think>\n\n"]))
        add("assistant", thought.format(said("r")) + said() if thought else said())
    add("user", said())
    return talk.messages, talk.tools(draw(st.integers(1, 3))) if calls else ()


@dataclass
class _Front:
    tokenizer: MlxTokenizer
    model = FakeEngine().model
    media = None


def _places(family: str, conversation: Conversation) -> tuple[str, list[PromptPlace | None]] | None:
    """The prompt and the place of each of its tokens, which are characters; None if the template refuses the conversation."""
    tokenizer = _tokenizer(family)
    try:
        prepared = prepare_conversation(conversation, _Front(tokenizer))  # type: ignore[arg-type]
    except InvalidRequestError:
        return None
    pieces = [tokenizer.token_bytes(one).decode() for one in prepared.prompt]
    places: list[PromptPlace | None] = [None] * (sum(map(len, pieces)) + 1)
    if prepared.places is not None:
        for tokens, at in enumerate(accumulate(map(len, pieces), initial=0)):
            places[at] = prepared.places.at(tokens)
    return "".join(pieces), places


def _check(text: str, places: list[PromptPlace | None], messages: list[dict[str, object]]) -> None:
    """Check every place that is told against the text around it."""
    for at, place in enumerate(places):
        if place is not None and place.character is not None:
            assert place.message_index is not None
            content = str(messages[place.message_index]["content"])
            rest = content[place.character :]
            assert rest, "a place in a text is in front of one of its characters"
            assert text[at] == rest[0]
    for one in _WORD.finditer(text):
        kind, number = one[1], int(one[2])
        for at in range(one.start() + 1, one.end()):
            place = places[at]
            if place is None:
                continue
            if kind == "t":
                assert (place.part, place.tool_index) == (PromptPart.TOOLS, number)
                continue
            assert (place.part, place.message_index) == (PromptPart.MESSAGE, number)
            if place.character is not None:
                content = str(messages[number]["content"])
                assert content.startswith(text[at : one.end()], place.character)


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_place_is_right_or_unknown(family: str, data: st.DataObject) -> None:
    """A word is told to be of the message or tool that it is of, at its own character, or is not told."""
    messages, tools = data.draw(_talks(calls=data.draw(st.booleans()), system=True))
    found = _places(family, Conversation(messages, tools=tools, is_located=True))
    if found is None:
        return
    text, places = found
    _check(text, places, messages)


_WITH_CALL: list[dict[str, object]] = [
    {"role": "system", "content": " m0w0 m0w1"},
    {"role": "user", "content": "m1w2"},
    {"role": "assistant", "content": "<think>\nr2w3\n</think>\n\nm2w4"},
    {"role": "user", "content": "m3w5"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r4w6",
        "tool_calls": [
            {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "f0", "arguments": {"a": "c4w7"}},
            }
        ],
    },
    {"role": "tool", "content": "m5w8", "tool_call_id": "abcdefgh1", "name": "f0"},
    {"role": "assistant", "content": "m6w9"},
    {"role": "user", "content": "m7w10 m7w11"},
]
_TWO_TOOLS = tuple(
    FunctionTool(
        f"f{one}",
        f"t{one}w{one}20",
        {"type": "object", "properties": {f"t{one}w{one}21": {"type": "string"}}},
    )
    for one in range(2)
)


def _told(family: str, messages: list[dict[str, object]], tools: tuple[FunctionTool, ...]) -> str:
    """The words that the prompt has: one that is told exactly in capitals, one whose part is told as it is, the rest in brackets."""
    found = _places(family, Conversation(messages, tools=tools, is_located=True))
    assert found is not None
    text, places = found
    _check(text, places, messages)
    words = []
    for one in _WORD.finditer(text):
        place = places[one.start() + 1]
        is_exact = place is not None and (place.character, place.tool_index) != (None, None)
        words.append(one[0].upper() if is_exact else one[0] if place else f"({one[0]})")
    return " ".join(words)


_IN_ORDER = "M0W0 M0W1 T0W020 T0W021 T1W120 T1W121 M1W2 {0} M2W4 M3W5 c4w7 M5W8 M6W9 M7W10 M7W11"


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("llama 3.1", _IN_ORDER.format("R2W3")),
        ("qwen 3", _IN_ORDER.format("").replace("  ", " ")),
        (
            "qwen 3 coder",
            (
                "M0W0 M0W1 T0W020 T0W021 (t1w120) (t1w121) "
                "M1W2 R2W3 M2W4 M3W5 (c4w7) M5W8 M6W9 M7W10 M7W11"
            ),
        ),
        (
            "mistral",
            "M1W2 R2W3 M2W4 M3W5 c4w7 M5W8 M6W9 T0W020 T0W021 T1W120 T1W121 M0W0 M0W1 M7W10 M7W11",
        ),
        ("gemma 3", _IN_ORDER.format("R2W3")),
        (
            "gpt-oss",
            (
                "M0W0 M0W1 T0W020 T0W021 (t1w120) (t1w121) "
                "M1W2 R2W3 M2W4 M3W5 r4w6 c4w7 M5W8 M6W9 M7W10 M7W11"
            ),
        ),
        ("deepseek r1", _IN_ORDER.format("").replace("  ", " ")),
    ],
)
def test_a_family_tells_texts_and_tools_to_the_character(family: str, told: str) -> None:
    """Of calls and thoughts in fields of their own the message is told; unknown is where tools or calls end that are no JSON."""
    assert _told(family, _WITH_CALL, _TWO_TOOLS) == told


def test_a_thought_behind_the_last_question_is_told() -> None:
    """Qwen 3 writes it in front of the call that it led to."""
    told = "M0W0 M0W1 T0W020 T0W021 M1W2 M2W4 M3W5 r4w6 c4w7 M5W8"
    assert _told("qwen 3", _WITH_CALL[:6], _TWO_TOOLS[:1]) == told


def test_a_template_that_changes_texts_tells_no_place() -> None:
    """Its marks are changed, too."""
    found = _places("shouting", Conversation(_WITH_CALL[:2], is_located=True))
    assert found is not None
    assert not any(found[1])
