"""Requests as clients send them: every field and header, from ``tests/client_bodies/``.

They were recorded between each client and a daemon. Longer texts (instructions, descriptions of tools)
are replaced by a sentence, and ids by zeros; nothing else is changed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine, spelled

FOLDER = Path(__file__).resolve().parents[2] / "client_bodies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SHORT_NAMES = ("claude_code_title", "guidellm_chat", "opencode_title", "qwen_code_side")
"""Requests whose prompts the embedded model reads in a moment."""

_SERVED_NAME = "smollm2-135m-instruct"
_COMPLETED = re.compile(r'"(?:finish|stop)_reason":"(?:stop|end_turn)"|"status":"completed"')
_ROOM_TOKENS = 400
"""What is left in the context beyond a token for each byte of the request."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A recorded request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def max_tokens(self) -> int | None:
        """The completion that the client asks for; None for as long as there is room."""
        return self.body.get("max_tokens")

    def for_model(self, name: str) -> ClientRequest:
        """Return the request for another model, unless it names one that no daemon serves."""
        if self.body["model"] != _SERVED_NAME:
            return self
        return ClientRequest(self.path, self.headers, {**self.body, "model": name})


def client_request(name: str) -> ClientRequest:
    """Read a recorded request."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return ClientRequest(recorded["path"], recorded["headers"], recorded["body"])


def prompt_tokens(answer: str) -> int:
    """Return the prompt's length as an answer of any dialect tells it, whole or streamed."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines()]
    facts = [json.loads(line) for line in lines if line.startswith("{")]
    usages = [usage for fact in facts for usage in _usages(fact)]
    fields = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return max(sum(int(usage.get(field, 0)) for field in fields) for usage in usages)


def _usages(fact: dict[str, Any]) -> list[dict[str, Any]]:
    inner = (fact, fact.get("message"), fact.get("response"))
    return [one["usage"] for one in inner if one and one.get("usage")]


@pytest.mark.parametrize("name", NAMES)
def test_client_request_is_answered_when_its_prompt_fits(name: str) -> None:
    """A client's request gets a whole answer where the context has no room for its ``max_tokens``."""
    request = client_request(name).for_model("fake")
    context_tokens = len(json.dumps(request.body)) + _ROOM_TOKENS
    engine = FakeEngine(spelled("Hello"), context_tokens=context_tokens)
    with RunningDaemon(lambda: engine) as daemon:
        answer = httpx.post(
            f"{daemon.url}{request.path}", json=request.body, headers=request.headers
        )

    assert answer.status_code == 200, answer.text
    assert "error" not in {line.removeprefix("event: ") for line in answer.text.splitlines()}
    assert _COMPLETED.search(answer.text)
    if request.max_tokens is not None:
        assert prompt_tokens(answer.text) + request.max_tokens > context_tokens


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_client_request_is_answered_by_embedded_model(name: str, plain_url: str) -> None:
    """The embedded model begins to answer a client's side request; the client then hangs up."""
    request = client_request(name)
    body = {**request.body, "stream": True}  # a whole answer may fill the context
    with httpx.stream(
        "POST", f"{plain_url}{request.path}", json=body, headers=request.headers, timeout=CEILING_S
    ) as answer:
        first = next((line for line in answer.iter_lines() if line.startswith("data: ")), "")
        status = answer.status_code

    assert (status, "error" in json.loads(first.removeprefix("data: ") or "{}")) == (200, False)


def test_client_bodies_hold_no_texts_of_their_clients() -> None:
    """A recorded request has the client's fields and none of its longer texts."""
    long = {
        name: text
        for name in NAMES
        for text in _texts(client_request(name).body)
        if len(text) > 80 and " " in text.strip()
    }

    assert long == {}


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [
            text
            for key, one in value.items()
            if key in ("text", "content", "description", "instructions")
            for text in ([one] if isinstance(one, str) else _texts(one))
        ] + [text for one in value.values() if isinstance(one, dict | list) for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return []
