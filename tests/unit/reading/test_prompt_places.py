"""A token of a prompt has a place in its conversation, which is exact or not told."""

from __future__ import annotations

import json

from machd.engine.protocol.media import Media, MediaSpan
from machd.reading.prompt_marks import Messages, Tools
from machd.reading.prompt_places import (
    MediaPlaces,
    PromptPart,
    PromptPlace,
    PromptPlaces,
    TextPlaces,
    prompt_places,
)
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource

_MESSAGES: Messages = [
    {"role": "system", "content": "  Be brief. Été ☃.\n"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>well</think>Hi."},
    {"role": "user", "content": "Hello"},
]
_TOOLS: Tools = [
    {"type": "function", "function": {"name": one, "description": f"does {one}"}}
    for one in ("read", "write")
]


def _plain(messages: Messages, _tools: Tools = ()) -> str:
    turns = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in messages)
    return f"{turns}<|assistant|>"


def _stripped(messages: Messages, _tools: Tools = ()) -> str:
    """Strip texts, and thoughts of earlier answers, as many templates do."""
    return _plain(
        [{**one, "content": str(one["content"]).split("</think>")[-1].strip()} for one in messages]
    )


def _with_tools(messages: Messages, tools: Tools = _TOOLS) -> str:
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    system = f"{messages[0]['content']}\n# Tools\n{lines}\nCall them."
    return _plain([{"role": "system", "content": system}, *messages[1:]])


def _found(
    render: object, *, tools: Tools = (), kept: Messages = _MESSAGES
) -> tuple[str, PromptPlaces | None]:
    assert callable(render)
    text = str(render(kept))
    pieces = [bytes([one]) for one in text.encode()]
    return text, prompt_places(_MESSAGES, kept, text, pieces, tools=tools, render=render)


def _place(places: PromptPlaces | None, text: str, at: int) -> PromptPlace | None:
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
    assert _place(places, text, text.index("Hello")) == PromptPlace(
        PromptPart.MESSAGE, 1, "user", 0
    )


def test_what_the_template_writes_belongs_to_the_message_behind_it() -> None:
    """The opening of the answer is behind all messages."""
    text, places = _found(_plain)
    assert _place(places, text, 1) == PromptPlace(PromptPart.TEMPLATE, 0, "system")
    assert _place(places, text, text.index("<|assistant|>")) == PromptPlace(
        PromptPart.TEMPLATE, 2, "assistant"
    )
    assert _place(places, text, len(text) - 1) == PromptPlace(PromptPart.TEMPLATE)


def test_a_stripped_text_counts_from_the_message_of_the_request() -> None:
    """An answer without its thoughts counts them, too, and what stands in front of it is not told."""
    text, places = _found(_stripped)
    answer = text.index("Hi.")
    assert _place(places, text, text.index("Be")) == PromptPlace(PromptPart.MESSAGE, 0, "system", 2)
    assert _place(places, text, answer) == PromptPlace(
        PromptPart.MESSAGE, 2, "assistant", len("<think>well</think>")
    )
    assert _place(places, text, answer - 1) is None
    assert _place(places, text, text.rindex("Hello")) == PromptPlace(
        PromptPart.MESSAGE, 3, "user", 0
    )


def test_a_message_has_its_index_in_the_request() -> None:
    """A dialect may have made several of one item, or the first of another field."""
    text = _plain(_MESSAGES)
    pieces = [bytes([one]) for one in text.encode()]
    places = prompt_places(
        _MESSAGES, _MESSAGES, text, pieces, tools=(), indices=[None, 0, 0, 4], render=_plain
    )
    assert _place(places, text, text.index("brief")) == PromptPlace(
        PromptPart.MESSAGE, None, "system", 5
    )
    assert _place(places, text, text.index("Hi.")) == PromptPlace(
        PromptPart.MESSAGE, 0, "assistant", len("<think>well</think>")
    )
    assert _place(places, text, text.rindex("Hello")) == PromptPlace(
        PromptPart.MESSAGE, 4, "user", 0
    )


def test_a_token_that_ends_a_character_is_in_that_character() -> None:
    """What parts is the character, of which the first bytes are the same."""
    text, places = _found(_plain)
    assert places is not None
    before = len(text[: text.index("☃")].encode())
    assert [places.at(before + one) for one in (1, 2)] == [places.at(before)] * 2
    assert places.at(before + 3) != places.at(before)


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
    for one in ("all them", "# Tools"):
        assert _place(places, text, text.index(one)) == PromptPlace(PromptPart.TEMPLATE, 1, "user")


def test_a_tool_that_is_missing_behind_the_last_one_is_told() -> None:
    """The prompt parts where it would begin."""
    text, places = _found(
        lambda messages, tools=_TOOLS[:1]: _with_tools(messages, tools), tools=_TOOLS[:1]
    )
    place = _place(places, text, text.index("Call them") - 1)
    assert place is not None
    assert (place.part, place.tool_index) == (PromptPart.TOOLS, 0)


def test_a_template_that_looks_at_names_has_places_of_texts() -> None:
    """It writes other things for marked tools, so these have no marks."""

    def render(messages: Messages, tools: Tools = _TOOLS) -> str:
        names = [one["function"]["name"] for one in tools]  # type: ignore[index]
        return _with_tools(messages, tools if "read" in names else ())

    text, places = _found(render, tools=_TOOLS)
    assert _place(places, text, text.index("does read")) == PromptPlace(
        PromptPart.TEMPLATE, 1, "user"
    )
    assert _place(places, text, text.rindex("Hello")) == PromptPlace(
        PromptPart.MESSAGE, 3, "user", 0
    )


def test_a_character_of_a_text_is_found() -> None:
    """The tokenizer may write a token in front of it, or its beginning may be left out."""
    text = "été and snow ☃"
    whole = [bytes([one]) for one in text.encode()]
    for pieces, before in ((whole, 0), ([b"<s>", b" ", *whole], 2), (whole[9:], -9)):
        places = TextPlaces.of(text, pieces)
        assert places is not None
        for word in ("snow", "☃"):
            at = before + len(text[: text.index(word)].encode())
            assert places.at(at) == PromptPlace(PromptPart.TEXT, character=text.index(word))
    led = TextPlaces.of(text, [b"<s>", *whole])
    assert led is not None
    assert led.at(0) == PromptPlace(PromptPart.TEXT, character=0)
    assert TextPlaces.of(text, [b"something else"]) is None


def test_messages_are_counted_as_the_client_sent_them() -> None:
    """The oldest ones may be left out."""
    text, places = _found(_plain, kept=[_MESSAGES[0], _MESSAGES[3]])
    assert _place(places, text, text.index("Hello")) == PromptPlace(
        PromptPart.MESSAGE, 3, "user", 0
    )


def test_a_template_that_changes_texts_has_no_places() -> None:
    """Marks that are changed with the texts do not come out of them again."""
    assert _found(lambda messages, _tools=(): _plain(messages).upper())[1] is None
    assert _found(lambda messages, _tools=(): _plain(messages)[:40])[1] is None


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
