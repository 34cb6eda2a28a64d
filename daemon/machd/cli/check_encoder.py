"""``machd check MODEL`` of a model that makes vectors or labels of texts: its document and its table."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from machd.capabilities.fit import MemoryNeeds, judge_fit
from machd.capabilities.versions import Versions, installed_versions
from machd.cli.check_document import MemoryFit, QuantizationReport
from machd.cli.ctl_text import print_lines
from machd.engine.encoding.inspection import EncoderInspection
from machd.engine.loading.inspection import native_modes
from machd.engine.protocol.encoder import EncoderTask
from machd.served.capabilities import (
    Device,
    EncoderReport,
    device_of,
    encoder_report,
)

_GB = 1_000_000_000
_MAX_SHOWN_LABELS = 8
_KINDS = {
    EncoderTask.EMBED: "makes vectors of texts, and generates none",
    EncoderTask.CLASSIFY: "makes labels of texts, and generates none",
}
_RERANKER = "scores pairs of texts (a cross-encoder), and generates none"


class EncoderCheck(Struct, frozen=True, kw_only=True):
    """One encoder on one machine.

    Attributes:
        model: The name that requests would use.
        encoder: What it makes of texts, by its own files.
        weights_bytes: What the weights would take in memory.
        stored_bytes: What they take on disk.
        quantization: Null when the weights are plain.
        notes: What a person should know.
    """

    model: str
    architecture: str
    encoder: EncoderReport
    fit: MemoryFit
    parameters: int
    weights_bytes: int
    stored_bytes: int
    quantization: QuantizationReport | None = None
    device: Device
    versions: Versions
    notes: list[str]


def encoder_check(found: EncoderInspection) -> EncoderCheck:
    """Judge what was found."""
    model = found.description
    needs = MemoryNeeds(
        weights_bytes=model.weights_bytes,
        working_bytes=found.working_bytes,
        kv_budget_bytes=0,
        bytes_per_token=0,
        bytes_per_sequence=0,
        context_tokens=0,
    )
    fit = judge_fit(
        needs,
        device_memory_bytes=model.device_memory_bytes,
        available_bytes=found.available_bytes,
    )
    report = encoder_report(model.encoder)
    assert report is not None, "an encoder's"
    return EncoderCheck(
        model=model.model_id,
        architecture=model.architecture,
        encoder=report,
        fit=MemoryFit(
            verdict=fit.fit,
            reason=fit.reason,
            weights_bytes=needs.weights_bytes,
            working_bytes=needs.working_bytes,
            kv_budget_bytes=0,
            total_bytes=needs.total_bytes,
            device_memory_bytes=model.device_memory_bytes,
            available_bytes=found.available_bytes,
        ),
        parameters=model.parameters,
        weights_bytes=model.weights_bytes,
        stored_bytes=found.stored_bytes,
        quantization=_quantization(found),
        device=device_of(model),
        versions=replace(installed_versions(), backend=model.backend, dtype=model.dtype),
        notes=list(found.notes),
    )


def print_encoder_check(check: EncoderCheck) -> None:
    """Write one line for each thing that was found."""
    print_lines(_lines(check))


def _quantization(found: EncoderInspection) -> QuantizationReport | None:
    stored = found.stored_as
    if stored is None:
        return None
    return QuantizationReport(
        mode=stored.mode,
        bits=stored.bits,
        group_size=stored.group_size,
        native=native_modes().get(stored.mode, False),
        kept=found.description.quantization is not None,
    )


def _lines(check: EncoderCheck) -> Iterator[tuple[str, str]]:
    encoder = check.encoder
    is_reranker = encoder.task is EncoderTask.CLASSIFY and len(encoder.labels) == 1
    yield (
        "model",
        f"{check.model} ({check.architecture}, {check.parameters / 1e6:.1f} million parameters)",
    )
    yield "kind", _RERANKER if is_reranker else _KINDS[encoder.task]
    yield "memory", f"{check.fit.verdict}: {check.fit.reason}"
    kind = "packed" if check.quantization else "plain"
    stored = f"{check.stored_bytes / _GB:.2f} GB on disk ({kind})"
    held = f"{check.weights_bytes / _GB:.2f} GB in {check.versions.dtype} in memory"
    yield "weights", f"{stored}, {held}"
    yield from (
        _of_embedder(encoder) if encoder.task is EncoderTask.EMBED else _of_classifier(encoder)
    )
    yield (
        "length",
        f"{encoder.max_input_tokens:,} tokens, special ones included; longer texts are cut",
    )
    if encoder.prompts:
        default = f"; {encoder.default_prompt} by default" if encoder.default_prompt else ""
        yield "prompts", f"{', '.join(encoder.prompts)}{default}"
    yield "device", ", ".join(filter(None, (check.device.backend, check.device.blas)))
    for note in check.notes:
        yield "note", note


def _of_embedder(encoder: EncoderReport) -> Iterator[tuple[str, str]]:
    length = "of length 1" if encoder.normalised else "not normalised"
    yield "vectors", f"{encoder.dimensions} numbers, {length}, pooling {encoder.pooling}"
    shorter = (
        "vectors may be cut" if encoder.shorter_vectors else "the checkpoint says nothing of it"
    )
    yield "shorter vectors", shorter


def _of_classifier(encoder: EncoderReport) -> Iterator[tuple[str, str]]:
    shown = ", ".join(encoder.labels[:_MAX_SHOWN_LABELS])
    more = " and more" if len(encoder.labels) > _MAX_SHOWN_LABELS else ""
    yield "labels", f"{len(encoder.labels)}: {shown}{more}"
    yield "activation", str(encoder.activation)
