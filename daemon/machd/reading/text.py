"""Detokenised text, with stop strings found across tokens."""

from __future__ import annotations

from collections.abc import Sequence

from machd.engine.protocol.tokenizer import Detokenizer


class CompletionText:
    """One completion's text, returned as it becomes final.

    Text that could begin a stop string is held back until it cannot. Text after a stop string is dropped, and
    so is the string itself unless ``shows_stop``.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        shows_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin with nothing said; in the first ``min_tokens`` tokens no string of ``stop`` ends the text."""
        assert all(stop), "an empty stop string would end every text at once"
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._shows_stop = shows_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string has ended the text; ``stopped_by`` says which."""
        return self.stopped_by is not None

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is final."""
        assert not self.is_stopped, "nothing comes after a stop string"
        self._tokens += 1
        return self._release(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """End the text, and return the rest of it."""
        if self.is_stopped:
            return ""
        text = self._release(self._detokenizer.finish())
        rest, self._held = self._held, ""  # empty if the last piece completed a stop string
        return text + rest

    def _release(self, new: str) -> str:
        may_stop = self._tokens > self._min_tokens or not self._min_tokens
        if not (self._stop and new and may_stop):
            return new
        text = self._held + new
        found = [(position, stop) for stop in self._stop if (position := text.find(stop)) >= 0]
        if found:
            position, self.stopped_by = min(found)
            self._held = ""
            return text[: position + len(self.stopped_by)] if self._shows_stop else text[:position]
        keep = max(_overlap(text, stop) for stop in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
