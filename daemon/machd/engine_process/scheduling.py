"""Scheduling of a loaded model under some settings: config, queue limits, prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from machd.capabilities.verdict import Support
from machd.engine.protocol.engine import Engine, ModelDescription
from machd.link.adapter_mode import adapter_policy
from machd.link.decode_mode import decide_decode_mode
from machd.link.kv_memory import effective_budget_bytes
from machd.link.speculation_mode import draft_policy
from machd.link.state import ServedState
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.block_observer import BlockObserver
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import CacheReason, DecodeMode, Event
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.waiting import QueueLimits
from machd.settings.batching import ContinuousBatchingSettings
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

_MB, _GB = 1_000_000, 1_000_000_000

_LEFT_SHARE = 0.05
_MAX_LEFT_BYTES = _GB
"""Share of the free memory at loading that the prefix cache leaves to other processes."""


class Scheduling(Protocol):
    """Makes the scheduler of a loaded model, and its configs and limits from settings. Called on the engine thread."""

    def scheduler(self, engine: Engine, state: ServedState, settings: Settings) -> Scheduler:
        """Make the scheduler of an engine that has just been loaded."""
        ...

    def config(self, state: ServedState, settings: Settings) -> SchedulerConfig:
        """Return the scheduler config that the settings ask for and the model allows."""
        ...

    def queue_limits(self, settings: Settings) -> QueueLimits:
        """Return the bounds of the queue."""
        ...

    def prefix_limits(self, state: ServedState, settings: Settings) -> PrefixLimits:
        """Return the limits of the prefix cache's blocks."""
        ...

    def adopt(
        self,
        engine: Engine,
        scheduler: Scheduler,
        state: ServedState,
        settings: Settings,
        now_s: float,
    ) -> list[Event]:
        """Apply another state of the model to a scheduler at rest."""
        ...


class ModelScheduling:
    """The :class:`Scheduling` of a daemon."""

    def __init__(self, make_observer: Callable[[], BlockObserver] | None = None) -> None:
        """Begin without an engine.

        Args:
            make_observer: Makes the observer of blocks in memory; None for no observer.
        """
        self._make_observer = make_observer
        self._available_bytes: int | None = None

    def scheduler(self, engine: Engine, state: ServedState, settings: Settings) -> Scheduler:
        """Make the scheduler of an engine that has just been loaded."""
        scheduler = Scheduler(self.config(state, settings), adapters=engine.adapters)
        self._set_prefix_cache(scheduler, engine, state, settings)
        return scheduler

    def config(self, state: ServedState, settings: Settings) -> SchedulerConfig:
        """Return the scheduler config that the settings ask for and the model allows."""
        return scheduler_config(state, settings)

    def queue_limits(self, settings: Settings) -> QueueLimits:
        """Return the bounds of the queue."""
        return queue_limits(settings)

    def prefix_limits(self, state: ServedState, settings: Settings) -> PrefixLimits:
        """Return the limits of the prefix cache's blocks."""
        return prefix_limits(state, settings, self._available_bytes)

    def adopt(
        self,
        engine: Engine,
        scheduler: Scheduler,
        state: ServedState,
        settings: Settings,
        now_s: float,
    ) -> list[Event]:
        """Apply another state of the model to a scheduler at rest."""
        events: list[Event] = []
        config = self.config(state, settings)
        if not scheduler.is_configured_as(config):
            engine.reset(max_rows=config.slot_count)
            events = scheduler.apply_config(config, now_s)
        if scheduler.prefix_reading is None:
            self._set_prefix_cache(scheduler, engine, state, settings)
        else:
            scheduler.set_prefix_limits(self.prefix_limits(state, settings))
        return events

    def _set_prefix_cache(
        self, scheduler: Scheduler, engine: Engine, state: ServedState, settings: Settings
    ) -> None:
        without = CacheReason.KIND_CANNOT if settings.cache.prefix else CacheReason.OFF
        scheduler.set_prefix_cache(self._prefix_cache(engine, state, settings), without)

    def _prefix_cache(
        self, engine: Engine, state: ServedState, settings: Settings
    ) -> PrefixCache | None:
        """Make the prefix cache if the settings ask for one and the model supports it."""
        self._available_bytes = engine.memory().available_bytes
        is_right = state.verdicts.prefix_cache.support is Support.SUPPORTED
        if not settings.cache.prefix or not is_right:
            return None
        return PrefixCache(
            prefix_shape(settings.cache, engine.model),
            self.prefix_limits(state, settings),
            engine.saved_blocks(),
            observer=None if self._make_observer is None else self._make_observer(),
        )


