"""Readings at a scrape: gauges, and counters that another part counts, each from the part that knows."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from machd.engine.protocol.memory import (
    AdapterReading,
    DiskReading,
    ExpertReading,
    MediaReading,
    RankReading,
)
from machd.errors import ModelNotLoadedError
from machd.generations.response_store import ResponseStore
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.scheduler.draft_reading import DraftReading
from machd.scheduler.events import DecodeMode
from machd.scheduler.prefix_limits import PrefixReading
from machd.served.load_history import LoadOutcome
from machd.served.named_model import NamedModel
from machd.served.served_model import ServedModel
from machd.served.turns import ModelState
from machd.settings.model import Settings
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.metrics import Metrics
from machd.telemetry.model_metrics import ModelMetrics

ReadSettings = Callable[[], Settings]
"""Reads the settings in force."""

_Part = TypeVar("_Part")
_Reads = tuple[tuple[str, dict[str, str], Callable[[_Part], float]], ...]
"""Metrics by name and labels, each with its value in a part of the snapshot."""

_GB = 1_000_000_000
_NO_PREFIX = PrefixReading(limit_bytes=0)
_NO_DISK = DiskReading()
_NO_EXPERTS = ExpertReading()
_NO_ADAPTERS = AdapterReading()

_PREFIX: _Reads[PrefixReading] = (
    ("machd_prefix_cache_queries_total", {}, lambda now: now.queries),
    ("machd_prefix_cache_hits_total", {"kind": "full"}, lambda now: now.hits),
    ("machd_prefix_cache_hits_total", {"kind": "prefix"}, lambda now: now.prefix_hits),
    ("machd_prefix_cache_bytes", {}, lambda now: now.bytes),
    ("machd_prefix_cache_limit_bytes", {}, lambda now: _or_infinite(now.limit_bytes)),
    ("machd_prefix_cache_saved_bytes", {}, lambda now: now.bytes_saved),
    ("machd_prefix_cache_entries", {}, lambda now: now.entries),
    ("machd_prefix_cache_blocks", {"state": "held"}, lambda now: now.blocks),
    ("machd_prefix_cache_blocks", {"state": "pinned"}, lambda now: now.pinned_blocks),
    ("machd_prefix_cache_blocks", {"state": "shared"}, lambda now: now.shared_blocks),
    ("machd_prefix_cache_blocks", {"state": "disk"}, lambda now: now.saved_blocks),
    ("machd_prefix_cache_evictions_total", {}, lambda now: now.evictions),
)
_DISK: _Reads[DiskReading] = (
    ("machd_block_files_bytes", {}, lambda now: now.bytes),
    ("machd_block_files_total", {"outcome": "written"}, lambda now: now.written),
    ("machd_block_files_total", {"outcome": "loaded"}, lambda now: now.loaded),
    ("machd_block_files_total", {"outcome": "damaged"}, lambda now: now.damaged),
    ("machd_block_files_total", {"outcome": "dropped"}, lambda now: now.dropped),
)
_EXPERTS: _Reads[ExpertReading] = (
    ("machd_expert_bank_capacity_bytes", {}, lambda now: now.capacity_bytes),
    ("machd_expert_bank_lookups_total", {"outcome": "hit"}, lambda now: now.hits),
    ("machd_expert_bank_lookups_total", {"outcome": "read_ahead"}, lambda now: now.read_ahead_hits),
    (
        "machd_expert_bank_lookups_total",
        {"outcome": "miss"},
        lambda now: now.misses - now.read_ahead_hits,
    ),
    ("machd_expert_bank_read_bytes_total", {}, lambda now: now.bytes_read),
)
_ADAPTERS: _Reads[AdapterReading] = (
    ("machd_adapters", {"state": "loaded"}, lambda now: now.loaded),
    ("machd_adapters", {"state": "held"}, lambda now: now.held),
    ("machd_adapter_bytes", {}, lambda now: now.used_bytes),
    ("machd_adapter_loads_total", {}, lambda now: now.loads),
)
_MEDIA: _Reads[MediaReading] = (
    ("machd_encoder_lookups_total", {"outcome": "hit"}, lambda now: now.hits),
    ("machd_encoder_lookups_total", {"outcome": "miss"}, lambda now: now.misses),
    ("machd_encoder_seconds_total", {}, lambda now: now.encoding_s),
    ("machd_encoder_cache_bytes", {}, lambda now: now.bytes),
)
_RANK: _Reads[RankReading] = (
    ("machd_rank_memory_bytes", {"kind": "active"}, lambda now: now.active_bytes),
    ("machd_rank_memory_bytes", {"kind": "available"}, lambda now: now.available_bytes),
    ("machd_rank_heartbeat_timestamp_seconds", {}, lambda now: now.heard_unix_s),
)
_DRAFTS: _Reads[DraftReading] = (
    ("machd_speculation_cycles_total", {}, lambda now: now.cycles),
    ("machd_speculation_draft_tokens_total", {}, lambda now: now.drafted_tokens),
    ("machd_speculation_accepted_tokens_total", {}, lambda now: now.accepted_tokens),
    ("machd_speculation_fallbacks_total", {}, lambda now: now.fallbacks),
)

_REQUESTABLE_MODES = (DecodeMode.SINGLE, DecodeMode.BATCHED)
"""What the settings can ask for; either may be speculative at times."""


def watch_daemon_gauges(  # noqa: PLR0913 - each part that knows something
    metrics: Metrics,
    *,
    lifecycle: Lifecycle,
    lag: EventLoopLag,
    configuration: Configuration,
    responses: ResponseStore,
    in_flight: Callable[[], int],
    versions: Mapping[str, str],
) -> None:
    """Point every gauge of the daemon that is read at a scrape at what it shows.

    Args:
        metrics: Holds the gauges.
        lifecycle: Knows the daemon's state.
        lag: Measures the event loop.
        configuration: Knows how the last reload went.
        responses: Holds what later requests may refer to.
        in_flight: Counts the open HTTP requests.
        versions: Of machd and what it was measured with, by the label's name.
    """
    metrics.set_info("machd_build_info", python=platform.python_version(), **versions)
    started_unix_s = configuration.last_success_unix_s  # of the settings that it starts with
    metrics.watch("machd_start_time_seconds", lambda: started_unix_s)
    metrics.watch_state(lambda: lifecycle.state)
    metrics.watch("machd_http_requests_in_flight", in_flight)
    metrics.watch("machd_stored_responses", lambda: len(responses))
    metrics.watch("machd_stored_response_bytes", lambda: responses.size_bytes)
    metrics.watch("machd_event_loop_lag_seconds", lambda: lag.last_s)
    metrics.watch(
        "machd_config_last_reload_successful",
        lambda: float(configuration.last_reload.is_successful),
    )
    metrics.watch(
        "machd_config_last_reload_timestamp_seconds", lambda: configuration.last_success_unix_s
    )


def watch_model_gauges(
    metrics: ModelMetrics,
    served: ServedModel,
    settings: ReadSettings,
    open_generations: Callable[[], int],
) -> None:
    """Point every metric of a model that is read at a scrape at what it shows.

    Args:
        metrics: Holds the model's metrics.
        served: The model: its engine, slots and queue.
        settings: Reads those in force for the model.
        open_generations: Counts the model's open generations, whatever the engine holds.
    """
    _watch_requests(metrics, served, settings)
    _watch_memory(metrics, served)
    watch_caches(metrics, served, settings)
    watch_drafts(metrics, served, settings)
    metrics.watch("machd_generations_open", open_generations)
    metrics.watch("machd_engine_heartbeat_age_seconds", lambda: served.heartbeat_age_s)


def watch_turns(metrics: ModelMetrics, model: NamedModel) -> None:
    """Point what is exported of one of several models at what it does."""

    def outcomes_of(outcome: LoadOutcome) -> Callable[[], float]:
        return lambda: model.history.outcomes[outcome]

    metrics.begin("machd_rejections_total", ModelNotLoadedError.code)
    metrics.watch_one_of("machd_model_state", "state", list(ModelState), lambda: model.state)
    metrics.watch("machd_model_reserved_bytes", lambda: model.reserved_bytes)
    metrics.watch("machd_model_leases", lambda: model.leases)
    for outcome in LoadOutcome:
        metrics.watch("machd_model_loads_total", outcomes_of(outcome), outcome=outcome)
    metrics.watch("machd_model_suspensions_total", lambda: model.history.suspensions)
    metrics.watch("machd_model_last_load_seconds", lambda: model.history.last_load_s)


def watch_caches(metrics: ModelMetrics, served: ServedModel, settings: ReadSettings) -> None:
    """Point the cache metrics at the newest snapshot; those of a part that the daemon lacks are 0."""
    _watch_all(metrics, _PREFIX, lambda: served.snapshot.prefix or _NO_PREFIX)
    _watch_all(metrics, _DISK, lambda: served.snapshot.memory.disk or _NO_DISK)
    _watch_all(metrics, _EXPERTS, lambda: served.snapshot.memory.experts or _NO_EXPERTS)
    _watch_all(metrics, _ADAPTERS, lambda: served.snapshot.memory.adapters or _NO_ADAPTERS)
    _watch_all(metrics, _MEDIA, lambda: served.snapshot.memory.media or _vectors_of(served))
    metrics.watch("machd_block_files_budget_bytes", lambda: _disk_budget_bytes(served, settings))


def watch_ranks(metrics: ModelMetrics, served: ServedModel) -> None:
    """Point the metrics of ranks at the newest snapshot. Their number is known once the model is loaded."""

    def reader(rank: int, read: Callable[[RankReading], float]) -> Callable[[], float]:
        return lambda: read(served.snapshot.memory.ranks[rank])

    for one in served.snapshot.memory.ranks:
        rank = str(one.rank)
        for name, labels, read in _RANK:
            metrics.watch(name, reader(one.rank, read), rank=rank, **labels)


def watch_drafts(metrics: ModelMetrics, served: ServedModel, settings: ReadSettings) -> None:
    """Point the metrics of speculation at the newest snapshot.

    Every position that a draft token may have is there at 0 before the first one, or a rate would lose
    it; a position that once had a draft stays when the settings allow fewer.
    """
    _watch_all(metrics, _DRAFTS, lambda: served.snapshot.drafts)
    metrics.watch_all(
        "machd_speculation_draft_by_position_tokens_total",
        lambda: _numbered(served.snapshot.drafts.drafted_by_position, settings),
    )
    metrics.watch_all(
        "machd_speculation_accepted_by_position_tokens_total",
        lambda: _numbered(served.snapshot.drafts.accepted_by_position, settings),
    )


def _watch_all(metrics: ModelMetrics, reads: _Reads[_Part], newest: Callable[[], _Part]) -> None:
    def reader(read: Callable[[_Part], float]) -> Callable[[], float]:
        return lambda: float(read(newest()))

    for name, labels, read in reads:
        metrics.watch(name, reader(read), **labels)


def _vectors_of(served: ServedModel) -> MediaReading:
    """Return what is kept of an encoder's texts, of which a model that generates has none."""
    now = served.vectors.reading
    return MediaReading(entries=now.entries, bytes=now.bytes, hits=now.hits, misses=now.misses)


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _disk_budget_bytes(served: ServedModel, settings: ReadSettings) -> float:
    if served.snapshot.memory.disk is None:
        return 0.0
    return settings().cache.disk_budget_gb * _GB


