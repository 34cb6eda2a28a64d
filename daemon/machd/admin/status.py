"""The daemon as an operator sees it: state, decoding, load, memory, and how its settings changed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from litestar.di import NamedDependency
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.engine.protocol.step import ProposerKind
from machd.errors import MachdError
from machd.link.decode_mode import DecodeModeDecision
from machd.link.kv_memory import KvMemory
from machd.process.configuration import ChangeKind, Configuration
from machd.process.lifecycle import State
from machd.served.cache_stats import CacheStats, cache_stats
from machd.served.capabilities import ModelCapabilities
from machd.served.named_model import NamedModel
from machd.served.turns import ModelState
from machd.settings.cache import KvFormatName


class AdminState(Struct, frozen=True, kw_only=True):
    """State of the daemon: what it accepts, and how much is still open.

    Attributes:
        is_held: It drains because an operator asked for it, and resumes when one asks for that.
        reason: Why it takes none; null while it does.
        open_requests: Requests that are being answered or wait, for their model too.
    """

    state: State
    is_held: bool
    reason: str | None
    open_requests: int


class ModeStatus(DecodeModeDecision, frozen=True, kw_only=True):
    """The decode mode, and whether it is about to change.

    Attributes:
        is_switching: Another mode begins when what runs is finished.
    """

    is_switching: bool


class ModeRequest(Struct, frozen=True, kw_only=True):
    """The mode that an operator wants; ``continuous`` is another word for ``batched``."""

    mode: Literal["single", "batched", "continuous"]


class SpeculationStatus(Struct, frozen=True, kw_only=True):
    """Draft tokens: the proposer, and counts since the start.

    Attributes:
        mode: The proposer.
        reason: Why it is that one, or none.
        max_draft_tokens: Most draft tokens after one; 0 without a proposer.
        cycles: Passes that verified drafts, each row's by itself.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: Those that were right.
        acceptance: The share that was; null before any draft.
        fallbacks: Sequences that went on without drafts because their proposer failed.
    """

    mode: ProposerKind
    reason: str
    max_draft_tokens: int
    cycles: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None
    fallbacks: int


class KvStatus(KvMemory, frozen=True, kw_only=True):
    """The KV cache in bytes: what there may be, what is promised, what is there.

    Attributes:
        quantization: In how many bits keys and values are kept, as ``cache.kv_quantization`` says.
    """

    quantization: KvFormatName = "none"


class RankStatus(Struct, frozen=True, kw_only=True):
    """One of the ranks that compute the model.

    Attributes:
        active_bytes: Held by the array library, weights included.
        available_bytes: What its process can still take.
        heartbeat_age_s: Since all ranks last told their memory.
    """

    rank: int
    active_bytes: int
    available_bytes: int
    heartbeat_age_s: float


class StoredResponses(Struct, frozen=True, kw_only=True):
    """Responses that later requests may refer to, and the bytes they count."""

    count: int
    size_bytes: int


class Faults(Struct, frozen=True, kw_only=True):
    """Failures of machd's own since the start: of single sequences, and of the engine."""

    row: int
    engine: int
    engine_restarts: int = 0


class ConfigStatus(Struct, frozen=True, kw_only=True):
    """Result of the last attempt to change the settings.

    Attributes:
        kind: What asked for it: the ``start``, a ``reload`` or a ``patch``.
        at: When, in RFC 3339.
        ok: Whether the settings that were asked for are in force.
        changed: Dotted keys that got other values.
        problems: Why nothing was changed, a line each.
        overrides: Dotted keys that were changed over the admin API since the last reload.
    """

    kind: ChangeKind
    at: str
    ok: bool
    changed: list[str]
    problems: list[str]
    overrides: list[str]


class ModelSummary(Struct, frozen=True, kw_only=True):
    """One of several models, in short.

    Attributes:
        leases: Requests that hold it, those that wait for its load included.
    """

    name: str
    state: ModelState
    pinned: bool
    leases: int


class AdminStatus(AdminState, frozen=True, kw_only=True):
    """The whole daemon at one moment.

    Attributes:
        running_requests: Open requests of which a sequence runs, or has run.
        waiting_requests: Open requests of which every sequence still waits.
        model: Null while it loads.
        decode_mode: Null while the model loads.
        speculation: Null while the model loads.
        slots: Sequences that can run at once.
        running: Sequences that run.
        waiting: Sequences that wait.
        tokens_per_s: Generated tokens a second over the last ten seconds.
        kv: Null while the model loads.
        cache: What ``GET /v1/cache/stats`` answers; null while the model loads.
        heartbeat_age_s: Since the engine last began a step or found itself idle.
        event_loop_lag_s: How late the event loop was when last measured.
        ranks: The ranks that compute the model; empty where this process computes it alone.
        models: All models, the default one first; left out where there is one. What else is of a model is of the default
            one, or of the one that the query names.
    """

    version: str
    uptime_s: float
    model: str | None
    decode_mode: ModeStatus | None
    slots: int
    running: int
    waiting: int
    tokens_per_s: float
    kv: KvStatus | None
    cache: CacheStats | None
    responses: StoredResponses
    heartbeat_age_s: float
    event_loop_lag_s: float
    config: ConfigStatus
    faults: Faults
    speculation: SpeculationStatus | None = None
    ranks: tuple[RankStatus, ...] = ()
    running_requests: int = 0
    waiting_requests: int = 0
    models: tuple[ModelSummary, ...] | UnsetType = UNSET


