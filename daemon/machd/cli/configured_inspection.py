"""Inspection of a model as the settings would load it."""

from __future__ import annotations

from machd.engine.loading.inspection import ModelInspection, inspect_model
from machd.engine.loading.source import ModelSource
from machd.engine.open import residency
from machd.settings.model import Settings


def inspect_configured(
    source: ModelSource, settings: Settings, *, has_tokenizers: bool = True
) -> ModelInspection:
    """Read a model's headers; see :func:`~machd.engine.loading.inspection.inspect_model`, which says what is raised."""
    return inspect_model(
        source,
        dtype=settings.model.dtype,
        max_context_tokens=settings.model.max_context_tokens,
        chat_template=settings.model.chat_template,
        generation_config=settings.model.generation_config,
        quantize=settings.model.quantize,
        residency=residency(settings),
        kv_budget_bytes=int(settings.continuous_batching.kv_budget_gb * 1e9),
        has_tokenizers=has_tokenizers,
    )
