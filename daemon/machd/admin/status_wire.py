"""The daemon as an operator sees it: state, decoding, load, memory, and how its settings changed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from machd.capabilities.document import DecodeMode, ModelCapabilities, SpeculationMode
from machd.serving.cache_stats_wire import CacheStats

_State: TypeAlias = Literal["loading", "ready", "draining", "stopped", "failed"]


class AdminState(Struct, frozen=True, kw_only=True):
    """Whether the daemon takes work, and what it still has.

    Attributes:
        is_held: It drains because an operator asked for it, and resumes when one asks for that.
        reason: Why it takes none; null while it does.
        open_requests: Requests that are being answered or wait.
    """

    state: _State
    is_held: bool
    reason: str | None
    open_requests: int


class ModeStatus(Struct, frozen=True, kw_only=True):
    """How sequences are decoded.

    Attributes:
        requested: What the settings ask for.
        active: What runs now.
        reason: Why that is what the settings come to with this model.
        is_switching: Another mode begins when what runs is finished.
    """

    requested: DecodeMode
    active: DecodeMode
    reason: str
    is_switching: bool


class ModeRequest(Struct, frozen=True, kw_only=True):
    """The mode that an operator wants."""

    mode: Literal["single", "batched"]


class SpeculationStatus(Struct, frozen=True, kw_only=True):
    """Tokens that are guessed ahead, and what came of them since the start.

    Attributes:
        mode: Who guesses.
        reason: Why it is that one, or nobody.
        max_draft_tokens: Tokens that are guessed ahead of one at the most; 0 where nobody guesses.
        cycles: Passes that verified guesses, each row's by itself.
        drafted_tokens: Guesses that were verified.
        accepted_tokens: Those that were right.
        acceptance: The share that was; null before any guess.
        fallbacks: Sequences that went on without guesses because guessing failed.
    """

    mode: SpeculationMode
    reason: str
    max_draft_tokens: int
    cycles: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance: float | None
    fallbacks: int


class KvStatus(Struct, frozen=True, kw_only=True):
    """The KV cache in bytes: what there may be, what is promised, what is there.

    Attributes:
        quantization: In how many bits keys and values are kept, as ``cache.kv_quantization`` says.
    """

    budget_bytes: int
    reserved_bytes: int
    used_bytes: int
    quantization: str = "none"


class StoredResponses(Struct, frozen=True, kw_only=True):
    """Responses that later requests may refer to, and the bytes they count."""

    count: int
    size_bytes: int


class Faults(Struct, frozen=True, kw_only=True):
    """Failures of machd's own since the start: of single sequences, and of the engine."""

    row: int
    engine: int


class ConfigStatus(Struct, frozen=True, kw_only=True):
    """How the last attempt to change the settings went.

    Attributes:
        kind: What asked for it: the ``start``, a ``reload`` or a ``patch``.
        at: When, in RFC 3339.
        ok: Whether the settings that were asked for are in force.
        changed: Dotted keys that got other values.
        problems: Why nothing was changed, a line each.
        overrides: Dotted keys that were changed over the admin API since the last reload.
    """

    kind: Literal["start", "reload", "patch"]
    at: str
    ok: bool
    changed: list[str]
    problems: list[str]
    overrides: list[str]


class AdminStatus(AdminState, frozen=True, kw_only=True):
    """The whole daemon at one moment.

    Attributes:
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


class ProbeReport(Struct, frozen=True, kw_only=True):
    """What was measured of the model, and how it is decoded because of that."""

    capabilities: ModelCapabilities
    decode_mode: ModeStatus
