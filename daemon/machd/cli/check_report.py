"""The result of ``machd check MODEL``, in the words of its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict, replace

import machd
from machd.capabilities.bitwise import Computing, judge_bitwise
from machd.capabilities.distributed import distributed
from machd.capabilities.evidence import ProbeResult
from machd.capabilities.fit import Fit, FitVerdict, MemoryNeeds, judge_fit
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.capabilities.versions import Versions
from machd.cli.check_document import (
    ChatTemplateReport,
    DistributedCheck,
    ExpertsReport,
    MemoryFit,
    ModelCheck,
    QualityReport,
    QuantizationReport,
    RankShare,
    VisionReport,
)
from machd.engine.loading.inspection import ExpertsInspection, ModelInspection
from machd.engine.loading.placing.sharding_plan import RankPlan
from machd.engine.loading.template_abilities import TemplateAbilities
from machd.engine.loading.vision import EXAMPLE_PIXELS
from machd.engine.loading.vision_inspection import VisionInspection
from machd.engine.protocol.chat_format import SystemMessages
from machd.installed import installed_version
from machd.link.kv_memory import effective_budget_bytes
from machd.served.capabilities import Device, wire_capabilities


def model_check(
    found: ModelInspection,
    results: Sequence[ProbeResult] = (),
    *,
    kv_budget_gb: float,
    kv_format: str = "none",
    quality: QualityReport | None = None,
    blas: str | None,
    blas_refused: tuple[str, ...],
) -> ModelCheck:
    """Judge what was found.

    Args:
        found: Of the model's files.
        results: Of probes on the loaded model; none where it was not loaded.
        kv_budget_gb: ``continuous_batching.kv_budget_gb``, in units of 10^9 bytes.
        kv_format: ``cache.kv_quantization``.
        quality: The quality that ``model.quantize`` costs; None if it was not measured.
        blas: The CPU's matrix library; None on other backends.
        blas_refused: Libraries that were not loaded, each with its reason.
    """
    facts = found.cache
    kv_budget_bytes = effective_budget_bytes(kv_budget_gb, found.device_memory_bytes)
    experts = None if found.experts is None else _experts(found, found.experts)
    needs = MemoryNeeds(
        weights_bytes=found.weights_bytes,
        working_bytes=found.working_bytes,
        kv_budget_bytes=kv_budget_bytes,
        bytes_per_token=facts.bytes_per_token,
        bytes_per_sequence=facts.bytes_per_sequence,
        context_tokens=found.context_tokens,
    )
    fit = judge_fit(
        needs,
        device_memory_bytes=found.device_memory_bytes,
        available_bytes=found.available_bytes,
    )
    verdicts = judge(facts, results)
    computing = Computing(
        backend=found.backend,
        blas=blas,
        is_native=found.is_native,
        kv_format=kv_format,
    )
    bitwise = judge_bitwise(results, computing)
    row = wire_capabilities(found.architecture, facts, verdicts, _versions(found), bitwise=bitwise)
    return ModelCheck(
        **{name: getattr(row, name) for name in row.__struct_fields__},
        model=found.model_id,
        fit=MemoryFit(
            verdict=fit.fit,
            reason=_fit_reason(fit, experts, found.device_memory_bytes),
            weights_bytes=needs.weights_bytes,
            working_bytes=needs.working_bytes,
            kv_budget_bytes=needs.kv_budget_bytes,
            total_bytes=needs.total_bytes,
            device_memory_bytes=found.device_memory_bytes,
            available_bytes=found.available_bytes,
        ),
        bytes_per_token=facts.bytes_per_token,
        bytes_per_sequence=facts.bytes_per_sequence,
        context_tokens=found.context_tokens,
        budget_context_tokens=fit.budget_context_tokens,
        fitting_context_tokens=fit.fitting_context_tokens,
        parameters=found.parameters,
        weights_bytes=found.weights_bytes,
        stored_bytes=found.stored_bytes,
        quantization=_quantization(found),
        quantised_to=None if found.quantised_to is None else str(found.quantised_to),
        quality=quality,
        experts=experts,
        vision=None if found.vision is None else _vision(found.vision),
        distributed=_distributed(found, kv_budget_bytes),
        native_quantization=found.native_modes,
        chat_template=_chat_template(found.template),
        default_sampling=found.default_sampling.named,
        device=Device(
            backend=found.backend,
            name=found.device_name,
            memory_bytes=found.device_memory_bytes,
            blas=blas if found.backend == "cpu" else None,
            blas_refused=blas_refused,
        ),
        notes=list(found.notes),
    )


def _fit_reason(fit: FitVerdict, experts: ExpertsReport | None, device_bytes: int) -> str:
    """Return the verdict's reason, with what experts on disk would change."""
    would_fit = experts is not None and experts.streaming_bytes < device_bytes
    if fit.fit is not Fit.WONT_FIT or experts is None or experts.on_disk or not would_fit:
        return fit.reason
    return (
        f"{fit.reason}; or leave its experts on disk with `--streaming`: weights then take "
        f"{experts.streaming_bytes / 1e9:.2f} GB"
    )


