"""Settings to the parts of a running daemon: the only module that knows every one of them."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from dataclasses import asdict

import structlog

from machd import __version__
from machd.api.capabilities import Versions
from machd.capabilities.evidence import Evidence
from machd.capabilities.verdict import Verdict
from machd.capabilities.verdicts import ModelVerdicts, judge
from machd.clock import Clock
from machd.engine.protocol import Engine, ModelDescription
from machd.http.app import create_app
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.installed import installed_version
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.continuous import ContinuousScheduler
from machd.scheduler.events import DecodeMode
from machd.scheduler.protocol import Scheduler
from machd.scheduler.single_flight import SingleFlightScheduler
from machd.scheduler.waiting import QueueLimits
from machd.serving.decode_mode import DecodeModeDecision, decide_decode_mode
from machd.serving.fanout import Fanout
from machd.serving.kv_memory import KvMemory, asked_budget_bytes, effective_budget_bytes, kv_memory
from machd.serving.lifecycle import Lifecycle
from machd.serving.loop import EngineLoop
from machd.serving.response_store import ResponseStore
from machd.serving.service import GenerationLimits, GenerationService
from machd.serving.startup_guard import Measure, OnStart, StartupGuard, nothing_known
from machd.settings.model import ContinuousBatchingSettings, Settings
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.logs import RequestLog
from machd.telemetry.metrics import Metrics

__all__ = ["Parts", "batching_of", "installed_versions"]


def installed_versions() -> Versions:
    """Of machd and what it was measured with; read from the installed packages."""
    return Versions(
        machd=__version__, mlx=installed_version("mlx"), mlx_lm=installed_version("mlx-lm")
    )


class Parts:
    """Everything that lives as long as the daemon runs, wired once, on the event loop."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Engine],
        clock: Clock,
        api_keys: ApiKeys,
        *,
        measure: Measure = nothing_known,
        recall: Measure = nothing_known,
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            settings: Validated settings.
            load: Makes the engine; called on the engine thread.
            clock: Reads time.
            api_keys: Who may ask.
            measure: Finds out what the model can do; called on the engine thread.
            recall: Tells what was found out before.
        """
        self._settings = settings
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self.lag = EventLoopLag(clock)
        fanout = Fanout(asyncio.get_running_loop(), [self.metrics])
        self.loop = EngineLoop(
            load=load,
            make_scheduler=self._make_scheduler,
            publish=fanout.publish,
            clock=clock,
            probe=StartupGuard(
                on_start=OnStart(settings.probe.on_start),
                is_batching_asked=settings.continuous_batching.enabled,
                measure=measure,
                recall=recall,
                clock=clock,
            ),
        )
        self.service = GenerationService(
            loop=self.loop,
            fanout=fanout,
            lifecycle=self.lifecycle,
            limits=GenerationLimits(
                max_tokens_default=settings.limits.max_tokens_default,
                max_n=settings.limits.max_n,
                max_queue=settings.limits.max_queue,
            ),
            clock=clock,
            observers=[self.metrics, RequestLog()],
        )
        context = ServerContext(
            service=self.service,
            loop=self.loop,
            metrics=self.metrics,
            clock=clock,
            settings=settings,
            versions=installed_versions(),
            responses=ResponseStore(
                max_responses=settings.limits.max_stored_responses,
                max_bytes=settings.limits.max_stored_response_bytes,
            ),
        )
        self.app = create_app(context, api_keys)
        self._watch()

    def announce(self, engine: Engine) -> DecodeModeDecision:
        """Export and log what is only known once the model is loaded; returns the decode mode."""
        model = engine.model
        verdicts, decision = self._decide(model)
        self.metrics.set_info(
            "machd_model_info",
            model=model.model_id,
            architecture=model.architecture,
            kv_cache_kind=model.cache.kind.value,
            dtype=model.dtype,
            backend=model.backend,
        )
        for feature, verdict in verdicts.by_feature().items():
            # Not an info, which has one series: a feature has one each.
            self.metrics.watch(
                "machd_capability_info",
                lambda: 1.0,
                feature=feature,
                verdict=verdict.support.value,
                source=verdict.source.value,
            )
        self._log_decision(decision, verdicts.continuous_batching, model)
        return decision

    def _decide(self, model: ModelDescription) -> tuple[ModelVerdicts, DecodeModeDecision]:
        verdicts = judge(model.cache, self.loop.probe_results, architecture=model.architecture)
        decision = decide_decode_mode(
            is_batching_asked=self._settings.continuous_batching.enabled,
            verdict=verdicts.continuous_batching,
        )
        return verdicts, decision

    def _make_scheduler(self, engine: Engine) -> Scheduler:
        """The scheduler that the settings ask for and the model allows; on the engine thread."""
        limits = _queue_limits(self._settings)
        _, decision = self._decide(engine.model)
        if decision.active is DecodeMode.BATCHED:
            section = self._settings.continuous_batching
            return ContinuousScheduler(limits, batching_of(section, engine.model))
        return SingleFlightScheduler(limits)

    def _log_decision(
        self, decision: DecodeModeDecision, verdict: Verdict, model: ModelDescription
    ) -> None:
        log = structlog.get_logger("machd.scheduler")
        say = log.info if decision.is_as_requested else log.warning
        say(
            "decode_mode.decided",
            requested=decision.requested.value,
            active=decision.active.value,
            reason=decision.reason,
            verdict=verdict.support.value,
            source=verdict.source.value,
            evidence=_figures(verdict.evidence),
        )
        if decision.active is DecodeMode.BATCHED:
            asked_gb = self._settings.continuous_batching.kv_budget_gb
            asked_bytes = asked_budget_bytes(asked_gb)
            effective_bytes = effective_budget_bytes(asked_gb, model.device_memory_bytes)
            say = log.info if effective_bytes == asked_bytes else log.warning
            say(
                "kv_budget.effective",
                asked_bytes=asked_bytes,
                effective_bytes=effective_bytes,
                device_memory_bytes=model.device_memory_bytes or None,
            )

    def _watch(self) -> None:
        """Point the gauges at what they show."""
        metrics, loop = self.metrics, self.loop
        versions = installed_versions()
        metrics.set_info(
            "machd_build_info",
            version=versions.machd,
            mlx=versions.mlx or "",
            mlx_lm=versions.mlx_lm or "",
            python=platform.python_version(),
        )
        metrics.watch_state(lambda: self.lifecycle.state)
        metrics.watch_decode_mode(lambda: loop.snapshot.mode)
        metrics.watch("machd_requests_running", lambda: loop.snapshot.running_count)
        metrics.watch("machd_requests_waiting", lambda: loop.snapshot.waiting_count)
        metrics.watch("machd_active_loops", lambda: loop.snapshot.active_loops)
        metrics.watch("machd_slots", lambda: loop.snapshot.active_loops, state="occupied")
        metrics.watch("machd_slots", self._free_slots, state="free")
        for state in ("budget", "reserved", "used"):
            metrics.watch("machd_kv_cache_bytes", self._kv_reader(state), state=state)
        metrics.watch("machd_kv_cache_usage_ratio", lambda: self._kv().usage_ratio)
        metrics.watch("machd_engine_heartbeat_age_seconds", lambda: loop.heartbeat_age_s)
        metrics.watch("machd_event_loop_lag_seconds", lambda: self.lag.last_s)
        for kind in ("active", "peak", "cache"):
            metrics.watch("machd_mlx_memory_bytes", self._memory_reader(kind), kind=kind)

    def _free_slots(self) -> float:
        snapshot = self.loop.snapshot
        return snapshot.slot_count - snapshot.active_loops

    def _kv(self) -> KvMemory:
        loaded = self.loop.loaded
        if not loaded.done() or loaded.exception() is not None:
            return KvMemory(0, 0, 0)
        return kv_memory(self.loop.snapshot, loaded.result().model)

    def _kv_reader(self, state: str) -> Callable[[], float]:
        return lambda: float(getattr(self._kv(), f"{state}_bytes"))

    def _memory_reader(self, kind: str) -> Callable[[], float]:
        return lambda: float(getattr(self.loop.snapshot.memory, f"{kind}_bytes"))


def batching_of(section: ContinuousBatchingSettings, model: ModelDescription) -> Batching:
    """The settings' batching in the scheduler's terms, for one model on one device."""
    chunk_tokens = section.prefill_chunk_tokens
    return Batching(
        max_b=section.max_b,
        window_s=section.window_ms / 1000,
        prefill_chunk_tokens=None if chunk_tokens == "auto" else chunk_tokens,
        coalesce=section.coalesce,
        kv=KvBudget(
            budget_bytes=effective_budget_bytes(section.kv_budget_gb, model.device_memory_bytes),
            bytes_per_token=model.cache.bytes_per_token,
            bytes_per_sequence=model.cache.bytes_per_sequence,
            policy=KvPolicy(section.kv_policy),
        ),
    )


def _figures(evidence: Evidence | None) -> dict[str, float] | None:
    return None if evidence is None else asdict(evidence)


def _queue_limits(settings: Settings) -> QueueLimits:
    limits = settings.limits
    return QueueLimits(
        max_queue=limits.max_queue,
        max_queue_tokens=limits.max_queue_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )
