"""What the gauges of the metric table show: each points at the part that knows."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

from machd.scheduler.events import DecodeMode
from machd.serving.configuration import Configuration
from machd.serving.kv_memory import KvMemory, kv_memory
from machd.serving.lifecycle import Lifecycle
from machd.serving.loop import EngineLoop
from machd.serving.response_store import ResponseStore
from machd.telemetry.cache_readings import watch_caches
from machd.telemetry.draft_readings import watch_drafts
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.metrics import Metrics

_ARRANGEMENTS = (DecodeMode.SINGLE, DecodeMode.BATCHED)
"""What the settings can ask for; either may be speculative at times."""


def watch_gauges(  # noqa: PLR0913 - each part that knows something
    metrics: Metrics,
    *,
    loop: EngineLoop,
    lifecycle: Lifecycle,
    lag: EventLoopLag,
    configuration: Configuration,
    responses: ResponseStore,
    in_flight: Callable[[], int],
    open_generations: Callable[[], int],
    versions: Mapping[str, str],
) -> None:
    """Point every gauge that is read at a scrape at what it shows.

    Args:
        metrics: Holds the gauges.
        loop: Knows the engine, the slots and the queue.
        lifecycle: Knows the daemon's state.
        lag: Measures the event loop.
        configuration: Knows the settings, and how the last reload went.
        responses: Holds what later requests may refer to.
        in_flight: Counts the open HTTP requests.
        open_generations: Counts what somebody reads, whatever the engine thinks.
        versions: Of machd and what it was measured with, by the label's name.
    """
    metrics.set_info("machd_build_info", python=platform.python_version(), **versions)
    started_unix_s = configuration.last_success_unix_s  # of the settings that it starts with
    metrics.watch("machd_start_time_seconds", lambda: started_unix_s)
    metrics.watch_state(lambda: lifecycle.state)
    _watch_requests(metrics, loop, configuration)
    _watch_memory(metrics, loop)
    watch_caches(metrics, loop, configuration)
    watch_drafts(metrics, loop, configuration)
    metrics.watch("machd_http_requests_in_flight", in_flight)
    metrics.watch("machd_generations_open", open_generations)
    metrics.watch("machd_stored_responses", lambda: len(responses))
    metrics.watch("machd_stored_response_bytes", lambda: responses.size_bytes)
    metrics.watch("machd_engine_heartbeat_age_seconds", lambda: loop.heartbeat_age_s)
    metrics.watch("machd_event_loop_lag_seconds", lambda: lag.last_s)
    metrics.watch(
        "machd_config_last_reload_successful",
        lambda: float(configuration.last_reload.is_successful),
    )
    metrics.watch(
        "machd_config_last_reload_timestamp_seconds", lambda: configuration.last_success_unix_s
    )


def _watch_requests(metrics: Metrics, loop: EngineLoop, configuration: Configuration) -> None:
    """How requests are decoded, and how many there are of them."""
    metrics.watch_decode_mode(lambda: loop.snapshot.step_mode)
    for name, read in (
        ("machd_decode_mode_requested", lambda: _requested_mode(configuration)),
        ("machd_decode_mode_active", lambda: loop.snapshot.mode),
    ):
        metrics.watch_one_of(name, "mode", _ARRANGEMENTS, read)
    metrics.watch("machd_requests_running", lambda: loop.snapshot.running_count)
    metrics.watch("machd_requests_waiting", lambda: loop.snapshot.waiting_count)
    metrics.watch("machd_requests_waiting_limit", lambda: configuration.settings.limits.max_queue)
    metrics.watch("machd_active_loops", lambda: loop.snapshot.active_loops)
    metrics.watch("machd_slots", lambda: loop.snapshot.active_loops, state="occupied")
    metrics.watch("machd_slots", lambda: _free_slots(loop), state="free")


def _watch_memory(metrics: Metrics, loop: EngineLoop) -> None:
    for state in ("budget", "reserved", "used"):
        metrics.watch("machd_kv_cache_bytes", _kv_reader(loop, state), state=state)
    metrics.watch("machd_kv_cache_usage_ratio", lambda: _kv(loop).usage_ratio)
    for kind in ("active", "peak", "cache"):
        metrics.watch("machd_mlx_memory_bytes", _memory_reader(loop, kind), kind=kind)


def _requested_mode(configuration: Configuration) -> DecodeMode:
    is_batching_asked = configuration.settings.continuous_batching.enabled
    return DecodeMode.BATCHED if is_batching_asked else DecodeMode.SINGLE


def _free_slots(loop: EngineLoop) -> float:
    snapshot = loop.snapshot
    return snapshot.slot_count - snapshot.active_loops


def _kv(loop: EngineLoop) -> KvMemory:
    loaded = loop.loaded
    if not loaded.done() or loaded.exception() is not None:
        return KvMemory(0, 0, 0)
    return kv_memory(loop.snapshot, loaded.result().model)


def _kv_reader(loop: EngineLoop, state: str) -> Callable[[], float]:
    return lambda: float(getattr(_kv(loop), f"{state}_bytes"))


def _memory_reader(loop: EngineLoop, kind: str) -> Callable[[], float]:
    return lambda: float(getattr(loop.snapshot.memory, f"{kind}_bytes"))
