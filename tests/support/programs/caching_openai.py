"""A small server of the OpenAI API with a prefix cache, good or bad, that tells what it found."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TypeAlias

from support.programs.fake_openai import FakeOpenAi, _head

TOKEN_BYTES = 1000
"""What it says that a kept token takes."""

_Tokens: TypeAlias = tuple[object, ...]

_IMAGE_TOKENS = 240


@dataclass
class CachingOpenAi(FakeOpenAi):
    """Reads a word in ``word_s``, unless it has kept what came before it.

    Attributes:
        has_tokens: Whether it says what its tokens are, and takes their ids.
        tells: Whether it says how many tokens it found.
        has_stats: Whether it says what its cache holds.
        keeps_prompts: Whether it keeps anything.
        keeps_answers: Whether it keeps more than prompts.
        heeds_salt: Whether requests with a salt are kept apart.
        evicts: How many blocks it says to have driven out for each request.
    """

    word_s: float = 0.0005
    step_s: float = 0.0
    has_tokens: bool = True
    tells: bool = True
    has_stats: bool = True
    keeps_prompts: bool = True
    keeps_answers: bool = True
    heeds_salt: bool = True
    evicts: int = 0
    _ids: dict[str, int] = field(default_factory=dict)
    _kept: set[tuple[object, _Tokens]] = field(default_factory=set)
    _evicted: int = 0

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/llm/tokenize" and self.has_tokens:
            _head(writer, 200)
            words = json.loads(body)["prompt"].split()
            ids = [self._ids.setdefault(word, len(self._ids)) for word in words]
            writer.write(json.dumps({"tokens": ids}).encode())
        elif path == "/llm/v1/cache/stats" and self.has_stats:
            _head(writer, 200)
            prefix = {"bytes": TOKEN_BYTES * len(self._kept), "evictions": self._evicted}
            writer.write(json.dumps({"status": "ok", "prefix": prefix}).encode())
        else:
            await super()._answer(path, body, writer)

    async def _stream(
        self, writer: asyncio.StreamWriter, fields: dict[str, object], *, is_follower: bool
    ) -> None:
        assert not is_follower
        _head(writer, 200)
        tokens = self._tokens(fields)
        salt = fields.get("cache_salt") if self.heeds_salt else None
        found = self._found(salt, tokens)
        await asyncio.sleep((len(tokens) - found) * self.word_s)
        asked = fields["max_tokens"]
        assert isinstance(asked, int)
        for _ in range(asked):
            writer.write(b'data: {"choices":[{"index":0,"text":" x"}]}\n\n')
        usage: dict[str, object] = {"prompt_tokens": len(tokens), "completion_tokens": asked}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": found}
        if self.keeps_prompts:
            x = "x" if isinstance(tokens[0], str) else self._ids.setdefault("x", len(self._ids))
            self._keep(salt, tokens + (x,) * (asked - 1) * self.keeps_answers)
        self._evicted += self.evicts
        writer.write(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _tokens(self, fields: dict[str, object]) -> _Tokens:
        prompt = fields.get("prompt") or fields["messages"]
        return tuple(prompt.split() if isinstance(prompt, str) else prompt)  # type: ignore[arg-type]

    def _found(self, salt: object, tokens: _Tokens) -> int:
        lengths = (n for n in range(len(tokens) - 1, 0, -1) if (salt, tokens[:n]) in self._kept)
        return next(lengths, 0)

    def _keep(self, salt: object, tokens: _Tokens) -> None:
        self._kept.update((salt, tokens[:n]) for n in range(1, len(tokens) + 1))


@dataclass
class SeeingOpenAi(CachingOpenAi):
    """The same with images and videos, each of 240 tokens.

    Attributes:
        heeds_pixels: Whether it tells images apart.
        heeds_frames: Whether it tells one video's samplings apart.
    """

    heeds_pixels: bool = True
    heeds_frames: bool = True

    def _tokens(self, fields: dict[str, object]) -> _Tokens:
        messages = fields.get("messages")
        if not isinstance(messages, list):
            return super()._tokens(fields)
        content = messages[0]["content"]
        if isinstance(content, str):
            return ("user", *content.split())
        tokens: list[object] = ["user"]
        for part in content:
            kind = part["type"]
            if kind == "text":
                tokens += part["text"].split()
                continue
            key = part[kind]["url"] if self.heeds_pixels else kind
            frames = (part.get("fps"), part.get("max_frames")) if self.heeds_frames else None
            tokens += [f"{key}/{frames}/{n}" for n in range(_IMAGE_TOKENS)]
        return tuple(tokens)
