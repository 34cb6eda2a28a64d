"""The result of ``machd check MODEL``, in the words of its JSON."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from machd.capabilities.distributed import distributed
from machd.capabilities.evidence import Results
from machd.capabilities.fit import Fit, FitVerdict, MemoryNeeds, judge_fit
from machd.capabilities.verdict import Support
from machd.capabilities.versions import installed_versions
from machd.cli import check_document as document
from machd.engine.loading.inspection import ExpertsInspection, ModelInspection
from machd.engine.loading.placing.sharding_plan import RankPlan
from machd.engine.loading.reranker_inspection import RerankerInspection
from machd.engine.loading.template_abilities import TemplateAbilities
from machd.engine.loading.tensor_types import TensorType
from machd.engine.loading.vision import EXAMPLE_PIXELS
from machd.engine.protocol.chat_format import SystemMessages
from machd.engine.protocol.engine import ModelDescription
from machd.link.kv_memory import effective_budget_bytes
from machd.link.state import ServedState
from machd.served.capabilities import device_of, model_capabilities


def model_check(
    found: ModelInspection,
    results: Results = (),
    *,
    kv_budget_gb: float,
    quality: document.QualityReport | None = None,
    reranker: RerankerInspection | None = None,
) -> document.ModelCheck:
    """Judge what was found; ``kv_budget_gb`` is in units of 10^9 bytes."""
    model = found.description
    facts = model.cache
    kv_budget_bytes = effective_budget_bytes(kv_budget_gb, model.device_memory_bytes)
    experts = None if found.experts is None else _experts(found, found.experts)
    needs = MemoryNeeds(
        weights_bytes=model.weights_bytes,
        working_bytes=found.working_bytes,
        kv_budget_bytes=kv_budget_bytes,
        bytes_per_token=facts.bytes_per_token,
        bytes_per_sequence=facts.bytes_per_sequence,
        context_tokens=model.context_tokens,
    )
    fit = judge_fit(
        needs,
        device_memory_bytes=model.device_memory_bytes,
        available_bytes=found.available_bytes,
    )
    row = model_capabilities(ServedState.of(model, results), installed_versions())
    return document.ModelCheck(
        **{name: getattr(row, name) for name in row.__struct_fields__},
        model=model.model_id,
        fit=document.MemoryFit(
            verdict=fit.fit,
            reason=_fit_reason(fit, experts, model.device_memory_bytes),
            weights_bytes=needs.weights_bytes,
            working_bytes=needs.working_bytes,
            kv_budget_bytes=needs.kv_budget_bytes,
            total_bytes=needs.total_bytes,
            device_memory_bytes=model.device_memory_bytes,
            available_bytes=found.available_bytes,
        ),
        bytes_per_token=facts.bytes_per_token,
        bytes_per_sequence=facts.bytes_per_sequence,
        context_tokens=model.context_tokens,
        budget_context_tokens=fit.budget_context_tokens,
        fitting_context_tokens=fit.fitting_context_tokens,
        parameters=model.parameters,
        weights_bytes=model.weights_bytes,
        stored_bytes=found.stored_bytes,
        quantization=_quantization(found),
        tensor_types=[_tensor_type(one) for one in found.tensor_types] or None,
        quantised_to=None if found.quantised_to is None else str(found.quantised_to),
        quality=quality,
        experts=experts,
        vision=_vision(model),
        reranker=None if reranker is None else _reranker(reranker),
        distributed=_distributed(found, kv_budget_bytes),
        native_quantization=found.native_modes,
        chat_template=_chat_template(found.template),
        default_sampling=model.default_sampling.named,
        device=device_of(model),
        notes=[*found.notes, *(reranker.notes if reranker is not None else ())],
    )


def _fit_reason(fit: FitVerdict, experts: document.ExpertsReport | None, device_bytes: int) -> str:
    """Return the verdict's reason, with what experts on disk would change."""
    would_fit = experts is not None and experts.streaming_bytes < device_bytes
    if fit.fit is not Fit.WONT_FIT or experts is None or experts.on_disk or not would_fit:
        return fit.reason
    return (
        f"{fit.reason}; or leave its experts on disk with `--streaming`: weights then take "
        f"{experts.streaming_bytes / 1e9:.2f} GB"
    )


def _experts(found: ModelInspection, experts: ExpertsInspection) -> document.ExpertsReport:
    bank = experts.bank
    other_bytes = found.description.weights_bytes - experts.resident_bytes
    return document.ExpertsReport(
        count=experts.count,
        bytes=bank.experts_bytes if experts.is_banked else experts.resident_bytes,
        other_bytes=bank.dense_bytes if experts.is_banked else other_bytes,
        on_disk=experts.is_banked,
        bank_bytes=bank.bank_bytes,
        streaming_bytes=bank.dense_bytes + bank.bank_bytes,
    )


def _vision(model: ModelDescription) -> document.VisionReport | None:
    takes, reason = model.vision, model.vision_reason
    if takes is None:
        return (
            document.VisionReport(served=False, reason=reason, example_pixels=EXAMPLE_PIXELS)
            if reason
            else None
        )
    return document.VisionReport(
        served=True,
        processor=takes.processor,
        kinds=[str(kind) for kind in takes.kinds],
        example_pixels=EXAMPLE_PIXELS,
        example_tokens=takes.example_tokens,
    )


def _reranker(found: RerankerInspection) -> document.RerankerReport | None:
    if found.description is None:
        return None
    return document.RerankerReport(
        true_token=found.true_token,
        false_token=found.false_token,
        instruction=found.description.instruction,
        prompt="chat_template" if found.description.has_template else "qwen3",
    )


def _distributed(found: ModelInspection, kv_budget_bytes: int) -> document.DistributedCheck:
    """Judge several ranks; a model that no number of them can share is blocked, whatever ways of sharing its code has."""
    model, plans = found.description, found.rank_plans
    assert model.code is not None, "a model that was built has code"
    modes = model.code.shard_modes
    verdict = distributed(model.architecture, modes, has_vision=model.vision is not None)
    if plans and all(plan.reason for plan in plans):
        verdict = replace(verdict, support=Support.BLOCKED, reason=plans[0].reason)
    return document.DistributedCheck(
        **asdict(verdict),
        modes=list(modes),
        shares=[_share(plan, kv_budget_bytes) for plan in plans],
    )


def _share(plan: RankPlan, kv_budget_bytes: int) -> document.RankShare:
    if plan.reason:
        return document.RankShare(mode=plan.mode.value, ranks=plan.ranks, reason=plan.reason)
    return document.RankShare(
        mode=plan.mode.value,
        ranks=plan.ranks,
        weights_bytes=plan.weights_bytes,
        memory_bytes=plan.weights_bytes + plan.working_bytes + kv_budget_bytes,
    )


def _quantization(found: ModelInspection) -> document.QuantizationReport | None:
    stored = found.stored_as
    if stored is None:
        return None
    return document.QuantizationReport(
        mode=stored.mode,
        bits=stored.bits,
        group_size=stored.group_size,
        native=found.native_modes.get(stored.mode, False),
        kept=found.description.quantization is not None,
    )


def _tensor_type(found: TensorType) -> document.TensorTypeReport:
    return document.TensorTypeReport(
        type=found.name,
        tensors=found.tensors,
        stored_bytes=found.stored_bytes,
        held_as=list(found.held_as),
        held_bytes=found.held_bytes,
        exact=found.is_exact,
    )


def _chat_template(abilities: TemplateAbilities) -> document.ChatTemplateReport:
    tags = abilities.reasoning_tags
    return document.ChatTemplateReport(
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
