"""The result of ``machd check MODEL`` as a table of 80 columns, without colour in a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType
from rich.text import Text

from machd.capabilities.evidence import Evidence
from machd.capabilities.verdict import Support, Verdict
from machd.cli.check_document import (
    ChatTemplateReport,
    DistributedCheck,
    ExpertsReport,
    ModelCheck,
    QualityReport,
    RankShare,
    RerankerReport,
    TensorTypeReport,
    VisionReport,
)
from machd.cli.ctl_text import print_lines
from machd.engine.backend.model_files import shortened
from machd.served.capabilities import SpeculationReport

_GB = 1_000_000_000
_SYSTEM_MESSAGES = {
    "anywhere": "anywhere",
    "first": "first, later ones as the user's",
    "none": "as the user's",
}
_STYLES = {
    "fits": "bold green",
    "tight": "bold yellow",
    "wont_fit": "bold red",
    "supported": "green",
    "unknown": "yellow",
    "blocked": "red",
    "yes": "green",
    "no": "yellow",
}


def print_check(check: ModelCheck) -> None:
    """Write one line for each thing that was found; long ones are folded under themselves."""
    print_lines(_lines(check))


def _lines(check: ModelCheck) -> Iterator[tuple[str, Text]]:
    yield "model", Text(f"{check.model} ({check.architecture}, {_parameters(check.parameters)})")
    yield from _reranker_lines(check.reranker)
    yield "memory", _marked(check.fit.verdict, check.fit.reason)
    yield "weights", Text(_weights(check))
    for one in check.tensor_types or ():
        yield f"  {one.type}", Text(_tensor_type(one))
    if check.quantised_to is not None:
        yield "quality", Text(_quality(check.quality))
    if check.experts is not None:
        yield "experts", Text(_experts(check.experts))
    yield "KV cache", Text(_kv_cache(check))
    yield "context", Text(_context(check))
    yield from _verdict_lines(check)
    yield "chat", Text(_chat(check.chat_template))
    if check.default_sampling:
        named = ", ".join(f"{name} {value:g}" for name, value in check.default_sampling.items())
        yield "sampling", Text(f"{named} where a request says nothing")
    if check.vision is not None:
        yield "vision", _vision(check.vision)
    yield "multiplied packed", Text(_native(check))
    yield "device", Text(_device(check))
    yield "versions", Text(_versions(check))
    for note in check.notes:
        yield "note", Text(note)


def _verdict_lines(check: ModelCheck) -> Iterator[tuple[str, Text]]:
    verdicts: tuple[tuple[str, Verdict | SpeculationReport | UnsetType | None], ...] = (
        ("batching", check.continuous_batching),
        ("speculation", check.speculation),
        ("batched specdec", check.batched_specdec),
        ("prefix cache", check.prefix_cache),
        ("quantised KV", check.kv_quantization),
        ("experts on disk", check.expert_streaming if check.experts else None),
        ("chunked prefill", check.chunked_prefill),
        ("adapters", check.batched_adapters),
    )
    for label, verdict in verdicts:
        if isinstance(verdict, Verdict | SpeculationReport) and verdict.support is not UNSET:
            yield label, _marked(str(verdict.support), f"{verdict.reason}")
            # The reason of a pass has the figures; that of a failure may be a sentence.
            if isinstance(verdict.evidence, Evidence) and verdict.support is not Support.SUPPORTED:
                yield "  evidence", Text(_evidence(verdict.evidence))
    if check.bitwise is not None:
        yield "bitwise", _marked(_yes(check.bitwise.value), check.bitwise.reason)
    yield "several machines", _marked(check.distributed.support, check.distributed.reason)
    yield from _machines(check.distributed, check.fit.kv_budget_bytes)


def _marked(verdict: str, reason: str) -> Text:
    return Text.assemble((verdict, _STYLES.get(verdict, "")), f": {reason}")


def _evidence(evidence: Evidence) -> str:
    return (
        f"token mismatches {evidence.token_mismatches}, largest log-probability difference "
        f"{evidence.max_logprob_diff:.2g} nats, noise floor {evidence.noise_floor:.2g}, "
        f"cases {evidence.cases}"
    )


def _weights(check: ModelCheck) -> str:
    stored = check.quantization
    kind = (
        "plain" if stored is None else f"{stored.mode} {stored.bits}-bit, group {stored.group_size}"
    )
    if check.tensor_types:
        kind = ", ".join(one.type for one in check.tensor_types)
    held = f"{_gb(check.weights_bytes)} in {check.versions.dtype}"
    if check.quantised_to is not None:
        held = f"{_gb(check.weights_bytes)} as {check.quantised_to}"
    if stored is not None and stored.kept:
        held = f"{_gb(check.weights_bytes)}, kept packed"
    return f"{_gb(check.stored_bytes)} on disk ({kind}), {held} in memory"


def _tensor_type(found: TensorTypeReport) -> str:
    """At most one line; what rounds is said, what keeps the file's own numbers is not."""
    count = f"{found.tensors:,} {'tensor' if found.tensors == 1 else 'tensors'}"
    if not found.held_as:
        return f"{count}, {_gb(found.stored_bytes)}: not in memory"
    rounded = "" if found.exact else ", rounded"
    forms = " or ".join(found.held_as)
    return f"{count}, {_gb(found.stored_bytes)}: {forms}, {_gb(found.held_bytes)}{rounded}"


