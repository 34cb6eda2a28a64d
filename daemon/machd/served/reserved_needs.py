"""What is reserved for a model beside others, and for how long that is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from machd.capabilities.fit import MemoryNeeds
from machd.served.model_files import ModelFiles, files_at
from machd.settings.model import Settings

_MB = 1_000_000

_LEAST_KV_BYTES = 100_000
"""The least that ``continuous_batching.kv_budget_gb`` may be."""


@dataclass(frozen=True, slots=True)
class NeedsBasis:
    """What a model's needs follow from: they are the same as long as this is."""

    settings: Settings
    files: ModelFiles

    @classmethod
    def now(cls, settings: Settings) -> Self | None:
        """Look at the files of a model; None where they do not lie in a known place."""
        path = settings.model.path
        files = None if path is None else files_at(Path(path))
        return None if files is None else cls(settings, files)


def placed(needs: MemoryNeeds, settings: Settings, *, keeps_kv_budget: bool) -> MemoryNeeds:
    """Return what is reserved for a model beside others.

    Its KV budget is one whole context at the most, unless its table sets one (``keeps_kv_budget``); a prefix cache of a set
    size is working memory.
    """
    budget_bytes = needs.kv_budget_bytes
    if not keeps_kv_budget:
        context_bytes = needs.bytes_per_sequence + needs.bytes_per_token * needs.context_tokens
        budget_bytes = min(budget_bytes, context_bytes)
    return replace(
        needs,
        working_bytes=needs.working_bytes + prefix_mb(settings) * _MB,
        kv_budget_bytes=max(_LEAST_KV_BYTES, budget_bytes),
    )


def prefix_mb(settings: Settings) -> int:
    """Return the size of the prefix cache, if one is set."""
    return (settings.cache.memory_mb or 0) if settings.cache.prefix else 0
