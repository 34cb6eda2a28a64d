"""Images and videos in every dialect: what a template message holds, and what is refused and why."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Struct

from machd.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from machd.dialects.responses.items import item_chain, item_messages
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.tokens.request import TokenizeRequest
from machd.dialects.wire.decoding import decode_body
from machd.dialects.wire.media import (
    MAX_URL_CHARS,
    media_characters,
    media_from_base64,
    media_from_url,
)
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.media import MediaKind, MediaSource, media_of

Messages = list[dict[str, Any]]
Read = Callable[..., Messages]

_BYTES = b"\x89PNG\r\n\x1a\n, an image"
_BASE64 = b64encode(_BYTES).decode()
_DATA_URL = f"data:image/png;base64,{_BASE64}"
_VIDEO_URL = f"data:video/mp4;base64,{_BASE64}"
_HTTPS_URL = "https://images.example.org/a.png"
_FILE_URL = "file:///srv/images/a.png"
_CANARY = "canary-7f3a"


def _decoded(type_: type[Struct], **body: object) -> Any:
    return decode_body(json.dumps({"model": "m", **body}).encode(), type_)


def _chat(*parts: object, role: str = "user", **fields: object) -> Messages:
    messages = [{"role": role, "content": list(parts), **fields}]
    request = _decoded(ChatCompletionRequest, messages=messages).checked()
    return list(request.conversation().messages)


def _anthropic(*blocks: object, role: str = "user") -> Messages:
    messages: Messages = [{"role": "user", "content": "hi"}] if role == "assistant" else []
    messages.append({"role": role, "content": list(blocks)})
    request = _decoded(MessagesRequest, messages=messages, max_tokens=1).checked()
    return list(request.conversation().messages)


def _anthropic_result(*blocks: object, **fields: object) -> Messages:
    """The message of a tool whose result has these blocks, and what follows it."""
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(blocks), **fields}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    request = _decoded(MessagesRequest, messages=messages, max_tokens=1).checked()
    return list(request.conversation().messages[2:])


def _responses(*parts: object, role: str = "user") -> Messages:
    request = _decoded(ResponsesRequest, input=[{"role": role, "content": list(parts)}]).checked()
    return list(request.continued(request.chain(previous=(), referenced={})).messages)


def _responses_output(*parts: object) -> Messages:
    items = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": list(parts)},
    ]
    request = _decoded(ResponsesRequest, input=items).checked()
    return list(request.continued(request.chain(previous=(), referenced={})).messages[1:])


def _ollama(*images: object, role: str = "user") -> Messages:
    messages = [{"role": role, "content": "look", "images": list(images)}]
    return list(_decoded(OllamaChatRequest, messages=messages).checked().conversation().messages)


def _generate(*images: object, **fields: object) -> Messages:
    body = {"prompt": "look", "images": list(images), **fields}
    return list(_decoded(OllamaGenerateRequest, **body).checked().conversation().messages)


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _image(url: object, **fields: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _video(url: object, /, *, inside: dict[str, object] | None = None, **fields: object) -> object:
    return {"type": "video_url", "video_url": {"url": url, **(inside or {})}, **fields}


def _block(**source: object) -> dict[str, object]:
    return {"type": "image", "source": source}


def _base64_block(data: str, media_type: str = "image/png") -> dict[str, object]:
    return _block(type="base64", media_type=media_type, data=data)


def _input_image(**fields: object) -> dict[str, object]:
    return {"type": "input_image", **fields}


def _shown(content: object) -> list[object]:
    """A content's parts: texts as they are, an image or a video as its type and its bytes or URL."""
    assert isinstance(content, list)
    shown: list[object] = []
    for part in content:
        source = part.get("source")
        if source is None:
            assert part == {"type": "text", "text": part["text"]}
            shown.append(part["text"])
        else:
            assert isinstance(source, MediaSource)
            assert part == {"type": source.kind.value, "source": source}
            shown.append((part["type"], source.content or source.url))
    return shown


_ONE = ("image", _BYTES)

