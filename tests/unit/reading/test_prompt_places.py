"""A token of a prompt has a place in its conversation, which is exact or not told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from machd.engine.protocol.media import Media, MediaSpan
from machd.reading.prompt_places import (
    MediaPlaces,
    Messages,
    PromptPart,
    PromptPlace,
    PromptPlaces,
    prompt_places,
)
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource

_MESSAGES: Messages = [
    {"role": "system", "content": "  Be brief. Été ☃.\n"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>well</think>Hi."},
    {"role": "user", "content": "Hello"},
]
_TOOLS: list[Mapping[str, object]] = [
    {"type": "function", "function": {"name": one, "description": f"does {one}"}}
    for one in ("read", "write")
]


def _plain(messages: Messages) -> str:
    turns = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages)
    return f"{turns}<|assistant|>"


def _stripped(messages: Messages) -> str:
    """Strip texts, and thoughts of earlier answers, as many templates do."""
    return _plain(
        [{**one, "content": str(one["content"]).split("</think>")[-1].strip()} for one in messages]
    )


def _with_tools(messages: Messages) -> str:
    lines = "\n".join(json.dumps(one) for one in _TOOLS)
    system = f"{messages[0]['content']}\n# Tools\n{lines}\nCall them."
    return _plain([{"role": "system", "content": system}, *messages[1:]])


def _found(
    render: object, *, tools: Sequence[Mapping[str, object]] = (), kept: Messages = _MESSAGES
) -> tuple[str, PromptPlaces | None]:
    assert callable(render)
    text = str(render(kept))
    pieces = [bytes([one]) for one in text.encode()]
    return text, prompt_places(_MESSAGES, kept, text, pieces, tools=tools, render=render)


def _place(places: PromptPlaces | None, text: str, at: int) -> PromptPlace:
    assert places is not None
    return places.at(len(text[:at].encode()))


def test_a_character_of_a_message_is_found() -> None:
    """White space that the template keeps counts, and so does a text that is there twice."""
    text, places = _found(_plain)
    snow, last = text.index("☃"), text.rindex("Hello")
    assert _place(places, text, snow) == PromptPlace(
        PromptPart.MESSAGE, 0, "system", str(_MESSAGES[0]["content"]).index("☃")
    )
    assert _place(places, text, last + 1) == PromptPlace(PromptPart.MESSAGE, 3, "user", 1)
    assert _place(places, text, text.index("Hello")).message_index == 1


def test_what_the_template_writes_belongs_to_the_message_behind_it() -> None:
    """The opening of the answer is behind all messages."""
    text, places = _found(_plain)
    assert _place(places, text, 1) == PromptPlace(PromptPart.TEMPLATE, 0, "system")
    assert _place(places, text, text.index("<|assistant|>")) == PromptPlace(
        PromptPart.TEMPLATE, 2, "assistant"
    )
    assert _place(places, text, len(text) - 1) == PromptPlace(PromptPart.TEMPLATE)


def test_a_stripped_text_counts_from_the_message_of_the_request() -> None:
    """Of an answer without its thoughts no character is told, and others are found beside it."""
    text, places = _found(_stripped)
    assert _place(places, text, text.index("Be")).character == 2
    assert _place(places, text, text.index("Hi.")).part is PromptPart.TEMPLATE
    assert _place(places, text, text.rindex("Hello")).message_index == 3


def test_a_tool_is_told_by_its_index() -> None:
    """From its line on, until the last one ends."""
    text, places = _found(_with_tools, tools=_TOOLS)
    first = text.index(json.dumps(_TOOLS[0])[:5])
    for at, index in (
        (first + 1, 0),
        (text.index("does read"), 0),
        (text.index("does write"), 1),
    ):
        assert _place(places, text, at) == PromptPlace(
            PromptPart.TOOLS, 1, "user", tool_index=index
        )
    assert _place(places, text, text.index("Call them")).part is PromptPart.TEMPLATE
    assert _place(places, text, text.index("# Tools")).part is PromptPart.TEMPLATE


def test_messages_are_counted_as_the_client_sent_them() -> None:
    """The oldest ones may be left out."""
    text, places = _found(_plain, kept=[_MESSAGES[0], _MESSAGES[3]])
    assert _place(places, text, text.index("Hello")).message_index == 3


def test_a_template_that_changes_texts_has_no_places() -> None:
    """Marks that are changed with the texts do not come out of them again."""
    assert _found(lambda messages: _plain(messages).upper())[1] is None
    assert _found(lambda messages: _plain(messages)[:40])[1] is None


def test_a_tokenizer_that_changes_the_text_has_no_places() -> None:
    """The bytes of the tokens have to be the prompt."""
    text = _plain(_MESSAGES)
    pieces = [b" ", *(bytes([one]) for one in text.encode())]
    assert prompt_places(_MESSAGES, _MESSAGES, text, pieces, tools=(), render=_plain) is None


def test_an_image_has_the_place_of_its_message() -> None:
    """Of the text around images nothing is told."""
    source = MediaSource(MediaKind.IMAGE, "messages.0.content.0", b"png")
    image = {"type": "image", MEDIA_KEY: source}
    messages: Messages = [
        {"role": "user", "content": [image, image]},
        {"role": "user", "content": [image]},
    ]
    media = Media(MediaKind.IMAGE, b"digest", (7, 7), {})
    places = MediaPlaces(messages, [MediaSpan(start, media) for start in (3, 6, 12)])
    assert places.at(7) == PromptPlace(PromptPart.MESSAGE, 0, "user")
    assert places.at(13) == PromptPlace(PromptPart.MESSAGE, 1, "user")
    assert places.at(2) is None