def scheduler_config(state: ServedState, settings: Settings) -> SchedulerConfig:
    """Return the scheduler config that the settings ask for and the model allows."""
    model, verdicts, limits = state.model, state.verdicts, queue_limits(settings)
    decision = decide_decode_mode(
        is_batching_asked=settings.continuous_batching.enabled,
        verdict=verdicts.continuous_batching,
    )
    drafts = draft_policy(settings.speculation, model, verdicts)
    if decision.active is DecodeMode.BATCHED:
        batching = _batching(settings.continuous_batching, model)
        config = continuous(limits, batching, drafts, experts_on_disk=model.experts_on_disk)
    else:
        config = single_flight(limits, drafts, experts_on_disk=model.experts_on_disk)
    return replace(config, adapters=adapter_policy(verdicts.batched_adapters))


def queue_limits(settings: Settings) -> QueueLimits:
    """Return the bounds of the queue."""
    limits = settings.limits
    return QueueLimits(
        max_queue=limits.max_queue,
        max_queue_tokens=limits.max_queue_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )


def prefix_shape(section: CacheSettings, model: ModelDescription) -> PrefixConfig:
    """Return the shape of a model's prefix cache."""
    facts = model.cache
    state_bytes = 0
    if not facts.has_positions_only:
        # A window is counted whole; its real size is known once a block is stored.
        window_bytes = max(facts.window_tokens, default=0) * facts.bytes_per_token
        state_bytes = max(facts.bytes_per_sequence + window_bytes, 1)
    costs = BlockCosts(facts.bytes_per_token, state_bytes)
    return PrefixConfig(model.block_key, section.block_tokens, costs)


def prefix_limits(
    state: ServedState, settings: Settings, available_bytes: int | None
) -> PrefixLimits:
    """Return the limits of the prefix cache's blocks: no memory if their verdict is blocked.

    Args:
        state: The loaded model.
        settings: The settings in force.
        available_bytes: Free memory with the model loaded; None if unknown, when ``cache.memory_mb`` alone
            sets the limit.
    """
    section, known_bytes = settings.cache, available_bytes or 0
    max_bytes = int(known_bytes * section.memory_percent)
    if section.memory_mb is not None:
        max_bytes = section.memory_mb * _MB
    if state.verdicts.prefix_cache.support is not Support.SUPPORTED:
        max_bytes = 0
    return PrefixLimits(
        max_bytes=max_bytes,
        max_entries=section.max_entries,
        left_bytes=min(int(known_bytes * _LEFT_SHARE), _MAX_LEFT_BYTES),
        disk_bytes=round(section.disk_budget_gb * _GB) if section.disk_dir else None,
    )


def _batching(section: ContinuousBatchingSettings, model: ModelDescription) -> Batching:
    """Return the settings' batching in the scheduler's terms, for one model on one device."""
    chunk_tokens = section.prefill_chunk_tokens
    return Batching(
        max_b=section.max_b,
        window_s=section.window_ms / 1000,
        prefill_chunk_tokens=None if chunk_tokens == "auto" else chunk_tokens,
        coalesce=section.coalesce,
        prefill_share=section.prefill_share,
        kv=KvBudget(
            budget_bytes=effective_budget_bytes(section.kv_budget_gb, model.device_memory_bytes),
            bytes_per_token=model.cache.bytes_per_token,
            bytes_per_sequence=model.cache.bytes_per_sequence,
            policy=KvPolicy(section.kv_policy),
            has_length_classes=model.has_length_classes,
            shares_prefixes=model.shares_prefixes,
        ),
    )