# Reader, parts, then the parts of the last message and the request fields of its images and videos.
_GOOD: dict[str, tuple[Read, list[object], list[object], list[str]]] = {
    "chat, a data: URL": (
        _chat,
        [_image(_DATA_URL)],
        [_ONE],
        ["messages[0].content[0].image_url.url"],
    ),
    "chat, a URL as a text": (
        _chat,
        [{"type": "image_url", "image_url": _DATA_URL}],
        [_ONE],
        ["messages[0].content[0].image_url"],
    ),
    "chat, detail": (
        _chat,
        [_image(_DATA_URL, detail="high")],
        [_ONE],
        ["messages[0].content[0].image_url.url"],
    ),
    "chat, an https: URL": (
        _chat,
        [_image(_HTTPS_URL)],
        [("image", _HTTPS_URL)],
        ["messages[0].content[0].image_url.url"],
    ),
    "chat, a file: URL": (
        _chat,
        [_image(_FILE_URL)],
        [("image", _FILE_URL)],
        ["messages[0].content[0].image_url.url"],
    ),
    "chat, a video": (
        _chat,
        [_video(_VIDEO_URL)],
        [("video", _BYTES)],
        ["messages[0].content[0].video_url.url"],
    ),
    "chat, a video's URL as a text": (
        _chat,
        [{"type": "video_url", "video_url": _VIDEO_URL}],
        [("video", _BYTES)],
        ["messages[0].content[0].video_url"],
    ),
    "chat, texts and images in their order": (
        _chat,
        [_text("a"), _text("b"), _image(_DATA_URL), _text("c"), _image(_HTTPS_URL), _text("d")],
        ["ab", _ONE, "c", ("image", _HTTPS_URL), "d"],
        ["messages[0].content[2].image_url.url", "messages[0].content[4].image_url.url"],
    ),
    "chat, an empty text": (
        _chat,
        [_text(""), _image(_DATA_URL)],
        [_ONE],
        ["messages[0].content[1].image_url.url"],
    ),
    "anthropic, base64": (
        _anthropic,
        [_base64_block(_BASE64)],
        [_ONE],
        ["messages[0].content[0].source.data"],
    ),
    "anthropic, a URL": (
        _anthropic,
        [_block(type="url", url=_HTTPS_URL)],
        [("image", _HTTPS_URL)],
        ["messages[0].content[0].source.url"],
    ),
    "anthropic, texts and images in their order": (
        _anthropic,
        [_text("a"), _text("b"), _base64_block(_BASE64), _text("c")],
        ["a\nb", _ONE, "c"],
        ["messages[0].content[2].source.data"],
    ),
    "anthropic, inside a result": (
        _anthropic_result,
        [_text("a"), _base64_block(_BASE64)],
        ["a", _ONE],
        ["messages[2].content[0].content[1].source.data"],
    ),
    "responses, a data: URL": (
        _responses,
        [_input_image(image_url=_DATA_URL, detail="auto")],
        [_ONE],
        ["input[0].content[0].image_url"],
    ),
    "responses, null where a file could be": (
        _responses,
        [_input_image(image_url=_HTTPS_URL, file_id=None)],
        [("image", _HTTPS_URL)],
        ["input[0].content[0].image_url"],
    ),
    "responses, texts and images in their order": (
        _responses,
        [
            {"type": "input_text", "text": "a"},
            {"type": "input_text", "text": "b"},
            _input_image(image_url=_DATA_URL),
            {"type": "input_text", "text": "c"},
        ],
        ["ab", _ONE, "c"],
        ["input[0].content[2].image_url"],
    ),
    "responses, inside an output": (
        _responses_output,
        [_input_image(image_url=_DATA_URL)],
        [_ONE],
        ["input[1].output[0].image_url"],
    ),
    "ollama, a message": (_ollama, [_BASE64], [_ONE, "look"], ["messages[0].images[0]"]),
    "ollama, two images of a message": (
        _ollama,
        [_BASE64, _BASE64],
        [_ONE, _ONE, "look"],
        ["messages[0].images[0]", "messages[0].images[1]"],
    ),
    "ollama, a prompt": (_generate, [_BASE64], [_ONE, "look"], ["images[0]"]),
}


