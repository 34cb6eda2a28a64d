"""Inspection of an encoder without its weights: it is built as the loader does it, and nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from machd.engine.backend.device import available_memory_bytes, backend_name
from machd.engine.backend.inspection_bounds import bounded
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.encoder_model import build_encoder
from machd.engine.encoding.loading import describe_encoder, encoder_needs, parameter_count
from machd.engine.loading.placing.precision import choose_dtype, dtype_name
from machd.engine.loading.placing.weight_formats import Quantization, quantization_of
from machd.engine.protocol.engine import ModelDescription

_BUILD_LIMIT_S = 15.0
_BUILD_MEMORY_BYTES = 1 << 30
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class EncoderInspection:
    """An encoder as its files describe it, and as it would be on this machine.

    Attributes:
        description: What serve would publish.
        stored_bytes: Size of the tensors on disk, without those of dense layers.
        working_bytes: An estimate of the memory that a pass takes beside weights.
        available_bytes: The part of the device's memory that could be taken now.
        stored_as: Packing of the weights as stored; None when they are plain.
        notes: Warnings for the report.
    """

    description: ModelDescription
    stored_bytes: int
    working_bytes: int
    available_bytes: int
    stored_as: Quantization | None
    notes: tuple[str, ...]


def inspect_encoder(files: EncoderFiles, *, model_id: str, dtype: str) -> EncoderInspection:
    """Build an encoder with weights that are never read.

    Args:
        files: As they were read.
        model_id: The name that requests use.
        dtype: ``model.dtype``.

    Raises:
        ModelError: One of its kinds: the error that serving the model would raise, but for damaged weights and too little memory.
    """
    import_mlx_lm()
    available_bytes = available_memory_bytes()
    with bounded("building the model", seconds=_BUILD_LIMIT_S, memory_bytes=_BUILD_MEMORY_BYTES):
        model = build_encoder(files)
    to = choose_dtype(
        dtype,
        backend=backend_name(),
        parameters=parameter_count(model),
        # A dtype that the settings name is reported with its size, not refused.
        available_bytes=available_bytes if dtype == "auto" else _NO_LIMIT_BYTES,
    )
    needs = encoder_needs(files, model, to)
    description = describe_encoder(files, model, model_id)
    description = replace(description, weights_bytes=needs.weights_bytes)
    if to is not None:
        description = replace(description, dtype=dtype_name(to), quantization=None)
    return EncoderInspection(
        description=description,
        stored_bytes=files.checkpoint.stored_bytes,
        working_bytes=needs.working_bytes,
        available_bytes=available_bytes,
        stored_as=quantization_of(model.module),
        notes=files.notes,
    )