def _numbered(counts: Sequence[int], settings: ReadSettings) -> dict[str, float]:
    """Number counts from 1 on, up to the last position that the settings allow at least."""
    section = settings().speculation
    allowed = 0 if section.mode == "off" else section.max_draft_tokens
    missing = [0] * (allowed - len(counts))
    return {str(place): float(count) for place, count in enumerate([*counts, *missing], start=1)}


def _watch_requests(metrics: ModelMetrics, served: ServedModel, settings: ReadSettings) -> None:
    """Export the decode mode, and the counts of requests."""
    metrics.watch_decode_mode(lambda: served.snapshot.step_mode)
    for name, read in (
        ("machd_decode_mode_requested", lambda: _requested_mode(settings)),
        ("machd_decode_mode_active", lambda: served.snapshot.mode),
    ):
        metrics.watch_one_of(name, "mode", _REQUESTABLE_MODES, read)
    metrics.watch("machd_requests_running", lambda: served.snapshot.running_count)
    metrics.watch("machd_requests_waiting", lambda: served.snapshot.waiting_count)
    metrics.watch("machd_requests_waiting_limit", lambda: settings().limits.max_queue)
    metrics.watch("machd_active_loops", lambda: served.snapshot.active_loops)
    metrics.watch("machd_slots", lambda: served.snapshot.active_loops, state="occupied")
    metrics.watch("machd_slots", lambda: _free_slots(served), state="free")


def _watch_memory(metrics: ModelMetrics, served: ServedModel) -> None:
    for state in ("budget", "reserved", "used"):
        metrics.watch("machd_kv_cache_bytes", _kv_reader(served, state), state=state)
    metrics.watch("machd_kv_cache_usage_ratio", lambda: served.kv.usage_ratio)
    for kind in ("active", "peak", "cache"):
        metrics.watch("machd_mlx_memory_bytes", _memory_reader(served, kind), kind=kind)


def _requested_mode(settings: ReadSettings) -> DecodeMode:
    is_batching_asked = settings().continuous_batching.enabled
    return DecodeMode.BATCHED if is_batching_asked else DecodeMode.SINGLE


def _free_slots(served: ServedModel) -> float:
    snapshot = served.snapshot
    return snapshot.slot_count - snapshot.active_loops


def _kv_reader(served: ServedModel, state: str) -> Callable[[], float]:
    return lambda: float(getattr(served.kv, f"{state}_bytes"))


def _memory_reader(served: ServedModel, kind: str) -> Callable[[], float]:
    return lambda: float(getattr(served.snapshot.memory, f"{kind}_bytes"))
