"""Endpoints about the daemon: capabilities, caches, metrics."""

from __future__ import annotations

import msgspec
from litestar import Response
from litestar.di import NamedDependency

from machd.capabilities.distributed import distributed
from machd.capabilities.verdict import Support
from machd.dialects.endpoint import endpoint
from machd.engine.protocol.encoder import EncoderTask
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import ProposerKind
from machd.engine.protocol.tokenizer import Tokenizer
from machd.http.context import ServerContext
from machd.http.endpoint import TEXT, Answer
from machd.link.snapshot import LoopSnapshot
from machd.link.speculation_mode import SpeculationDecision
from machd.request.media import MediaKind
from machd.scheduler.draft_reading import LEAST_BATCHED_GAIN, DraftReading
from machd.served import capabilities
from machd.served.cache_stats import CacheStats, cache_stats
from machd.telemetry.metrics import CONTENT_TYPE, Metrics

_NO_LOOK_AHEAD = (
    "no step is dispatched before the last one's tokens are read (look-ahead), because each layer waits "
    "for its router's choice"
)


@endpoint("GET /v1/capabilities", capabilities.Capabilities)
async def get_capabilities(context: NamedDependency[ServerContext]) -> capabilities.Capabilities:
    """Return the capabilities of the loaded model on this machine, with reasons."""
    adapters = await _adapters(context)
    model = context.served.model
    decision, speculation = context.served.decode_mode, context.served.speculation
    row = capabilities.model_capabilities(context.served.known, context.versions)
    row = _with_gain(row, speculation, context.served.snapshot.drafts)
    return capabilities.Capabilities(
        **msgspec.structs.asdict(row)
        | {
            "speculation": _speculation(row, speculation, context.served.snapshot.drafts),
            "kv_quantization": _kv_quantization(row, context),
            "expert_streaming": _expert_streaming(row, model),
            "prefix_cache": _prefix_cache(row, context.served.snapshot),
        },
        distributed=_distributed(model, ranks=len(context.served.snapshot.memory.ranks) or 1),
        decode_mode=msgspec.structs.replace(decision, active=context.served.snapshot.mode),
        max_b=context.served.snapshot.slot_count,
        model=capabilities.ModelSummary(
            id=model.model_id,
            context_tokens=model.context_tokens,
            vocabulary_tokens=model.vocabulary_tokens,
            parameters=model.parameters,
            weights_bytes=model.weights_bytes,
            dtype=model.dtype,
            quantization=model.quantization,
        ),
        features=features(context.served.tokenizer, model),
        device=capabilities.device_of(model),
        encoder=capabilities.encoder_report(model.encoder),
        adapters=adapters,
    )


@endpoint("GET /v1/cache/stats", CacheStats)
async def get_cache_stats(context: NamedDependency[ServerContext]) -> CacheStats:
    """Return the contents of the caches in numbers.

    One generation at a time: while one runs, what they held at the last idle moment.
    """
    return cache_stats(context.served, context.settings)


@endpoint("GET|HEAD /metrics", Answer(200, None, TEXT))
async def get_metrics(metrics: NamedDependency[Metrics]) -> Response[bytes]:
    """Metrics in Prometheus' text format."""
    return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def features(tokenizer: Tokenizer, model: ModelDescription) -> capabilities.Features:
    """Return the features of the tokenizer's chat format, and what the model sees."""
    chat_format = tokenizer.chat_format
    kinds = () if model.vision is None else model.vision.kinds
    task = None if model.encoder is None else model.encoder.task
    return capabilities.Features(
        chat=tokenizer.has_chat_template,
        logprobs=model.encoder is None,
        tools=tokenizer.has_chat_template,
        tool_format=chat_format.tool_format,
        system_messages=str(chat_format.system_messages) if tokenizer.has_chat_template else None,
        reasoning=chat_format.reasoning_markers is not None,
        structured_output=model.encoder is None,
        vision=MediaKind.IMAGE in kinds,
        video=MediaKind.VIDEO in kinds,
        embeddings=task is EncoderTask.EMBED,
        scores=model.reranker is not None
        or (model.encoder is not None and model.encoder.scores_pairs),
        classes=task is EncoderTask.CLASSIFY,
    )