@pytest.mark.parametrize("name", _GOOD)
def test_images_and_videos_stand_in_their_places(name: str) -> None:
    """Texts side by side are one part, images and videos stand between them, each with its field."""
    read, parts, expected, params = _GOOD[name]
    messages = read(*parts)
    assert _shown(messages[-1]["content"]) == expected
    assert [one.param for one in media_of(messages)] == params


@pytest.mark.parametrize(
    "url",
    [
        f"data:;base64,{_BASE64}",
        f"data:;charset=utf-8;base64,{_BASE64}",
        f"data:image/png;name=a.png;base64,{_BASE64}",
        f"DATA:IMAGE/PNG;BASE64,{_BASE64}",
        f"data:image/x-unheard-of;base64,{_BASE64}",
    ],
)
def test_a_data_url_is_read_whatever_stands_before_its_comma(url: str) -> None:
    """A media type may be missing, have parameters, be in capitals, or be one that is new."""
    assert media_from_url(url, MediaKind.IMAGE, param="p") == MediaSource(
        MediaKind.IMAGE, "p", content=_BYTES
    )


@pytest.mark.parametrize(
    "part",
    [
        _video(_VIDEO_URL, fps=2.5, max_frames=16),
        _video(_VIDEO_URL, inside={"fps": 2.5, "max_frames": 16}),
        _video(_VIDEO_URL, inside={"fps": 2.5}, fps=2.5, max_frames=16),
    ],
)
def test_frames_of_a_video_are_named_beside_the_url_or_at_the_part(part: object) -> None:
    """Both spellings mean the same, and one value may stand at both places."""
    (source,) = media_of(_chat(part))
    assert (source.fps, source.max_frames) == (2.5, 16)


def test_a_tool_of_a_chat_may_answer_with_an_image() -> None:
    """The result keeps its call's id and the function's name."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [_text("a"), _image(_DATA_URL)]},
    ]
    _, result = _decoded(ChatCompletionRequest, messages=messages).checked().template_messages()
    assert _shown(result["content"]) == ["a", _ONE]
    assert (result["role"], result["tool_call_id"], result["name"]) == ("tool", "c", "look")


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([_base64_block(_BASE64)], ["Error: ", _ONE]),
        ([_text("a"), _base64_block(_BASE64), _text("b")], ["Error: a", _ONE, "b"]),
    ],
)
def test_a_failed_result_with_an_image_begins_with_the_mark_of_its_failure(
    blocks: list[object], expected: list[object]
) -> None:
    """The mark is part of the first text, or a text before the image."""
    (result,) = _anthropic_result(*blocks, is_error=True)
    assert _shown(result["content"]) == expected


def test_images_of_merged_messages_name_their_own_places() -> None:
    """Anthropic's messages of one role are one turn, and each image keeps its field."""
    messages = [
        {"role": "user", "content": [_text("a"), _base64_block(_BASE64)]},
        {"role": "user", "content": [_base64_block(_BASE64), _text("b")]},
    ]
    request = _decoded(MessagesRequest, messages=messages, max_tokens=1).checked()
    (message,) = request.conversation().messages
    assert _shown(message["content"]) == ["a", _ONE, _ONE, "b"]
    assert [one.param for one in media_of([message])] == [
        "messages[0].content[1].source.data",
        "messages[1].content[0].source.data",
    ]


def test_a_stored_image_is_read_again() -> None:
    """A conversation that is continued by its response's id shows the image where it stood."""
    part = _input_image(image_url=_DATA_URL, detail="low")
    request = _decoded(ResponsesRequest, input=[{"role": "user", "content": [part]}]).checked()
    stored = request.chain(previous=(), referenced={}).added
    chain = item_chain("again", previous=stored)
    first, second = item_messages(chain.items, instructions=None).messages
    assert _shown(first["content"]) == [_ONE]
    assert second == {"role": "user", "content": "again"}
    assert media_of([first])[0].param == "previous_response_id.content[0].image_url"


@pytest.mark.parametrize("type_", [CountTokensRequest, TokenizeRequest])
def test_counting_reads_the_messages_of_a_generation(type_: type[Any]) -> None:
    """The endpoints that count tokens see the same parts."""
    part = _image(_DATA_URL) if type_ is TokenizeRequest else _base64_block(_BASE64)
    request = _decoded(type_, messages=[{"role": "user", "content": [part]}]).checked()
    assert _shown(request.conversation().messages[0]["content"]) == [_ONE]


@pytest.mark.parametrize("fields", [{"add_special_tokens": True}, {"add_generation_prompt": False}])
def test_images_are_tokenised_as_in_a_chat_completion_only(fields: dict[str, object]) -> None:
    """Another prompt than a completion's would have another number of tokens for them."""
    messages = [{"role": "user", "content": [_image(_DATA_URL)]}]
    request = _decoded(TokenizeRequest, messages=messages, **fields).checked()
    with pytest.raises(UnsupportedParameterError, match="as a chat completion has them") as caught:
        request.conversation()
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("read", "parts"),
    [
        (_chat, [_text("a"), _text("b")]),
        (_responses, [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        (_anthropic, [_text("ab")]),
    ],
)
def test_content_without_images_stays_a_text(read: Read, parts: list[object]) -> None:
    """Templates of text models get no list."""
    assert read(*parts) == [{"role": "user", "content": "ab"}]


_URL = "messages[0].content[0].image_url.url"
_VIDEO = "messages[0].content[0].video_url.url"
_TYPE = "messages[0].content[0].type"

# Reader, part, fields of the message, then the request field and a piece of the reason.
_BAD: dict[str, tuple[Read, object, dict[str, object], str, str]] = {
    "http: URL": (_chat, _image(f"http://{_CANARY}/a.png"), {}, _URL, "send an https: URL"),
    "http: URL in capitals": (_chat, _image(f"HTTP://{_CANARY}/"), {}, _URL, "send an https: URL"),
    "ftp: URL": (_chat, _image(f"ftp://{_CANARY}/a.png"), {}, _URL, "not a URL of a kind"),
    "javascript: URL": (_chat, _image(f"javascript:{_CANARY}"), {}, _URL, "not a URL of a kind"),
    "blob: URL": (_chat, _image(f"blob:https://{_CANARY}"), {}, _URL, "not a URL of a kind"),
    "gopher: URL": (_chat, _image(f"gopher://{_CANARY}"), {}, _URL, "not a URL of a kind"),
    "path": (_chat, _image(f"/etc/{_CANARY}"), {}, _URL, "not a URL of a kind"),
    "path with a drive": (_chat, _image(f"C:\\{_CANARY}.png"), {}, _URL, "not a URL of a kind"),
    "relative URL": (_chat, _image(f"//{_CANARY}/a.png"), {}, _URL, "not a URL of a kind"),
    "empty URL": (_chat, _image(""), {}, _URL, "not a URL of a kind"),
    "space before the scheme": (_chat, _image(f" {_HTTPS_URL}"), {}, _URL, "not a URL of a kind"),
    "base64 alone": (_chat, _image(_BASE64), {}, _URL, "data:image/png;base64,"),
    "https: URL with a space": (_chat, _image("https://a.example/b c"), {}, _URL, "percent-encode"),
    "https: URL with a line feed": (
        _chat,
        _image(f"https://a.example/\r\n{_CANARY}: x"),
        {},
        _URL,
        "percent-encode",
    ),
    "https: URL beyond ASCII": (
        _chat,
        _image("https://\u00e4.example/"),
        {},
        _URL,
        "percent-encode",
    ),
    "https: URL without an end": (
        _chat,
        _image("https://a.example/" + "a" * MAX_URL_CHARS),
        {},
        _URL,
        "8192 characters",
    ),
    "file: URL with a NUL": (_chat, _image("file:///a\0b"), {}, _URL, "percent-encode"),
    "data: URL without a comma": (_chat, _image("data:image/png;base64"), {}, _URL, "no comma"),
    "data: URL with its comma far away": (
        _chat,
        _image(f"data:image/png;{'a' * 300};base64,{_BASE64}"),
        {},
        _URL,
        "no comma in its first 256",
    ),
    "data: URL without base64": (
        _chat,
        _image(f"data:image/png,%89PNG{_CANARY}"),
        {},
        _URL,
        "not percent-encoded",
    ),
    "data: URL of the media type base64": (
        _chat,
        _image(f"data:base64,{_BASE64}"),
        {},
        _URL,
        "not percent-encoded",
    ),
    "data: URL with base64 before a parameter": (
        _chat,
        _image(f"data:image/png;base64;a=b,{_BASE64}"),
        {},
        _URL,
        "not percent-encoded",
    ),
    "no data": (_chat, _image("data:image/png;base64,"), {}, _URL, "there is no data"),
    "padding alone": (_chat, _image("data:image/png;base64,===="), {}, _URL, "not valid base64"),
    "padding left out": (_chat, _image("data:image/png;base64,QQ"), {}, _URL, "its padding"),
    "data behind the padding": (
        _chat,
        _image("data:image/png;base64,QQ==QQ=="),
        {},
        _URL,
        "not valid base64",
    ),
    "base64 of URLs": (_chat, _image("data:image/png;base64,-_-_"), {}, _URL, "standard alphabet"),
    "percent-encoded base64": (
        _chat,
        _image("data:image/png;base64,QUJD%2B"),
        {},
        _URL,
        "not valid base64",
    ),
    "base64 in lines": (_chat, _image("data:image/png;base64,QUJD\nQUJD"), {}, _URL, "line breaks"),
    "base64 beyond ASCII": (
        _chat,
        _image("data:image/png;base64,\u00e4\u00e4\u00e4\u00e4"),
        {},
        _URL,
        "not valid base64",
    ),
    "SVG": (
        _chat,
        _image(f"data:image/svg+xml;base64,{_BASE64}"),
        {},
        _URL,
        "send image/png, image/jpeg or image/webp",
    ),
    "SVG in capitals": (
        _chat,
        _image(f"data:Image/SVG+XML;charset=utf-8;base64,{_BASE64}"),
        {},
        _URL,
        "has no pixels",
    ),
    "page as an image": (
        _chat,
        _image(f"data:text/html;base64,{_BASE64}"),
        {},
        _URL,
        "not that of an image",
    ),
    "video as an image": (_chat, _image(_VIDEO_URL), {}, _URL, "not that of an image"),
    "image as a video": (_chat, _video(_DATA_URL), {}, _VIDEO, "send video/mp4 or video/webm"),
    "SVG as a video": (
        _chat,
        _video(f"data:image/svg+xml;base64,{_BASE64}"),
        {},
        _VIDEO,
        "has no pixels",
    ),
    "http: URL of a video": (_chat, _video("http://a.example/"), {}, _VIDEO, "send an https: URL"),
    "no frames a second": (
        _chat,
        _video(_VIDEO_URL, fps=0),
        {},
        "messages[0].content[0].fps",
        "> 0.0",
    ),
    "too many frames a second": (
        _chat,
        _video(_VIDEO_URL, inside={"fps": 120.1}),
        {},
        "messages[0].content[0].video_url.fps",
        "<= 120.0",
    ),
    "frames a second as a text": (
        _chat,
        _video(_VIDEO_URL, fps="2"),
        {},
        "messages[0].content[0].fps",
        "number",
    ),
    "no frame": (
        _chat,
        _video(_VIDEO_URL, max_frames=0),
        {},
        "messages[0].content[0].max_frames",
        ">= 1",
    ),
    "too many frames": (
        _chat,
        _video(_VIDEO_URL, inside={"max_frames": 4097}),
        {},
        "messages[0].content[0].video_url.max_frames",
        "<= 4096",
    ),
    "half a frame": (
        _chat,
        _video(_VIDEO_URL, max_frames=1.5),
        {},
        "messages[0].content[0].max_frames",
        "integer",
    ),
    "two numbers of frames": (
        _chat,
        _video(_VIDEO_URL, inside={"max_frames": 2}, max_frames=3),
        {},
        "messages[0].content[0].video_url.max_frames",
        "contradict each other",
    ),
    "no URL": (
        _chat,
        {"type": "image_url", "image_url": {}},
        {},
        "messages[0].content[0].image_url.url",
        "required, but missing",
    ),
    "no image": (
        _chat,
        {"type": "image_url"},
        {},
        "messages[0].content[0].image_url",
        "required, but missing",
    ),
    "list of URLs": (
        _chat,
        {"type": "image_url", "image_url": [_DATA_URL]},
        {},
        "messages[0].content[0].image_url",
        "expected",
    ),
    "part of an unknown type": (
        _chat,
        {"type": "image", "image": _CANARY},
        {},
        _TYPE,
        "expected one",
    ),
    "sound": (_chat, {"type": "input_audio"}, {}, _TYPE, 'send "text", "image_url"'),
    "image of the system": (_chat, _image(_DATA_URL), {"role": "system"}, _TYPE, 'roles "user"'),
    "image of a developer": (
        _chat,
        _image(_DATA_URL),
        {"role": "developer"},
        _TYPE,
        'roles "user"',
    ),
    "image of the assistant": (
        _chat,
        _image(_DATA_URL),
        {"role": "assistant"},
        _TYPE,
        'roles "user"',
    ),
    "video of the assistant": (
        _chat,
        _video(_VIDEO_URL),
        {"role": "assistant"},
        _TYPE,
        'roles "user"',
    ),
    "anthropic, bad base64": (
        _anthropic,
        _base64_block(f"!{_CANARY}!"),
        {},
        "messages[0].content[0].source.data",
        "not valid base64",
    ),
    "anthropic, no data": (
        _anthropic,
        _base64_block(""),
        {},
        "messages[0].content[0].source.data",
        "there is no data",
    ),
    "anthropic, SVG": (
        _anthropic,
        _base64_block(_BASE64, "image/svg+xml"),
        {},
        "messages[0].content[0].source.data",
        "has no pixels",
    ),
    "anthropic, a page": (
        _anthropic,
        _base64_block(_BASE64, f"text/{_CANARY}"),
        {},
        "messages[0].content[0].source.data",
        "not that of an image",
    ),
    "anthropic, no media type": (
        _anthropic,
        _block(type="base64", data=_BASE64),
        {},
        "messages[0].content[0].source.media_type",
        "required, but missing",
    ),
    "anthropic, http: URL": (
        _anthropic,
        _block(type="url", url=f"http://{_CANARY}/"),
        {},
        "messages[0].content[0].source.url",
        "send an https: URL",
    ),
    "anthropic, a stored file": (
        _anthropic,
        _block(type="file", file_id=_CANARY),
        {},
        "messages[0].content[0].source.type",
        "no files are stored here",
    ),
    "anthropic, an unknown source": (
        _anthropic,
        _block(type=_CANARY),
        {},
        "messages[0].content[0].source.type",
        '"base64", "file", "url"',
    ),
    "anthropic, of the assistant": (
        _anthropic,
        _base64_block(_BASE64),
        {"role": "assistant"},
        "messages[1].content[0].type",
        'the role "assistant" cannot hold',
    ),
    "anthropic, of the system": (
        _anthropic,
        _base64_block(_BASE64),
        {"role": "system"},
        "messages[0].content[0].type",
        'the role "system" cannot hold',
    ),
    "anthropic, in a result": (
        _anthropic_result,
        _block(type="url", url="ftp://a.example/"),
        {},
        "messages[2].content[0].content[0].source.url",
        "not a URL of a kind",
    ),
    "responses, http: URL": (
        _responses,
        _input_image(image_url=f"http://{_CANARY}/"),
        {},
        "input[0].content[0].image_url",
        "send an https: URL",
    ),
    "responses, an object": (
        _responses,
        _input_image(image_url={"url": _DATA_URL}),
        {},
        "input[0].content[0].image_url",
        "expected",
    ),
    "responses, a stored file": (
        _responses,
        _input_image(file_id=_CANARY),
        {},
        "input[0].content[0].file_id",
        "no files are stored here",
    ),
    "responses, a stored file beside a URL": (
        _responses,
        _input_image(image_url=_DATA_URL, file_id=_CANARY),
        {},
        "input[0].content[0].file_id",
        "not supported",
    ),
    "responses, neither URL nor file": (
        _responses,
        _input_image(),
        {},
        "input[0].content[0].image_url",
        "required, but missing",
    ),
    "responses, of the assistant": (
        _responses,
        _input_image(image_url=_DATA_URL),
        {"role": "assistant"},
        "input[0].content[0].type",
        "not supported here",
    ),
    "responses, of a developer": (
        _responses,
        _input_image(image_url=_DATA_URL),
        {"role": "developer"},
        "input[0].content[0].type",
        "not supported here",
    ),
    "responses, in an output": (
        _responses_output,
        _input_image(image_url="data:image/png;base64,?"),
        {},
        "input[1].output[0].image_url",
        "not valid base64",
    ),
    "ollama, a data: URL": (_ollama, _DATA_URL, {}, "messages[0].images[0]", "not valid base64"),
    "ollama, a path": (_ollama, f"/etc/{_CANARY}", {}, "messages[0].images[0]", "not valid base64"),
    "ollama, nothing": (_ollama, "", {}, "messages[0].images[0]", "there is no data"),
    "ollama, no text": (_ollama, 1, {}, "messages[0].images[0]", "expected"),
    "ollama, of the system": (
        _ollama,
        _BASE64,
        {"role": "system"},
        "messages[0].images",
        'roles "user"',
    ),
    "ollama, of the assistant": (
        _ollama,
        _BASE64,
        {"role": "assistant"},
        "messages[0].images",
        'roles "user"',
    ),
    "ollama, a prompt's": (_generate, "!", {}, "images[0]", "not valid base64"),
    "ollama, beside a raw prompt": (
        _generate,
        _BASE64,
        {"raw": True},
        "images",
        "send one of them",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_image_or_video_is_refused_with_its_field_and_what_to_do(name: str) -> None:
    """The answer is a 400 that names the field, gives the reason and repeats nothing that was sent."""
    read, part, fields, param, reason = _BAD[name]
    with pytest.raises(InvalidRequestError) as caught:
        read(part, **fields)
    error = caught.value
    assert (error.http_status, error.param) == (400, param)
    assert reason in error.message
    assert _CANARY not in error.message
    assert len(error.message) < 300


def test_the_bytes_of_an_image_are_in_no_text_of_it() -> None:
    """What is logged of a source by mistake shows neither the file nor its address."""
    sources = [
        media_from_base64(_BASE64, MediaKind.IMAGE, param="p"),
        media_from_url(_HTTPS_URL, MediaKind.IMAGE, param="p"),
    ]
    assert not any(secret in repr(sources) for secret in ("PNG", "example"))


@pytest.mark.parametrize(
    ("type_", "body"),
    [
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [_image(_DATA_URL)]}]}),
        (
            ChatCompletionRequest,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [_text("a"), {"type": "image_url", "image_url": _DATA_URL}],
                    }
                ]
            },
        ),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [_video(_DATA_URL)]}]}),
        (
            MessagesRequest,
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [_base64_block(_DATA_URL)]}],
            },
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [_input_image(image_url=_DATA_URL)]}]},
        ),
        (
            OllamaChatRequest,
            {"messages": [{"role": "user", "content": "a", "images": [_DATA_URL]}]},
        ),
        (OllamaGenerateRequest, {"prompt": "a", "images": [_DATA_URL]}),
        (TokenizeRequest, {"messages": [{"role": "user", "content": [_image(_DATA_URL)]}]}),
    ],
)
def test_characters_of_images_are_counted_apart_from_text(
    type_: type[Struct], body: dict[str, object]
) -> None:
    """In every dialect a body's images are told from its text, which has a limit of its own."""
    assert media_characters(_decoded(type_, **body)) == len(_DATA_URL)


def test_no_text_counts_as_an_image() -> None:
    """A long text does not get by the limit of bodies, whatever it looks like."""
    messages = [{"role": "user", "content": [_text(_DATA_URL)]}]
    body = _decoded(ChatCompletionRequest, messages=messages, user=_DATA_URL)
    assert media_characters(body) == 0
