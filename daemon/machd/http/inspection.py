"""What the daemon says of itself: capabilities, caches, metrics, and its own description."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency

from machd.api.cache import CacheStats, KvStats
from machd.api.capabilities import (
    Capabilities,
    DecodeModeReport,
    Device,
    Features,
    ModelCapabilities,
    ModelSummary,
    SpeculationReport,
)
from machd.api.openapi import openapi_document
from machd.capabilities.verdicts import judge
from machd.capabilities.wire import wire_capabilities
from machd.engine.protocol import Tokenizer
from machd.http.context import ServerContext
from machd.scheduler.events import DecodeMode
from machd.serving.decode_mode import decide_decode_mode
from machd.serving.kv_memory import kv_memory
from machd.telemetry.metrics import CONTENT_TYPE

__all__ = ["get_cache_stats", "get_capabilities", "get_metrics", "get_openapi"]


@get("/v1/capabilities")
async def get_capabilities(context: NamedDependency[ServerContext]) -> Capabilities:
    """What the loaded model can do here, and why."""
    service = context.service
    model = service.model
    verdicts = judge(model.cache, context.loop.probe_results, architecture=model.architecture)
    decision = decide_decode_mode(
        is_batching_asked=context.settings.continuous_batching.enabled,
        verdict=verdicts.continuous_batching,
    )
    versions = msgspec.structs.replace(context.versions, backend=model.backend, dtype=model.dtype)
    row = wire_capabilities(model.architecture, model.cache, verdicts, versions)
    return Capabilities(
        **msgspec.structs.asdict(row) | {"speculation": _speculation(row)},
        decode_mode=DecodeModeReport(
            requested=decision.requested.value,
            active=context.loop.snapshot.mode.value,
            reason=decision.reason,
        ),
        max_b=context.loop.snapshot.slot_count,
        model=ModelSummary(
            id=model.model_id,
            context_tokens=model.context_tokens,
            vocabulary_tokens=model.vocabulary_tokens,
            parameters=model.parameters,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
        ),
        features=_features(service.tokenizer),
        device=Device(
            backend=model.backend,
            memory_bytes=model.device_memory_bytes or None,
            blas=model.blas,
        ),
    )


@get("/v1/cache/stats")
async def get_cache_stats(context: NamedDependency[ServerContext]) -> CacheStats:
    """What the caches hold.

    One generation at a time: while one runs, what they held at the last idle moment.
    """
    loop = context.loop
    is_live = loop.snapshot.mode is DecodeMode.BATCHED
    is_stale = not is_live and loop.snapshot.active_loops > 0
    snapshot = loop.snapshot if is_live else loop.idle_snapshot
    kv = kv_memory(snapshot, context.service.model)
    return CacheStats(
        status="stale_generation_in_flight" if is_stale else "ok",
        as_of=datetime.fromtimestamp(snapshot.taken_unix_s, UTC).isoformat(timespec="milliseconds"),
        kv=KvStats(
            budget_bytes=kv.budget_bytes,
            reserved_bytes=kv.reserved_bytes,
            used_bytes=kv.used_bytes,
        ),
    )


@get("/metrics")
async def get_metrics(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """Prometheus' text format."""
    return Response(context.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@get("/openapi.json")
async def get_openapi(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """The OpenAPI document."""
    document = openapi_document(version=context.versions.machd)
    return Response(msgspec.json.encode(document), media_type="application/json")


def _features(tokenizer: Tokenizer) -> Features:
    """What the tokenizer's chat format says."""
    chat_format = tokenizer.chat_format
    return Features(
        chat=tokenizer.has_chat_template,
        logprobs=True,
        tools=tokenizer.has_chat_template,
        tool_format=chat_format.tool_format,
        reasoning=chat_format.reasoning_markers is not None,
        structured_output=True,
    )


def _speculation(row: ModelCapabilities) -> SpeculationReport:
    """The verdicts, and what the daemon does."""
    assert isinstance(row.speculation, SpeculationReport), "every model is judged"
    return msgspec.structs.replace(row.speculation, mode="off")
