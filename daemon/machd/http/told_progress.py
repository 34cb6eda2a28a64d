"""What a stream has told of its prompt: its beginning, every step forward, its end, and never a step back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from machd.generations.prefill_progress import PrefillProgress

TellProgress: TypeAlias = Callable[[PrefillProgress], bytes]
"""Writes the event of one endpoint family that tells how far a prompt is."""

LOOK_S = 0.2
"""Time between two looks at the counts, which come from the engine several times a second."""


class ToldProgress:
    """The progress of one answer's prompts, for a client that asks for it."""

    def __init__(self, tell: TellProgress) -> None:
        """Begin before anything is told."""
        self._tell = tell
        self._told: PrefillProgress | None = None

    def due(self, progress: PrefillProgress) -> bytes:
        """Return the events that tell what is new; none before the first step, which finds what is cached.

        A sequence that is computed anew, after its engine process died say, is told of again once it is further than
        before.
        """
        told = self._told
        if told is None:
            if not progress.prefilled_tokens:
                return b""
            told = replace(progress, prefilled_tokens=progress.cached_tokens, elapsed_s=0.0)
            frames = self._tell(told)
        else:
            frames = b""
        if progress.prefilled_tokens > told.prefilled_tokens:
            told = progress
            frames += self._tell(told)
        self._told = told
        return frames

    @property
    def is_done(self) -> bool:
        """True once the end of every prompt was told."""
        return self._told is not None and self._told.is_whole
