"""``GET /admin/status``, and what of it other answers show too."""

from __future__ import annotations

from datetime import UTC, datetime

from litestar import get
from litestar.di import NamedDependency

from machd.admin.context import AdminContext
from machd.admin.status_wire import (
    AdminState,
    AdminStatus,
    ConfigStatus,
    Faults,
    KvStatus,
    ModeStatus,
    SpeculationStatus,
    StoredResponses,
)
from machd.engine.protocol.engine import ModelDescription
from machd.errors import MachdError
from machd.serving.cache_stats import cache_stats
from machd.serving.cache_stats_wire import CacheStats
from machd.serving.configuration import Configuration
from machd.serving.kv_memory import kv_memory
from machd.serving.speculation_mode import decide_speculation
from machd.telemetry.metrics import Metrics


@get("/admin/status")
async def get_status(admin: NamedDependency[AdminContext]) -> AdminStatus:
    """The whole daemon at one moment."""
    state = admin_state(admin)
    snapshot, model = admin.loop.snapshot, _model(admin)
    return AdminStatus(
        state=state.state,
        is_held=state.is_held,
        reason=state.reason,
        open_requests=state.open_requests,
        version=admin.versions.machd,
        uptime_s=round(admin.clock.unix_s() - admin.started_unix_s, 3),
        model=None if model is None else model.model_id,
        decode_mode=mode_status(admin),
        speculation=_speculation_status(admin),
        slots=snapshot.slot_count,
        running=snapshot.running_count,
        waiting=snapshot.waiting_count,
        tokens_per_s=round(admin.throughput.tokens_per_s, 3),
        kv=_kv_status(admin),
        cache=_cache_stats(admin),
        responses=stored_responses(admin),
        heartbeat_age_s=round(admin.loop.heartbeat_age_s, 3),
        event_loop_lag_s=round(admin.lag.last_s, 6),
        config=_config_status(admin.configuration),
        faults=Faults(row=_faults(admin.metrics, "row"), engine=_faults(admin.metrics, "engine")),
    )


def admin_state(admin: AdminContext) -> AdminState:
    """Whether the daemon takes work, and what it still has."""
    lifecycle = admin.lifecycle
    reason = None
    try:
        lifecycle.check_accepting()
    except MachdError as error:
        reason = error.message
    return AdminState(
        state=lifecycle.state.value,
        is_held=lifecycle.is_held,
        reason=reason,
        open_requests=admin.service.open_count,
    )


def mode_status(admin: AdminContext) -> ModeStatus | None:
    """How sequences are decoded; None while the model loads."""
    decision = admin.decide(admin.configuration.settings)
    if decision is None:
        return None
    snapshot = admin.loop.snapshot
    return ModeStatus(
        requested=decision.requested.value,
        active=snapshot.mode.value,
        reason=decision.reason,
        # The engine's thread may not have heard of it yet.
        is_switching=admin.loop.is_changing_config,
    )


def stored_responses(admin: AdminContext) -> StoredResponses:
    """What later requests may refer to."""
    return StoredResponses(count=len(admin.responses), size_bytes=admin.responses.size_bytes)


def _model(admin: AdminContext) -> ModelDescription | None:
    """What is served; None while it loads."""
    loaded = admin.loop.loaded
    if not loaded.done() or loaded.exception() is not None:
        return None
    return loaded.result().model


def _speculation_status(admin: AdminContext) -> SpeculationStatus | None:
    model = _model(admin)
    if model is None:
        return None
    verdicts = admin.loop.judge(model)
    decision = decide_speculation(admin.configuration.settings.speculation, model, verdicts)
    drafts = admin.loop.snapshot.drafts
    return SpeculationStatus(
        mode=decision.active.value,
        reason=decision.reason,
        max_draft_tokens=decision.max_draft_tokens,
        cycles=drafts.cycles,
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=drafts.accepted_tokens,
        acceptance=drafts.acceptance,
        fallbacks=drafts.fallbacks,
    )


def _kv_status(admin: AdminContext) -> KvStatus | None:
    model = _model(admin)
    if model is None:
        return None
    kv = kv_memory(admin.loop.snapshot, model)
    return KvStatus(
        budget_bytes=kv.budget_bytes,
        reserved_bytes=kv.reserved_bytes,
        used_bytes=kv.used_bytes,
        quantization=admin.configuration.settings.cache.kv_quantization,
    )


def _cache_stats(admin: AdminContext) -> CacheStats | None:
    model = _model(admin)
    if model is None:
        return None
    return cache_stats(admin.loop, model, admin.configuration.settings)


def _config_status(configuration: Configuration) -> ConfigStatus:
    change = configuration.last_change
    return ConfigStatus(
        kind=change.kind.value,
        at=datetime.fromtimestamp(change.at_unix_s, UTC).isoformat(timespec="milliseconds"),
        ok=change.is_successful,
        changed=list(change.changed),
        problems=list(change.problems),
        overrides=list(configuration.overrides),
    )


def _faults(metrics: Metrics, scope: str) -> int:
    """What ``/metrics`` says, so that the two cannot disagree."""
    return int(metrics.registry.get_sample_value("machd_faults_total", {"scope": scope}) or 0)
