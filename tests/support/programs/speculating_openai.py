"""A small server of the OpenAI API that speculates: several tokens come at once, and are counted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from support.programs.fake_openai import FakeOpenAi, _head

_MODEL = 'model="m"'
"""The label that every series of a model's has."""


@dataclass
class SpeculatingOpenAi(FakeOpenAi):
    """Answers with numbered words, a pass after the other; a word is a token.

    Attributes:
        draft_tokens: Drafts of each pass, the first included.
        right: Accepted drafts of each pass.
        counts: Whether it has a page of metrics.
        has_tokens: Whether it says how many tokens a text has.
        word: What the words begin with.
        passes: Of all answers so far.
        lookups: Pages of metrics that were read.
    """

    draft_tokens: int = 0
    right: int = 0
    counts: bool = True
    has_tokens: bool = True
    word: str = "w"
    passes: int = 0
    lookups: int = 0

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/llm/metrics" and self.counts:
            self.lookups += 1
            _head(writer, 200)
            writer.write(self._page().encode())
        elif path == "/llm/tokenize" and self.has_tokens:
            _head(writer, 200)
            words = json.loads(body)["prompt"].split()
            writer.write(json.dumps({"tokens": list(range(len(words)))}).encode())
        else:
            await super()._answer(path, body, writer)

    async def _stream(
        self, writer: asyncio.StreamWriter, fields: dict[str, object], *, is_follower: bool
    ) -> None:
        assert not is_follower
        _head(writer, 200)
        tokens = fields["max_tokens"]
        assert isinstance(tokens, int)
        is_chat = "messages" in fields
        for begin in range(0, tokens, 1 + self.right):
            self.passes += 1
            numbers = range(begin, min(tokens, begin + 1 + self.right))
            text = "".join(f" {self.word}{number}" for number in numbers)
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            writer.write(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())
            await writer.drain()
            await asyncio.sleep(self.step_s)
        usage = {"prompt_tokens": 7, "completion_tokens": tokens}
        writer.write(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _page(self) -> str:
        cycles = self.passes if self.draft_tokens else 0
        lines = [
            "# HELP machd_speculation_draft_tokens_total Tokens drafted.",
            "# TYPE machd_speculation_draft_tokens_total counter",
            f"machd_speculation_draft_tokens_total{{{_MODEL}}} {cycles * self.draft_tokens}.0",
            f"machd_speculation_accepted_tokens_total{{{_MODEL}}} {cycles * self.right}.0",
            f"machd_speculation_cycles_total{{{_MODEL}}} {cycles}.0",
            f"machd_speculation_fallbacks_total{{{_MODEL}}} 0.0",
            f'machd_speculation_mode{{{_MODEL},mode="ngram"}} 1.0',
        ]
        for position in range(1, self.draft_tokens + 1):
            label = f'{{{_MODEL},position="{position}"}}'
            right = cycles if position <= self.right else 0
            lines.append(f"machd_speculation_draft_by_position_tokens_total{label} {cycles}.0")
            lines.append(f"machd_speculation_accepted_by_position_tokens_total{label} {right}.0")
        return "\n".join([*lines, ""])
