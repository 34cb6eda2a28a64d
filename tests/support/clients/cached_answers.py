"""Answers of a daemon over HTTP, told apart from what of them a prefix cache may change.

The same question put to a daemon that has computed its beginning before, and to one that has no
cache, gets the same :class:`Answer`; ``cached_tokens`` is what may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from support.clocks.polling import CEILING_S


@dataclass(frozen=True)
class Answer:
    """The texts of one answer's choices, by index.

    Attributes:
        prompt_tokens: As usage counts them.
        cached_tokens: Of them, not compared.
    """

    texts: tuple[str, ...]
    reasons: tuple[str | None, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the cache did not have."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def said(self) -> tuple[object, ...]:
        """Return what has to be the same whatever was cached: all but logprobs' values, which are rounded."""
        tokens = tuple(tuple(token for token, _ in one) for one in self.logprobs)
        return self.texts, self.reasons, tokens, self.prompt_tokens, self.completion_tokens

    def logprob_error(self, other: Answer) -> float:
        """The largest difference of log-probabilities of answers that say the same."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(
            (
                abs(mine - its)
                for one, another in pairs
                for (_, mine), (_, its) in zip(one, another, strict=True)
            ),
            default=0.0,
        )


@dataclass(frozen=True)
class Asked:
    """A question: a completion where it has a prompt, else a chat completion.

    Attributes:
        timeout_s: How long the client waits for a piece of the answer.
    """

    fields: Mapping[str, object]
    key: str | None = None
    timeout_s: float = CEILING_S

    @property
    def path(self) -> str:
        """Return where it is asked."""
        return "/v1/completions" if "prompt" in self.fields else "/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """With the key."""
        return {"X-Api-Key": self.key} if self.key else {}


def ask(url: str, asked: Asked) -> Answer:
    """Ask, and read the whole answer."""
    answer = httpx.post(
        url + asked.path, json=dict(asked.fields), headers=asked.headers, timeout=asked.timeout_s
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    choices = sorted(body["choices"], key=lambda one: int(one["index"]))
    usage = body["usage"]
    return Answer(
        texts=tuple(_text(one) for one in choices),
        reasons=tuple(one["finish_reason"] for one in choices),
        logprobs=tuple(_logprobs(one) for one in choices),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def ask_all(url: str, questions: Iterable[Asked], *, streamed: bool = False) -> list[Answer]:
    """Ask all at once; answers in the questions' order."""
    asked = list(questions)
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
        return list(pool.map(lambda one: (ask_streamed if streamed else ask)(url, one), asked))


def ask_streamed(url: str, asked: Asked, *, leaves_after: int | None = None) -> Answer:
    """Ask for a stream of one choice, and read it.

    Args:
        url: Of the daemon.
        asked: The question.
        leaves_after: Events after which the client hangs up; the answer is what it had until then.
    """
    fields = {**asked.fields, "stream": True, "stream_options": {"include_usage": True}}
    text, reason, usage, events = "", None, dict[str, Any](), 0
    with httpx.stream(
        "POST", url + asked.path, json=fields, headers=asked.headers, timeout=asked.timeout_s
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += _text(choice)
                reason = choice["finish_reason"] or reason
            events += 1
            if events == leaves_after:
                break
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        texts=(text,),
        reasons=(reason,),
        logprobs=((),),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
    )


def stats(url: str, key: str = "none") -> dict[str, Any]:
    """``GET /v1/cache/stats``; the key is for daemons that have some."""
    headers = {"X-Api-Key": key}
    answer = httpx.get(f"{url}/v1/cache/stats", headers=headers, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def prefix_stats(url: str, key: str = "none") -> dict[str, Any]:
    """Of the prefix cache alone."""
    return dict(stats(url, key)["prefix"])


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def _logprobs(choice: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    found = choice.get("logprobs")
    if not found:
        return ()
    if "content" in found:
        return tuple((one["token"], one["logprob"]) for one in found["content"])
    return tuple(zip(found["tokens"], found["token_logprobs"], strict=True))
