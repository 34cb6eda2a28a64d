"""What tests ask of a scripted engine, and how they read its streams."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from machd.request.generation import SamplingParams
from support.engines.fake_engine import Script, lettered, spelled

_ORDER = re.compile(rb"say (?P<text>.*?)(?:\nassistant: |\xfe.*)?\Z", re.DOTALL)
"""Up to the end of a chat, or up to the suffix of a text with a gap."""


def told(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """A script that obeys: to ``say TEXT`` it answers TEXT and ends, else it says letters."""
    return _script(prompt)(prompt, sampling, position)


@lru_cache(maxsize=64)
def _script(prompt: tuple[int, ...]) -> Script:
    match = _ORDER.search(bytes(prompt))
    return spelled(match["text"].decode()) if match else lettered


def says_its_adapters(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """A script that says which adapters its row has, with their scales and the beginning of each hash; else ``base``."""
    said = [f"{one.name}*{one.scale:g}*{one.digest.hex()[:8]}" for one in sampling.adapters]
    return spelled("+".join(said) or "base")(prompt, sampling, position)


def chat(content: str = "hi", **fields: object) -> dict[str, object]:
    """A chat completion's body."""
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: object = "hi", **fields: object) -> dict[str, object]:
    """A completion's body."""
    return {"model": "fake", "prompt": prompt, **fields}


def sse_data(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, read strictly: LF, ``data: `` alone, and ``[DONE]`` last."""
    assert b"\r" not in body, "a carriage return in a stream"
    *frames, rest = body.split(b"\n\n")
    assert rest == b"", f"the stream does not end with an empty line: {rest!r}"
    assert frames[-1] == b"data: [DONE]", f"the stream ends with {frames[-1]!r}"
    events = []
    for frame in frames[:-1]:
        if not frame.startswith(b": "):
            assert frame.startswith(b"data: "), f"not an event: {frame!r}"
            assert b"\n" not in frame, f"an event of more than one line: {frame!r}"
            events.append(json.loads(frame.removeprefix(b"data: ").decode()))
    return events


def sse_text(body: bytes) -> str:
    """The text of a stream's first choice, chat or not."""
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for event in sse_data(body)
        for choice in event.get("choices", [])
        if choice["index"] == 0
    )
