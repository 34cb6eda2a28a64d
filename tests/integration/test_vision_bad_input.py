"""Bad images and videos against a real daemon with a real model, while a stream runs beside them.

Each costs its own request a 4xx that names the field and says why, and nothing else: no traceback, no
other request, no changed token.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints.kept_family import write_kept_family
from support.clients import image_files
from support.clients.image_files import encoded, picture
from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess
from support.every_run import sampled

_CHAT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_QUESTION = {"type": "text", "text": "What is this?"}
_STREAM_TOKENS = 200
_PAUSE_S = 0.1
"""Between two streams, which would take all of a core."""

_MAX_PIXELS = 1_000_000
_MAX_BYTES = 3_000_000


@dataclass
class _Served:
    """The daemon, and the folder that its file: URLs may name."""

    daemon: ServeProcess
    images: Path
    alone: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Served]:
    """A daemon whose stream is read alone first, and then again and again beside all cases."""
    folder = tmp_path_factory.mktemp("bad-input")
    checkpoint = write_kept_family("qwen2_vl", folder / "qwen2_vl")
    images = folder / "images"
    images.mkdir()
    (images / "good.png").write_bytes(encoded(picture(), "PNG"))
    (folder / "outside.png").write_bytes(encoded(picture(), "PNG"))
    (images / "link.png").symlink_to(folder / "outside.png")
    os.mkfifo(images / "fifo.png")
    (images / "empty.png").touch()
    arguments = (
        "--continuous-batching",
        "--probe-on-start=off",  # measuring takes as long as all cases
        "--model-dtype=float32",
        f"--vision-allow-files={images}",
        "--vision-allow-urls",
        "--vision-url-hosts=localhost,images.invalid",
        f"--vision-max-image-pixels={_MAX_PIXELS}",
        f"--vision-max-image-bytes={_MAX_BYTES}",
        "--vision-max-frames=4",
        "--limits-max-in-flight=64",
    )
    with ServeProcess(str(checkpoint), *arguments) as daemon:
        served = _Served(daemon, images)
        served.alone.append(_streamed(daemon.url))
        ended = threading.Event()

        def stream() -> None:
            while not ended.wait(_PAUSE_S):
                served.beside.append(_streamed(daemon.url))

        beside = threading.Thread(target=stream)
        beside.start()
        try:
            yield served
        finally:
            ended.set()
            beside.join()
        assert served.beside
        assert set(served.beside) == set(served.alone)
        assert "Traceback" not in "".join(daemon.output)
        levels = {one["event"] for one in daemon.events if one.get("level") == "error"}
        assert not levels


def _streamed(url: str) -> str:
    body = {
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": _STREAM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    with httpx.stream("POST", url + _CHAT, json=body, timeout=CEILING_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


def _url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(content).decode()}"


def _image(content: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return _at(_url(content, media_type))


def _at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _video(content: bytes, **fields: object) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": _url(content, "video/mp4")}, **fields}


def _chat(*parts: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*parts, _QUESTION]}], "max_tokens": 2}


def _photo() -> bytes:
    return encoded(picture(), "JPEG")


def _frames() -> list[Any]:
    return [picture(seed=seed) for seed in (2, 3)]


_GOOD: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(picture(), "PNG"),
    "JPEG": _photo,
    "progressive JPEG": lambda: encoded(picture(), "JPEG", progressive=True),
    "JPEG turned by EXIF": lambda: encoded(
        picture(),
        "JPEG",
        exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0",
    ),
    "CMYK JPEG": lambda: encoded(picture("CMYK"), "JPEG"),
    "grey JPEG": lambda: encoded(picture("L"), "JPEG"),
    "palette": lambda: encoded(picture("P"), "PNG"),
    "palette with transparency": lambda: encoded(picture("P"), "PNG", transparency=0),
    "grey with alpha": lambda: encoded(picture("LA"), "PNG"),
    "RGBA": lambda: encoded(picture("RGBA"), "PNG"),
    "black and white": lambda: encoded(picture("1"), "PNG"),
    "16 bits": image_files.deep_png,
    "WebP": lambda: encoded(picture(), "WEBP"),
    "GIF": lambda: encoded(picture(), "GIF"),
    "animated GIF": lambda: encoded(picture(), "GIF", save_all=True, append_images=_frames()),
    "animated WebP": lambda: encoded(picture(), "WEBP", save_all=True, append_images=_frames()),
    "animated PNG": lambda: encoded(picture(), "PNG", save_all=True, append_images=_frames()),
    "a pixel": lambda: encoded(picture(width=1, height=1), "PNG"),
    "as large as allowed": lambda: encoded(picture(width=1000, height=1000), "PNG"),
}


_GOOD_OF_EVERY_RUN = {
    *("PNG", "JPEG turned by EXIF", "CMYK JPEG", "palette with transparency", "16 bits", "WebP"),
    *("animated GIF", "a pixel", "as large as allowed"),
}
"""Each format, and the conversions that differ most."""


@pytest.mark.parametrize("name", sampled(_GOOD, _GOOD_OF_EVERY_RUN))
def test_a_good_image_is_answered(served: _Served, name: str) -> None:
    """Every kind of the formats that are taken is decoded, whatever its media type says."""
    answer = httpx.post(
        served.daemon.url + _CHAT, json=_chat(_image(_GOOD[name]())), timeout=CEILING_S
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 10


_FORMATS = "is no PNG, JPEG, WebP or GIF file"
_DAMAGED = "is damaged or cut short"
_NO_VIDEO = "is no MP4, MOV, WebM, Matroska or AVI file"

_BAD_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", _FORMATS),
    "PDF": (lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", _FORMATS),
    "HTML": (lambda: b"<!doctype html><img src=x onerror=alert(1)>", _FORMATS),
    "text": (lambda: b"no image at all", _FORMATS),
    "ZIP": (image_files.archive, _FORMATS),
    "HEIC": (lambda: image_files.iso_media(b"heic"), _FORMATS),
    "AVIF": (lambda: image_files.iso_media(b"avif"), _FORMATS),
    "BMP": (lambda: encoded(picture(), "BMP"), _FORMATS),
    "TIFF": (lambda: encoded(picture(), "TIFF"), _FORMATS),
    "ICO": (lambda: encoded(picture(), "ICO"), _FORMATS),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", _FORMATS),
    "a byte": (lambda: b"\x89", _FORMATS),
    "the beginning of a PNG": (lambda: b"\x89PNG\r\n\x1a\n", _FORMATS),
    "truncated PNG": (lambda: encoded(picture(), "PNG")[:200], _DAMAGED),
    "truncated JPEG": (lambda: _photo()[:-400], _DAMAGED),
    "truncated WebP": (lambda: encoded(picture(), "WEBP")[:400], ""),
    "truncated GIF": (lambda: encoded(picture(), "GIF")[:900], _DAMAGED),
    "PNG without data": (lambda: image_files.png(64, 64, b""), _DAMAGED),
    "PNG with too little data": (lambda: image_files.png(64, 64, zlib.compress(b"\0")), _DAMAGED),
    "PNG without a pixel": (lambda: image_files.png(0, 64, zlib.compress(b"")), ""),
    "header of 50,000 x 50,000": (
        lambda: image_files.png(50_000, 50_000, zlib.compress(b"")),
        "has 50000 x 50000 pixels, and vision.max_image_pixels is 1000000",
    ),
    "header of 2^31 pixels a side": (
        lambda: image_files.png(2**31 - 1, 2**31 - 1, zlib.compress(b"")),
        "pixels, and vision.max_image_pixels is",
    ),
    "2.5 GB in 2.5 MB": (
        lambda: image_files.png(29_000, 29_000, image_files.zeros(29_000 * 87_001)),
        "has 29000 x 29000 pixels, and vision.max_image_pixels is",
    ),
    "text of 2 GB": (image_files.inflating_png, ""),
    "GIF bomb": (lambda: image_files.gif(65_535, 65_535), "has 65535 x 65535 pixels"),
    "WebP bomb": (lambda: image_files.webp(16_383, 16_383), "has 16383 x 16383 pixels"),
    "WebP beyond its format": (lambda: image_files.webp(1 << 24, 1 << 24), _FORMATS),
    "one pixel too many": (
        lambda: encoded(picture(width=1001, height=1000), "PNG"),
        "has 1001 x 1000 pixels",
    ),
    "1 x 5000": (lambda: encoded(picture(width=1, height=5000), "PNG"), "cannot be processed"),
    "too many bytes": (lambda: bytes(_MAX_BYTES + 1), "more bytes than vision.max_image_bytes"),
}


_UNKNOWN_TOO = {"PDF", "HTML", "text", "ZIP", "AVIF", "TIFF", "ICO", "PostScript"}
"""Their first bytes are those of no format, as those of SVG, HEIC and BMP are not."""


@pytest.mark.parametrize("name", sampled(_BAD_IMAGES, set(_BAD_IMAGES) - _UNKNOWN_TOO))
def test_a_bad_image_is_refused(served: _Served, name: str) -> None:
    """The answer is 400, names the field and says why; the next image is served."""
    make, said = _BAD_IMAGES[name]
    _assert_refused(
        served, _CHAT, _chat(_image(make())), "messages[0].content[0].image_url.url", said
    )


def _playlist() -> bytes:
    return b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


_BAD_VIDEOS: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (lambda: b"no video at all", _NO_VIDEO),
    "PNG": (lambda: encoded(picture(), "PNG"), _NO_VIDEO),
    "GIF": (
        lambda: encoded(picture(), "GIF", save_all=True, append_images=_frames()),
        _NO_VIDEO,
    ),
    "playlist of files": (_playlist, _NO_VIDEO),
    "list of files": (lambda: b"ffconcat version 1.0\nfile /etc/hostname\n", _NO_VIDEO),
    "HEIC": (lambda: image_files.iso_media(b"heic"), "cannot be read by OpenCV"),
    "truncated MP4": (lambda: image_files.video()[:-800], "cannot be read by OpenCV"),
    "the beginning of an MP4": (lambda: image_files.video()[:64], "cannot be read by OpenCV"),
    "frames too large": (
        lambda: image_files.video(frames=1, width=1120, height=1008),
        "has frames of 1120 x 1008 pixels, and vision.max_image_pixels is 1000000",
    ),
    "too many bytes": (lambda: bytes(_MAX_BYTES + 1), "more bytes than vision.max_image_bytes"),
}


@pytest.mark.parametrize("name", _BAD_VIDEOS)
def test_a_bad_video_is_refused(served: _Served, name: str) -> None:
    """The answer is 400, names the field and says why, and no other file is opened."""
    make, said = _BAD_VIDEOS[name]
    _assert_refused(
        served, _CHAT, _chat(_video(make())), "messages[0].content[0].video_url.url", said
    )


@pytest.mark.parametrize("container", ["mp4", "mov", "webm", "mkv", "avi"])
def test_a_good_video_is_answered(served: _Served, container: str) -> None:
    """Every container that is taken is decoded, whatever its media type says."""
    content = image_files.video(container=container)
    answer = httpx.post(served.daemon.url + _CHAT, json=_chat(_video(content)), timeout=CEILING_S)
    assert answer.status_code == 200, answer.text


def test_a_video_of_more_frames_than_allowed_gets_those(served: _Served) -> None:
    """Beyond vision.max_frames, frames are left out, and the request may ask for fewer."""

    def prompt_tokens(**fields: object) -> int:
        content = image_files.video(frames=40)
        answer = httpx.post(
            served.daemon.url + _CHAT,
            json=_chat(_video(content, **fields)),
            timeout=CEILING_S,
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    assert prompt_tokens(max_frames=4096) == prompt_tokens() == prompt_tokens(max_frames=4)
    assert prompt_tokens(max_frames=2) != prompt_tokens()


_PARAM = "messages[0].content[0].image_url.url"
_PNG_URL = "data:image/png;base64,iVBORw0KGgo="
_URLS: dict[str, tuple[str, str]] = {
    "http": ("http://images.invalid/a.png", "http: URLs are not fetched"),
    "host that is not listed": ("https://example.org/a.png", "vision.url_hosts"),
    "host without an address": ("https://images.invalid/a.png", "has no address"),
    "private address": ("https://localhost/a.png", "has an address that is not public"),
    "address": ("https://127.0.0.1/a.png", "vision.url_hosts"),
    "address of metadata": ("https://169.254.169.254/latest/meta-data", "vision.url_hosts"),
    "another port": ("https://localhost:8443/a.png", "port 443 only"),
    "user's name": ("https://localhost@example.org/a.png", "user's name"),
    "ftp": ("ftp://images.invalid/a.png", "not a URL of a kind"),
    "javascript": ("javascript:alert(1)", "not a URL of a kind"),
    "blob": ("blob:https://images.invalid/a", "not a URL of a kind"),
    "path": ("/etc/passwd", "not a URL of a kind"),
    "empty": ("", "not a URL of a kind"),
    "data without a comma": ("data:image/png;base64", "no comma"),
    "data percent-encoded": ("data:image/png,%89PNG", "in base64 only"),
    "data with bad base64": ("data:image/png;base64,!!!!", "not valid base64"),
    "data without padding": ("data:image/png;base64,iVBORw0KGgo", "not valid base64"),
    "data that is empty": ("data:image/png;base64,", "there is no data"),
    "data of a page": ("data:text/html;base64,iVBORw0KGgo=", "not that of an image"),
    "data of a video": ("data:video/mp4;base64,iVBORw0KGgo=", "not that of an image"),
    "data of an SVG": ("data:image/svg+xml;base64,PHN2Zy8+", "has no pixels"),
    "file outside": ("file:///etc/passwd", "outside of the directory"),
    "file above": ("file://{images}/../outside.png", "outside of the directory"),
    "file above, encoded": ("file://{images}/%2e%2e/outside.png", "outside of the directory"),
    "link that leads out": ("file://{images}/link.png", "outside of the directory"),
    "pipe": ("file://{images}/fifo.png", "no regular file"),
    "folder": ("file://{images}", "no regular file"),
    "file that is not there": ("file://{images}/none.png", "no regular file"),
    "file of another host": ("file://elsewhere/a.png", "a file: URL is file:/// and"),
    "empty file": ("file://{images}/empty.png", "the file is empty"),
}


_URLS_OF_EVERY_RUN = {
    *("http", "host that is not listed", "private address", "another port", "path"),
    *("data with bad base64", "data of a page", "data of an SVG", "file above, encoded"),
    *("link that leads out", "pipe", "empty file"),
}
"""Each rule once; ``unit/generations/test_media_fetch.py`` and ``unit/dialects/test_media.py`` have every spelling."""


@pytest.mark.parametrize("name", sampled(_URLS, _URLS_OF_EVERY_RUN))
def test_a_bad_url_is_refused(served: _Served, name: str) -> None:
    """A forbidden URL is not fetched, and the answer says which rule forbids it."""
    url, said = _URLS[name]
    _assert_refused(served, _CHAT, _chat(_at(url.format(images=served.images))), _PARAM, said)


def test_a_file_of_the_allowed_folder_is_read(served: _Served) -> None:
    """A file: URL below vision.allow_files gives the same prompt as its bytes."""
    url = f"file://{served.images}/good.png"
    answer = httpx.post(served.daemon.url + _CHAT, json=_chat(_at(url)), timeout=CEILING_S)
    assert answer.status_code == 200, answer.text


def _many(count: int) -> dict[str, Any]:
    return _chat(*(_image(encoded(picture(), "PNG")) for _ in range(count)))


def _good_part() -> dict[str, Any]:
    return _image(encoded(picture(), "PNG"))


def _call_of_assistant() -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [_good_part()],
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    }


_PLACES: dict[str, tuple[str, Callable[[], dict[str, Any]], str, str]] = {
    "system": (
        _CHAT,
        lambda: _chat(_good_part(), role="system"),
        "messages[0].content[0].type",
        "",
    ),
    "assistant": (
        _CHAT,
        lambda: _chat(_good_part(), role="assistant"),
        "messages[0].content[0].type",
        "",
    ),
    "assistant that calls": (
        _CHAT,
        lambda: {
            "messages": [
                {"role": "user", "content": "look"},
                _call_of_assistant(),
                {"role": "tool", "tool_call_id": "a", "content": "seen"},
            ]
        },
        "messages[1].content[0].type",
        "",
    ),
    "completion": (
        "/v1/completions",
        lambda: {"prompt": [_good_part()], "max_tokens": 2},
        "prompt[0]",
        "expected",
    ),
    "100 images": (_CHAT, lambda: _many(100), "messages[0].content[8].image_url.url", "max_images"),
    "9 images": (_CHAT, lambda: _many(9), "messages[0].content[8].image_url.url", "max_images"),
    "video as an image": (
        _CHAT,
        lambda: _chat(_at(_url(b"x", "video/mp4"))),
        _PARAM,
        "not that of an image",
    ),
    "no frames": (
        _CHAT,
        lambda: _chat(_video(b"x", fps=0)),
        "messages[0].content[0].fps",
        "",
    ),
    "too many frames": (
        _CHAT,
        lambda: _chat(_video(b"x", max_frames=5000)),
        "messages[0].content[0].max_frames",
        "",
    ),
    "beyond the context": (
        _CHAT,
        lambda: _chat(_good_part(), {"type": "text", "text": "word " * 5000}),
        "messages",
        "4096",
    ),
    "second image is bad": (
        _CHAT,
        lambda: _chat(_good_part(), _image(b"x")),
        "messages[0].content[1].image_url.url",
        _FORMATS,
    ),
    "responses": (
        _RESPONSES,
        lambda: {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": _url(b"x")}]}
            ]
        },
        "input[0].content[0].image_url",
        _FORMATS,
    ),
    "tokens of a bad image": (
        "/tokenize",
        lambda: {"messages": _chat(_image(b"x"))["messages"]},
        _PARAM,
        _FORMATS,
    ),
}


@pytest.mark.parametrize("name", _PLACES)
def test_an_image_in_a_wrong_place_or_number_is_refused(served: _Served, name: str) -> None:
    """The answer is 400 and names the field that is at fault."""
    path, make, param, said = _PLACES[name]
    _assert_refused(served, path, make(), param, said)


def _block(content: bytes) -> dict[str, Any]:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": b64encode(content).decode(),
    }
    return {"type": "image", "source": source}


@pytest.mark.parametrize("place", ["message", "result", "counting"])
def test_a_bad_image_in_anthropics_words_has_anthropics_error(served: _Served, place: str) -> None:
    """In a message and in a tool's result alike."""
    content: list[dict[str, Any]] = [_block(b"x")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if place == "result":
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    path = f"{_MESSAGES}/count_tokens" if place == "counting" else _MESSAGES
    limits = {} if place == "counting" else {"max_tokens": 2}
    answer = httpx.post(
        served.daemon.url + path, json={"messages": messages, **limits}, timeout=CEILING_S
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    assert "source.data: the image is no PNG" in error["message"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_bad_image_in_ollamas_words_has_ollamas_error(served: _Served, path: str) -> None:
    """An error is a text there."""
    images = [b64encode(b"x").decode()]
    messages = [{"role": "user", "content": "look", "images": images}]
    body = (
        {"prompt": "look", "images": images} if path == "/api/generate" else {"messages": messages}
    )
    answer = httpx.post(
        served.daemon.url + path, json={"model": "qwen2_vl", **body}, timeout=CEILING_S
    )
    assert answer.status_code == 400, answer.text
    assert f"images[0]: the image {_FORMATS}" in answer.json()["error"]


def _assert_refused(
    served: _Served, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    for stream in (False, True):
        answer = httpx.post(
            served.daemon.url + path,
            json={**body, "stream": stream} if path != "/tokenize" else body,
            timeout=CEILING_S,
        )
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert error["message"].startswith(param) or param == "messages", error
        assert said in error["message"], error
        assert len(error["message"]) < 400
    assert httpx.get(f"{served.daemon.url}/health/ready").status_code == 200
