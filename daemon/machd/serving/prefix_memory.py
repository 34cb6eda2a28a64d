"""From the settings ``cache`` to what the prefix cache is made of, and how much it may keep."""

from __future__ import annotations

from machd.engine.protocol.engine import ModelDescription
from machd.scheduler.prefix_cache import PrefixConfig
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits
from machd.settings.cache import CacheSettings

_MB, _GB = 1_000_000, 1_000_000_000

_LEFT_SHARE = 0.05
_MAX_LEFT_BYTES = _GB
"""Of what the machine had when the model was loaded so much is to be left to others, whatever happens;
the cache gives way."""


def prefix_shape(section: CacheSettings, model: ModelDescription) -> PrefixConfig:
    """What the prefix cache of a model is made of."""
    facts = model.cache
    state_bytes = 0
    if not facts.has_positions_only:
        # A window is counted whole; what it really takes is known once it was kept.
        window_bytes = max(facts.window_tokens, default=0) * facts.bytes_per_token
        state_bytes = max(facts.bytes_per_sequence + window_bytes, 1)
    costs = BlockCosts(facts.bytes_per_token, state_bytes)
    return PrefixConfig(model.block_key, section.block_tokens, costs)


def prefix_limits(section: CacheSettings, available_bytes: int | None) -> PrefixLimits:
    """How much blocks may take.

    Args:
        section: The settings.
        available_bytes: What the machine had left with the model loaded; where nobody knows, only
            ``cache.memory_mb`` can say it.
    """
    known_bytes = available_bytes or 0
    max_bytes = int(known_bytes * section.memory_percent)
    if section.memory_mb is not None:
        max_bytes = section.memory_mb * _MB
    return PrefixLimits(
        max_bytes=max_bytes,
        max_entries=section.max_entries,
        left_bytes=min(int(known_bytes * _LEFT_SHARE), _MAX_LEFT_BYTES),
        disk_bytes=round(section.disk_budget_gb * _GB) if section.disk_dir else None,
    )
