"""The description of a model that is built, as serve publishes it and check reports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx.nn.layers.base import Module

from machd.engine.backend.device import backend_name, device_memory_bytes, device_name
from machd.engine.experts.banked_model import BankedModel
from machd.engine.kernels.batchable import make_batchable
from machd.engine.kernels.native_attention import is_native_model
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.loading.cache_facts import MeasuredModel, measure_model
from machd.engine.loading.formats.opened import weights_bytes
from machd.engine.loading.model_code import read_model_code
from machd.engine.loading.placing.precision import computed_dtype
from machd.engine.loading.placing.weight_formats import quantization_of
from machd.engine.protocol.engine import ModelDescription


def describe_model(  # noqa: PLR0913 - one argument for each fact of files and settings
    model: Module,
    *,
    model_id: str,
    architecture: str,
    context_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
    blas: str | None = None,
    kv_format: KvFormat = PLAIN,
    own_files: Sequence[Path] = (),
    experts: BankedModel | None = None,
    traced: MeasuredModel | None = None,
) -> ModelDescription:
    """Repair a model's layers for batches where they need it, and measure it on a short prompt.

    Args:
        model: In memory; one that was repaired and traced is not computed.
        model_id: The name that requests use.
        architecture: The library's name of it.
        context_tokens: Positions that prompt and completion share.
        eos_token_ids: Tokens that end a completion.
        blas: Name of the CPU's BLAS.
        kv_format: Format of keys and values in the caches.
        own_files: The checkpoint's own Python files that may have run.
        experts: Its experts on disk; None if all are in memory.
        traced: What a trace found; None to repair and measure the model.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    if traced is None:
        make_batchable(model)
    measured = traced or measure_model(model, kv_format)
    backend, quantization = backend_name(), quantization_of(model)
    banked_parameters = 0 if experts is None else experts.parameters
    banked_bytes = 0 if experts is None else experts.bank.capacity_bytes
    return ModelDescription(
        model_id=model_id,
        architecture=architecture,
        context_tokens=context_tokens,
        vocabulary_tokens=measured.logits_tokens,
        parameters=int(get_total_parameters(model)) + banked_parameters,
        weights_bytes=weights_bytes(model) + banked_bytes,
        dtype=computed_dtype(model),
        quantization=None if quantization is None else str(quantization),
        backend=backend,
        blas=blas if backend == "cpu" else None,
        eos_token_ids=eos_token_ids,
        cache=measured.cache,
        created_unix_s=0,
        device_memory_bytes=device_memory_bytes(),
        device_name=device_name(),
        code=read_model_code(model, measured.cache, own_files),
        is_native=is_native_model(model, measured.head_dims),
        experts_on_disk=experts is not None,
    )
