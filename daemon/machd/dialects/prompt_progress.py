"""How far a prompt is computed, as llama.cpp's server tells it with ``return_progress``."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from machd.generations.prefill_progress import PrefillProgress


class PromptProgress(Struct, frozen=True, kw_only=True):
    """Tokens of all prompts of a request.

    Attributes:
        total: All of them.
        cache: Those found in the prefix cache.
        processed: Those found or computed so far.
        time_ms: Since the request got its slot.
    """

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, progress: PrefillProgress) -> Self:
        """Spell it in llama.cpp's words (``tools/server/server-task.cpp``)."""
        return cls(
            total=progress.prompt_tokens,
            cache=progress.cached_tokens,
            processed=progress.prefilled_tokens,
            time_ms=round(progress.elapsed_s * 1000),
        )