def _experts(found: ModelInspection, experts: ExpertsInspection) -> ExpertsReport:
    bank = experts.bank
    other_bytes = found.weights_bytes - experts.resident_bytes
    return ExpertsReport(
        count=experts.count,
        bytes=bank.experts_bytes if experts.is_banked else experts.resident_bytes,
        other_bytes=bank.dense_bytes if experts.is_banked else other_bytes,
        on_disk=experts.is_banked,
        bank_bytes=bank.bank_bytes,
        streaming_bytes=bank.dense_bytes + bank.bank_bytes,
    )


def _vision(vision: VisionInspection) -> VisionReport:
    takes = vision.takes
    if takes is None:
        return VisionReport(served=False, reason=vision.reason, example_pixels=EXAMPLE_PIXELS)
    return VisionReport(
        served=True,
        processor=takes.processor,
        kinds=[str(kind) for kind in takes.kinds],
        example_pixels=EXAMPLE_PIXELS,
        example_tokens=takes.example_tokens,
    )


def _distributed(found: ModelInspection, kv_budget_bytes: int) -> DistributedCheck:
    """Judge several ranks; a model that cannot be cut for any number of ranks is blocked."""
    modes, plans = found.code.shard_modes, found.rank_plans
    takes = None if found.vision is None else found.vision.takes
    verdict = distributed(found.architecture, modes, has_vision=takes is not None)
    if plans and all(plan.reason for plan in plans):
        verdict = replace(verdict, support=Support.BLOCKED, reason=plans[0].reason)
    return DistributedCheck(
        **asdict(verdict),
        modes=list(modes),
        shares=[_share(plan, kv_budget_bytes) for plan in plans],
    )


def _share(plan: RankPlan, kv_budget_bytes: int) -> RankShare:
    if plan.reason:
        return RankShare(mode=plan.mode.value, ranks=plan.ranks, reason=plan.reason)
    return RankShare(
        mode=plan.mode.value,
        ranks=plan.ranks,
        weights_bytes=plan.weights_bytes,
        memory_bytes=plan.weights_bytes + plan.working_bytes + kv_budget_bytes,
    )


def _quantization(found: ModelInspection) -> QuantizationReport | None:
    stored = found.quantization
    if stored is None:
        return None
    return QuantizationReport(
        mode=stored.mode,
        bits=stored.bits,
        group_size=stored.group_size,
        native=found.native_modes.get(stored.mode, False),
        kept=found.keeps_quantized,
    )


def _chat_template(abilities: TemplateAbilities) -> ChatTemplateReport:
    tags = abilities.reasoning_tags
    return ChatTemplateReport(
        present=abilities.present,
        system_role=abilities.system_messages is not SystemMessages.NONE,
        system_messages=str(abilities.system_messages),
        tools=abilities.tools,
        tool_format=abilities.tool_format,
        reasoning=tags is not None,
        reasoning_tags=None if tags is None else list(tags),
        reasoning_switch=abilities.reasoning_switch,
        reason=abilities.problem or None,
    )


def _versions(found: ModelInspection) -> Versions:
    return Versions(
        machd=machd.__version__,
        mlx=installed_version("mlx"),
        mlx_lm=installed_version("mlx-lm"),
        backend=found.backend,
        dtype=found.dtype,
    )
