"""Images between the tokens of a rendered conversation."""

from __future__ import annotations

from typing import Any

import pytest

from machd.engine.protocol.media import Media
from machd.errors import InvalidRequestError
from machd.reading.keyed_prompt import KeyedPrompt, keyed_prompt
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource

_PLACEHOLDER = "<image>"


class _Processor:
    """A processor of one placeholder."""

    def __init__(self, *, reads_parts: bool = True, is_numbered: bool = False) -> None:
        self.reads_parts = reads_parts
        self._is_numbered = is_numbered

    def placeholder(self, kind: MediaKind, number: int) -> str:
        assert kind is MediaKind.IMAGE
        return f"<image{number}>" if self._is_numbered else _PLACEHOLDER

    def process(self, *_: object) -> Media:
        raise AssertionError("everything is decoded already")

    def close(self) -> None:
        """Hold nothing."""


def _source(name: str) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, "messages[0]", name.encode())


def _message(*parts: str | MediaSource) -> dict[str, object]:
    content: list[dict[str, object]] = [
        {"type": "image", MEDIA_KEY: one}
        if isinstance(one, MediaSource)
        else {"type": "text", "text": one}
        for one in parts
    ]
    return {"role": "user", "content": content}


def _render(messages: list[dict[str, Any]]) -> str:
    """A template that writes parts in order, and a mark at the end."""
    said = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said += [one["text"] if one["type"] == "text" else _PLACEHOLDER for one in parts]
    return "".join([*said, "!"])


def _prompt(messages: list[dict[str, object]], *, reads_parts: bool = True) -> KeyedPrompt:
    sources = [
        one[MEDIA_KEY]
        for message in messages
        if isinstance(parts := message["content"], list)
        for one in parts
        if MEDIA_KEY in one
    ]
    decoded = {
        id(one): Media(MediaKind.IMAGE, one.content, (900, 901), {})  # 2 tokens each
        for one in sources
    }
    return keyed_prompt(
        messages,
        decoded,
        _Processor(reads_parts=reads_parts),
        render=_render,
        encode=lambda text: [ord(one) for one in text],
    )


@pytest.mark.parametrize("reads_parts", [True, False])
def test_keys_lie_where_images_were(reads_parts: bool) -> None:  # noqa: FBT001 - a parameter
    """Texts and images keep their order, whether the template writes placeholders or machd does."""
    prompt = _prompt([_message("a", _source("x"), "b", _source("y"))], reads_parts=reads_parts)
    first, second = prompt.spans
    assert prompt.keys[first.start : first.stop] == first.media.keys
    assert prompt.keys[second.start : second.stop] == second.media.keys
    assert first.media.digest == b"x"
    assert second.media.digest == b"y"
    assert prompt.keys[0] == ord("a")
    assert prompt.keys[-1] == ord("!")


def test_a_typed_placeholder_is_text() -> None:
    """A placeholder that a client typed takes no image's place, and is tokenised as it was typed."""
    prompt = _prompt([_message(f"say {_PLACEHOLDER}", _source("x"))])
    (span,) = prompt.spans
    assert "".join(map(chr, prompt.keys[: span.start])) == f"say {_PLACEHOLDER}"
    assert prompt.text == f"say {_PLACEHOLDER}{_PLACEHOLDER}!"


def test_an_image_that_the_template_leaves_out_is_refused() -> None:
    """No image is dropped unseen."""
    message = _message(_source("x"))
    decoded = {
        id(part[MEDIA_KEY]): Media(MediaKind.IMAGE, b"x", (900,), {})
        for part in message["content"]  # type: ignore[attr-defined]
    }
    with pytest.raises(InvalidRequestError, match="leaves out"):
        keyed_prompt(
            [message],
            decoded,
            _Processor(),
            render=lambda _: "nothing",
            encode=lambda text: [ord(one) for one in text],
        )


def test_text_around_an_image_is_tokenised_with_the_prompt() -> None:
    """Text that the processor writes around an image becomes part of the texts before and behind it."""
    source, tokenised = _source("x"), []

    def encode(text: str) -> list[int]:
        tokenised.append(text)
        return [ord(one) for one in text]

    prompt = keyed_prompt(
        [_message("a\n", source, "b")],
        {id(source): Media(MediaKind.IMAGE, b"x", (900,), {}, "\n\n", "\n")},
        _Processor(),
        render=_render,
        encode=encode,
    )
    assert tokenised == ["a\n\n\n", "\nb!"]
    assert [span.start for span in prompt.spans] == [len("a\n\n\n")]


def test_placeholders_may_count_images() -> None:
    """Where placeholders are numbered, each image has its own, over all messages."""
    first, second = _source("x"), _source("y")
    prompt = keyed_prompt(
        [_message(first, "a"), _message(second, "b")],
        {
            id(one): Media(MediaKind.IMAGE, one.content or b"", (900,), {})
            for one in (first, second)
        },
        _Processor(reads_parts=False, is_numbered=True),
        render=_render,
        encode=lambda text: [ord(one) for one in text],
    )
    assert prompt.text == "<image1>\na<image2>\nb!"
    assert [span.media.digest for span in prompt.spans] == [b"x", b"y"]