async def _adapters(context: ServerContext) -> list[capabilities.AdapterReport]:
    """Describe the adapters of the request's model."""
    model = context.model or context.models.default
    return [
        capabilities.AdapterReport(
            id=context.name_of(one.adapter),
            scale=one.adapter.scale,
            format=str(facts.format),
            max_rank=facts.max_rank,
            layers=facts.layers,
            dtype=facts.dtype,
            base_model=facts.base_model,
            size_bytes=facts.size_bytes,
        )
        for one in await context.adapters.listed()
        if context.models[one.adapter.model_name] is model
        for facts in (one.files.facts,)
    ]


def _kv_quantization(
    row: capabilities.ModelCapabilities, context: ServerContext
) -> capabilities.KvQuantizationReport:
    """The verdict, and the format in force: settings that a model does not allow end the start."""
    verdict = row.kv_quantization
    assert verdict is not None, "every model is judged"
    active = context.settings.cache.kv_quantization
    return capabilities.KvQuantizationReport(**msgspec.structs.asdict(verdict), active=active)


def _expert_streaming(
    row: capabilities.ModelCapabilities, model: ModelDescription
) -> capabilities.ExpertStreamingReport:
    """Return the verdict, whether experts lie on disk, and what that excludes."""
    verdict = row.expert_streaming
    assert verdict is not None, "every model is judged"
    fields = msgspec.structs.asdict(verdict)
    if model.experts_on_disk:
        fields["reason"] += f"; {_NO_LOOK_AHEAD}"
    return capabilities.ExpertStreamingReport(**fields, active=model.experts_on_disk)


def _distributed(model: ModelDescription, *, ranks: int) -> capabilities.DistributedReport | None:
    """Return the verdict on several ranks, and how many there are; None for a model without code."""
    if model.code is None:
        return None
    modes = model.code.shard_modes
    verdict = distributed(model.architecture, modes, has_vision=model.vision is not None)
    fields = msgspec.structs.asdict(verdict)
    return capabilities.DistributedReport(**fields, modes=list(modes), ranks=ranks)


def _prefix_cache(
    row: capabilities.ModelCapabilities, snapshot: LoopSnapshot
) -> capabilities.PrefixCacheReport:
    """The verdict, and whether prompts are kept, in memory and on disk."""
    verdict = row.prefix_cache
    assert verdict is not None, "every model is judged"
    return capabilities.PrefixCacheReport(
        **msgspec.structs.asdict(verdict),
        active=snapshot.prefix is not None and snapshot.prefix.limit_bytes != 0,
        disk=snapshot.memory.disk is not None,
    )


def _with_gain(
    row: capabilities.ModelCapabilities, decision: SpeculationDecision, drafts: DraftReading
) -> capabilities.ModelCapabilities:
    """Return the verdict on drafts in a batch, with their present gain where that is known."""
    verdict, gain = row.batched_specdec, drafts.batched_gain
    assert verdict is not None, "every model is judged"
    is_on = decision.active is not ProposerKind.OFF and verdict.support is Support.SUPPORTED
    if not is_on or gain is None:
        return row
    state = "on" if gain > LEAST_BATCHED_GAIN else "off because slower"
    told = msgspec.structs.replace(
        verdict,
        reason=f"{verdict.reason}; {state}: rows with drafts are thought to make {gain:.2f} times as "
        f"many tokens a second as without, and {LEAST_BATCHED_GAIN:g} is asked for",
    )
    speculation = row.speculation
    assert isinstance(speculation, capabilities.SpeculationReport), "every model is judged"
    return msgspec.structs.replace(
        row,
        batched_specdec=told,
        speculation=msgspec.structs.replace(speculation, batched_specdec=told),
    )


def _speculation(
    row: capabilities.ModelCapabilities, decision: SpeculationDecision, drafts: DraftReading
) -> capabilities.SpeculationInForce:
    assert isinstance(row.speculation, capabilities.SpeculationReport), "every model is judged"
    in_force = {
        "requested": decision.requested,
        "mode": decision.active,
        "mode_reason": decision.reason,
        "max_draft_tokens": decision.max_draft_tokens,
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": drafts.accepted_tokens,
        "acceptance": drafts.acceptance,
    }
    return capabilities.SpeculationInForce(**msgspec.structs.asdict(row.speculation) | in_force)
