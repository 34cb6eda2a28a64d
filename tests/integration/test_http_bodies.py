"""Bodies as other servers take them: without a type, with curl's, compressed."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator

import httpx
import pytest
from support.daemon.running_daemon import RunningDaemon

_PATH = "/v1/completions"
_BODY = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 1}).encode()
_MAX_BODY_BYTES = 100_000


@pytest.fixture(name="http", scope="module")
def _http() -> Iterator[httpx.Client]:
    with (
        RunningDaemon(flags={"limits.max_body_bytes": _MAX_BODY_BYTES}) as daemon,
        httpx.Client(base_url=daemon.url) as client,
    ):
        yield client


@pytest.mark.parametrize("path", [_PATH, "/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": ""}, {"Content-Type": "application/x-www-form-urlencoded"}]
)
def test_a_body_that_does_not_say_what_it_is_is_read_as_json(
    http: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    """``curl -d`` and clients that set no type are served."""
    body = {"model": "fake", "max_tokens": 1, "prompt": "hi", "stream": False}
    body["messages"] = [{"role": "user", "content": "hi"}]
    answer = http.post(path, content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 200, answer.text


def test_a_form_is_no_json(http: httpx.Client) -> None:
    """A form's body is a 400."""
    answer = http.post(_PATH, data={"prompt": "hi"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 415),
        ({"Sec-Fetch-Site": "same-origin"}, 415),
    ],
)
@pytest.mark.parametrize("media_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_page_sends_nothing_unasked(
    http: httpx.Client, headers: dict[str, str], status: int, media_type: str | None
) -> None:
    """A browser names the page's origin, or at least where the request comes from."""
    types = {} if media_type is None else {"Content-Type": media_type}
    answer = http.post(_PATH, content=_BODY, headers={**headers, **types})
    assert answer.status_code == status


def _post_gzip(http: httpx.Client, content: bytes, name: str = "gzip") -> httpx.Response:
    return http.post(
        _PATH,
        content=content,
        headers={"Content-Type": "application/json", "Content-Encoding": name},
    )


@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip"])
def test_a_gzip_body_is_inflated(http: httpx.Client, name: str) -> None:
    """The answer is that to the body without it; by its length or in chunks."""
    assert _post_gzip(http, gzip.compress(_BODY), name).status_code == 200
    pieces = gzip.compress(_BODY + b" " * 90_000)
    in_chunks = iter([pieces[:7], pieces[7:]])
    answer = http.post(_PATH, content=in_chunks, headers={"Content-Encoding": name})
    assert answer.status_code == 200


@pytest.mark.parametrize("extra", [0, 1, 10_000_000, 100_000_000])
def test_a_gzip_body_is_bounded_by_what_it_holds(http: httpx.Client, extra: int) -> None:
    """``limits.max_body_bytes`` counts what comes out, which is inflated no further."""
    body = _BODY + b" " * (_MAX_BODY_BYTES - len(_BODY) + extra)
    answer = _post_gzip(http, gzip.compress(body))
    assert answer.status_code == (200 if extra == 0 else 413)


def _damaged(chosen: random.Random) -> tuple[bytes, int]:
    """A gzip body that is none, and the status that it gets."""
    whole = gzip.compress(_BODY)
    match chosen.randrange(5):
        case 0:
            return whole[: chosen.randrange(1, len(whole))], 400
        case 1:
            return whole + chosen.choice([b"\0", whole, chosen.randbytes(30)]), 400
        case 2:
            at = chosen.randrange(
                10, len(whole)
            )  # behind the header, whose time and system are any
            return whole[:at] + bytes((whole[at] ^ (1 << chosen.randrange(8)),)) + whole[
                at + 1 :
            ], 400
        case 3:
            name = b"a" * (_MAX_BODY_BYTES + chosen.randrange(1000))
            return whole[:3] + b"\x08" + whole[4:10] + name + b"\0" + whole[10:], 413
        case _:
            return chosen.choice([b"", zlib.compress(_BODY), _BODY, chosen.randbytes(200)]), 400


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_gzip_body_is_refused(http: httpx.Client, seed: int) -> None:
    """Cut short, followed by something, flipped, with an endless name, or none at all."""
    body, status = _damaged(random.Random(seed))
    answer = _post_gzip(http, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert _post_gzip(http, gzip.compress(_BODY)).status_code == 200