def _quality(quality: QualityReport | None) -> str:
    if quality is None:
        return "`--measure` tells what the format costs, as perplexity of a fixed text"
    ratio = quality.perplexity / quality.unquantised_perplexity
    return (
        f"perplexity {quality.perplexity:.2f} of a fixed text, {ratio:.2f} times the"
        f" {quality.unquantised_perplexity:.2f} of the weights as they are"
    )


def _experts(experts: ExpertsReport) -> str:
    text = f"{experts.count:,}, {_gb(experts.bytes)} in memory; all other weights, {_gb(experts.other_bytes)}"
    if experts.on_disk:
        share = experts.bank_bytes / experts.bytes
        return f"{text}; the experts are on disk, {_gb(experts.bank_bytes)} ({share:.0%}) of them in memory"
    return f"{text}; with `--streaming` experts stay on disk and weights take {_gb(experts.streaming_bytes)}"


def _kv_cache(check: ModelCheck) -> str:
    layers = ", ".join(f"{count} {name}" for name, count in (check.layers or {}).items())
    inside = "" if isinstance(check.nested, UnsetType) else f" of {', '.join(check.nested)}"
    cost = f"{check.bytes_per_token:,} bytes a token"
    if check.bytes_per_sequence:
        cost += f" and {check.bytes_per_sequence:,} a sequence"
    return f"{check.kv_cache_kind} ({layers}{inside}); {cost}"


def _context(check: ModelCheck) -> str:
    text = (
        f"{check.context_tokens:,} tokens; the KV budget of {_gb(check.fit.kv_budget_bytes)} allows "
        f"one sequence {check.budget_context_tokens:,}"
    )
    if check.fitting_context_tokens < check.budget_context_tokens:
        text += f", the device's memory {check.fitting_context_tokens:,}"
    return text


def _chat(template: ChatTemplateReport) -> str:
    if template.reason is not None:
        return template.reason
    parts = [
        f"system messages {_SYSTEM_MESSAGES[template.system_messages]}",
        f"tools {_tools(template)}",
        f"reasoning {_reasoning(template)}",
    ]
    return "; ".join(parts)


def _tools(template: ChatTemplateReport) -> str:
    if not template.tools:
        return "no"
    if template.tool_format is None:
        return "shown to the model, but mlx-lm does not know how it writes calls"
    return f"yes ({template.tool_format})"


def _reasoning(template: ChatTemplateReport) -> str:
    if template.reasoning_tags is None:
        return "no"
    switch = ", switched by enable_thinking" if template.reasoning_switch else ""
    return f"yes ({' … '.join(template.reasoning_tags)}{switch})"


def _reranker_lines(reranker: RerankerReport | None) -> Iterator[tuple[str, Text]]:
    """Texts of the files are quoted, so that none of their characters is taken for one of the terminal's."""
    if reranker is None:
        return
    yield "kind", Text("scores documents (a reranker that generates), and generates text")
    prompt = "its chat template" if reranker.prompt == "chat_template" else "Qwen3-Reranker"
    tokens = f"{reranker.true_token!r} against {reranker.false_token!r}"
    yield "scores", Text(f"{tokens}, with the prompt of {prompt}")
    yield "  instruction", Text(shortened(repr(reranker.instruction)))


def _machines(distributed: DistributedCheck, kv_budget_bytes: int) -> Iterator[tuple[str, Text]]:
    """Tell what each machine needs beside its KV cache, by their number, cut in the first way that works."""
    shares: dict[int, RankShare] = {}
    for share in distributed.shares:
        if share.memory_bytes is not None:
            shares.setdefault(share.ranks, share)
    for ranks in sorted(shares):
        need = _gb((shares[ranks].memory_bytes or 0) - kv_budget_bytes)
        yield (
            f"  {ranks} machines",
            Text(f"each needs {need} and its KV cache, cut by {shares[ranks].mode}"),
        )


def _vision(vision: VisionReport) -> Text:
    if not vision.served:
        return _marked("no", vision.reason or "")
    side = vision.example_pixels
    return _marked(
        "yes",
        f"{' and '.join(vision.kinds)}, by {vision.processor}; an image of {side} x {side} pixels takes "
        f"{vision.example_tokens:,} tokens",
    )


def _native(check: ModelCheck) -> str:
    return ", ".join(f"{mode} {_yes(works)}" for mode, works in check.native_quantization.items())


def _device(check: ModelCheck) -> str:
    parts = (
        check.device.backend,
        f"{_gb(check.fit.device_memory_bytes)} ({_gb(check.fit.available_bytes)} free now)",
        check.device.blas,
        *check.device.blas_refused,
    )
    return ", ".join(part for part in parts if part)


def _versions(check: ModelCheck) -> str:
    versions = check.versions
    return f"machd {versions.machd}, mlx {versions.mlx}, mlx-lm {versions.mlx_lm}"


def _parameters(count: int) -> str:
    if count < _GB:
        return f"{count / 1_000_000:.1f} million parameters"
    return f"{count / _GB:.1f} billion parameters"


def _gb(size_bytes: int) -> str:
    """In units of 10^9 bytes, as the KV budget is given."""
    return f"{size_bytes / _GB:.2f} GB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