class ProbeReport(Struct, frozen=True, kw_only=True):
    """Results of measuring the model, and the decode mode that follows."""

    capabilities: ModelCapabilities
    decode_mode: ModeStatus


@endpoint("GET /admin/status", AdminStatus)
async def get_status(admin: NamedDependency[AdminContext]) -> AdminStatus:
    """State, decode mode, load, memory, the last change of the settings."""
    state = asdict(admin_state(admin))
    open_generations = admin.open_generations
    admitted = sum(one.admission is not None for one in open_generations.all)
    running = admitted + len(open_generations.encodings)
    snapshot, known = admin.served.snapshot, admin.served.state
    return AdminStatus(
        **state,
        running_requests=running,
        waiting_requests=state["open_requests"] - running,
        version=admin.versions.machd,
        uptime_s=round(admin.clock.unix_s() - admin.started_unix_s, 3),
        model=None if known is None else known.model.model_id,
        decode_mode=mode_status(admin),
        speculation=_speculation_status(admin),
        slots=snapshot.slot_count,
        running=snapshot.running_count,
        waiting=snapshot.waiting_count,
        tokens_per_s=round(admin.throughput.tokens_per_s, 3),
        kv=_kv_status(admin),
        cache=_cache_stats(admin),
        responses=stored_responses(admin),
        heartbeat_age_s=round(admin.served.heartbeat_age_s, 3),
        event_loop_lag_s=round(admin.lag.last_s, 6),
        config=_config_status(admin.configuration),
        faults=Faults(
            # Read off the metrics, so that the two cannot disagree.
            row=admin.metrics.count_of("machd_faults_total", scope="row"),
            engine=admin.metrics.count_of("machd_faults_total", scope="engine"),
            engine_restarts=admin.metrics.count_of("machd_engine_restarts_total"),
        ),
        ranks=tuple(
            RankStatus(
                rank=one.rank,
                active_bytes=one.active_bytes,
                available_bytes=one.available_bytes,
                heartbeat_age_s=round(max(0.0, admin.clock.unix_s() - one.heard_unix_s), 3),
            )
            for one in snapshot.memory.ranks
        ),
        models=UNSET if admin.models.is_one else tuple(map(_summary, admin.models)),
    )


def admin_state(admin: AdminContext) -> AdminState:
    """Return the state of the daemon."""
    lifecycle = admin.lifecycle
    reason = None
    try:
        lifecycle.check_accepting()
    except MachdError as error:
        reason = error.message
    return AdminState(
        state=lifecycle.state,
        is_held=lifecycle.is_held,
        reason=reason,
        open_requests=len(admin.open_generations) + len(admin.models.waiting_requests),
    )


def mode_status(admin: AdminContext) -> ModeStatus | None:
    """Return the decode mode; None while the model loads."""
    if admin.served.state is None:
        return None
    decision, snapshot = admin.served.decode_mode, admin.served.snapshot
    return ModeStatus(
        requested=decision.requested,
        active=snapshot.mode,
        reason=decision.reason,
        # The engine's thread may not have heard of it yet.
        is_switching=admin.served.link.is_changing_config,
    )


def stored_responses(admin: AdminContext) -> StoredResponses:
    """Count the responses that later requests may refer to."""
    return StoredResponses(count=len(admin.responses), size_bytes=admin.responses.size_bytes)


def _speculation_status(admin: AdminContext) -> SpeculationStatus | None:
    if admin.served.state is None:
        return None
    decision = admin.served.speculation
    drafts = admin.served.snapshot.drafts
    return SpeculationStatus(
        mode=decision.active,
        reason=decision.reason,
        max_draft_tokens=decision.max_draft_tokens,
        cycles=drafts.cycles,
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=drafts.accepted_tokens,
        acceptance=drafts.acceptance,
        fallbacks=drafts.fallbacks,
    )


def _summary(model: NamedModel) -> ModelSummary:
    return ModelSummary(
        name=model.name,
        state=model.state,
        pinned=model.residence.is_pinned,
        leases=model.leases,
    )


def _kv_status(admin: AdminContext) -> KvStatus | None:
    if admin.served.state is None:
        return None
    quantization = admin.settings.cache.kv_quantization
    return KvStatus(**asdict(admin.served.kv), quantization=quantization)


def _cache_stats(admin: AdminContext) -> CacheStats | None:
    if admin.served.state is None:
        return None
    return cache_stats(admin.served, admin.settings)


def _config_status(configuration: Configuration) -> ConfigStatus:
    change = configuration.last_change
    return ConfigStatus(
        kind=change.kind,
        at=datetime.fromtimestamp(change.at_unix_s, UTC).isoformat(timespec="milliseconds"),
        ok=change.is_successful,
        changed=list(change.changed),
        problems=list(change.problems),
        overrides=list(configuration.overrides),
    )
