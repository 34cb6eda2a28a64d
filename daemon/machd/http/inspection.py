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
    ModelSummary,
    SpeculationReport,
    Versions,
)
from machd.api.openapi import openapi_document
from machd.capabilities.facts import KvCacheKind
from machd.http.context import ServerContext
from machd.telemetry.metrics import CONTENT_TYPE

__all__ = ["get_cache_stats", "get_capabilities", "get_metrics", "get_openapi"]


@get("/v1/capabilities")
async def get_capabilities(context: NamedDependency[ServerContext]) -> Capabilities:
    """What the loaded model can do here, and why."""
    service = context.service
    model = service.model
    cache = model.cache
    snapshot = context.loop.snapshot
    return Capabilities(
        architecture=model.architecture,
        kv_cache_kind=cache.kind.value,
        layers=cache.class_counts,
        nested=list(cache.nested_classes) if cache.kind is KvCacheKind.NESTED else msgspec.UNSET,
        trimmable=cache.trimmable,
        versions=Versions(
            machd=context.versions.machd,
            mlx=context.versions.mlx,
            mlx_lm=context.versions.mlx_lm,
            backend=model.backend,
            dtype=model.dtype,
        ),
        decode_mode=DecodeModeReport(
            requested=snapshot.mode.value,
            active=snapshot.mode.value,
            reason="one generation at a time is the default",
        ),
        max_b=snapshot.slot_count,
        model=ModelSummary(
            id=model.model_id,
            context_tokens=model.context_tokens,
            vocabulary_tokens=model.vocabulary_tokens,
            parameters=model.parameters,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
        ),
        features=Features(
            chat=service.tokenizer.has_chat_template,
            logprobs=True,
            tools=False,
            reasoning=False,
            structured_output=False,
        ),
        speculation=SpeculationReport(mode="off"),
        device=Device(backend=model.backend, blas=model.blas),
    )


@get("/v1/cache/stats")
async def get_cache_stats(context: NamedDependency[ServerContext]) -> CacheStats:
    """What the caches hold; while a generation runs, what they held at the last idle moment."""
    is_stale = context.loop.snapshot.active_loops > 0
    snapshot = context.loop.idle_snapshot
    model = context.service.model
    # One generation at a time: the most that can lie in the cache is one sequence as long as the context.
    budget_bytes = (
        model.context_tokens * model.cache.bytes_per_token + model.cache.bytes_per_sequence
    )
    return CacheStats(
        status="stale_generation_in_flight" if is_stale else "ok",
        as_of=datetime.fromtimestamp(snapshot.taken_unix_s, UTC).isoformat(timespec="milliseconds"),
        kv=KvStats(
            budget_bytes=budget_bytes,
            reserved_bytes=0,  # nothing is reserved at an idle moment
            used_bytes=snapshot.memory.kv_used_bytes,
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
