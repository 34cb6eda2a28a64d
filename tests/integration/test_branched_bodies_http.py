"""Bodies of two megabytes that are nothing but structure; whatever comes of them, others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from dialogue import chat
from polling import CEILING_S
from running_daemon import RunningDaemon

from machd.clock import SystemClock

_DEEP = "[" * 60 + "]" * 60
_FLAT_OBJECTS = '{"a":[' + ",".join(["{}"] * 600_000) + "]}"
_DEEP_LISTS = '{"a":[' + ",".join([_DEEP] * 16_000) + "]}"
_WORST_S = 0.75
"""Far more than a health check takes on a busy machine, and far less than these bodies once did."""


def _call(arguments: str) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function}


def _chat_history(*calls: dict[str, object]) -> dict[str, object]:
    said = [
        {"role": "assistant", "tool_calls": calls[start : start + 128]}
        for start in range(0, len(calls), 128)
    ]
    return {**chat("hi", max_tokens=1), "messages": said}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One daemon for all bodies."""
    with RunningDaemon() as daemon:
        yield daemon.url


class _HealthChecks:
    """Asks for the daemon's health again and again, and keeps the longest wait."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.worst_s = 0.0

    def __enter__(self) -> _HealthChecks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CEILING_S)

    def _ask(self) -> None:
        clock = SystemClock()
        with httpx.Client(base_url=self._url, timeout=CEILING_S) as http:
            while not self._stop.wait(0.005):
                start_s = clock.monotonic_s()
                http.get("/health/live")
                self.worst_s = max(self.worst_s, clock.monotonic_s() - start_s)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", _chat_history(_call(_FLAT_OBJECTS))),
        ("/v1/chat/completions", _chat_history(_call(_DEEP_LISTS))),
        ("/v1/chat/completions", _chat_history(*[_call(_DEEP_LISTS[:19_400] + "]}")] * 95)),
        ("/v1/chat/completions", _chat_history(*[_call('{"a":1}')] * 19_000)),
        ("/tokenize", {"prompt": "ab " * 600_000, "return_token_strs": True}),
    ],
    ids=["flat objects", "deep lists", "deep lists in many calls", "small calls", "token texts"],
)
def test_a_branched_body_holds_nobody_up(url: str, path: str, body: dict[str, object]) -> None:
    """Health is told all the while, and the body's own answer comes soon."""
    with httpx.Client(base_url=url, timeout=CEILING_S) as http, _HealthChecks(url) as checks:
        answer = http.post(path, json=body)
    assert answer.status_code == (200 if path == "/tokenize" else 400)
    assert checks.worst_s < _WORST_S
    assert answer.elapsed.total_seconds() < 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
def test_the_model_is_looked_at_before_what_is_said(url: str, path: str) -> None:
    """A request for another model is told so, whatever else is wrong with it."""
    body = {
        "model": "other",
        "max_tokens": 1,
        "prompt": [[]],
        "messages": [{"role": "assistant", "content": ""}],
        "store": True,
        "container": "c",
    }
    with httpx.Client(base_url=url) as http:
        assert http.post(path, json=body).status_code == 404
        assert http.post(path, json={**body, "model": "fake"}).status_code == 400
