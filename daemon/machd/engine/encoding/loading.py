"""Loading of an encoder: its files are opened and put into memory."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from machd.capabilities.facts import CacheFacts
from machd.capabilities.fit import MemoryNeeds
from machd.engine.backend.device import (
    available_memory_bytes,
    backend_name,
    device_memory_bytes,
    device_name,
)
from machd.engine.backend.inspection_bounds import printable
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.encoder_model import EncoderModel, build_encoder, parameters_of
from machd.engine.encoding.mlx_encoder import MlxEncoder
from machd.engine.encoding.pass_memory import pass_bytes
from machd.engine.encoding.weights import refuse_not_finite
from machd.engine.loading.loader import MemoryShare
from machd.engine.loading.placing.precision import (
    Conversion,
    choose_dtype,
    computed_dtype,
    refuse_if_too_big,
)
from machd.engine.loading.placing.weight_formats import quantization_of
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.encoder import Encoder, EncoderInput
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelFormatError

_WORKING_TOKENS = 2048
"""Tokens of a pass, for the estimate of working memory."""


def load_encoder(  # noqa: PLR0913 - one argument for each fact of settings and machine
    files: EncoderFiles,
    *,
    model_id: str,
    dtype: str,
    blas: str | None,
    blas_refused: tuple[str, ...],
    progress: LoadProgress,
    share: MemoryShare | None,
) -> Encoder:
    """Load and describe an encoder; the calling thread has to be the one that computes.

    Args:
        files: As they were read.
        model_id: The name that requests use.
        dtype: ``model.dtype``.
        blas: Name of the CPU's BLAS.
        blas_refused: Libraries that multiply wrongly.
        progress: Told of stages and bytes.
        share: Of a model among others; asked before weights are read.

    Raises:
        ModelError: One of its kinds; nothing is left in memory.
    """
    limit_bytes = None if share is None else share.limit_bytes
    model = build_encoder(files)
    available_bytes = available_memory_bytes() if limit_bytes is None else limit_bytes
    to = choose_dtype(
        dtype,
        backend=backend_name(),
        parameters=parameter_count(model),
        available_bytes=available_bytes,
    )
    if share is not None:
        share.wait(encoder_needs(files, model, to))
    refuse_if_too_big(weights_bytes_in(model, to), available_bytes)
    progress.stage("loading the weights", files.checkpoint.stored_bytes)
    for module in model.modules:
        materialise(module, Conversion(to), progress)
        refuse_not_finite(module)
    description = describe_encoder(files, model, model_id)
    blas = blas if description.backend == "cpu" else None
    description = replace(description, blas=blas, blas_refused=blas_refused)
    encoder = MlxEncoder(files, model, description)
    progress.stage("trying the model", None)
    _try(encoder, files)
    return encoder


def _try(encoder: MlxEncoder, files: EncoderFiles) -> None:
    """Compute one text of one token: values of ``config.json`` that no class looks at fail here, and not under a request.

    Raises:
        ModelFormatError: It fails, or gives no numbers.
    """
    try:
        made = encoder.encode([EncoderInput((0,))])
        is_finite = bool(np.isfinite(np.frombuffer(made.content, np.float32)).all())
        problem = "" if is_finite else "NaN comes of a text"
    except Exception as error:  # noqa: BLE001 - of the library's layers
        problem = printable(error)
    if problem:
        raise ModelFormatError(f"{files.checkpoint.path.name} cannot be computed: {problem}")


def describe_encoder(files: EncoderFiles, model: EncoderModel, model_id: str) -> ModelDescription:
    """Describe an encoder; nothing is computed."""
    quantization = quantization_of(model.module)
    return ModelDescription(
        model_id=model_id,
        architecture=files.checkpoint.model_type,
        context_tokens=files.description.max_input_tokens,
        vocabulary_tokens=model.vocabulary_tokens,
        parameters=parameter_count(model),
        weights_bytes=weights_bytes_in(model, None),
        dtype=computed_dtype(model.module),
        quantization=None if quantization is None else str(quantization),
        backend=backend_name(),
        blas=None,
        eos_token_ids=frozenset(),
        cache=CacheFacts((), 0, 0),
        created_unix_s=int(files.checkpoint.weight_files[0].stat().st_mtime),
        device_memory_bytes=device_memory_bytes(),
        device_name=device_name(),
        encoder=files.description,
    )


def encoder_needs(files: EncoderFiles, model: EncoderModel, dtype: mx.Dtype | None) -> MemoryNeeds:
    """Return the memory that an encoder takes in a dtype; None for the dtypes as they are."""
    tokens = min(files.description.max_input_tokens, _WORKING_TOKENS)
    rows = max(1, _WORKING_TOKENS // tokens)
    return MemoryNeeds(
        weights_bytes=weights_bytes_in(model, dtype),
        working_bytes=pass_bytes(files.checkpoint.config, rows, tokens),
        kv_budget_bytes=0,
        bytes_per_token=0,
        bytes_per_sequence=0,
        context_tokens=0,
    )


def parameter_count(model: EncoderModel) -> int:
    """Count the weights, unpacked."""
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    return sum(int(get_total_parameters(one)) for one in model.modules)


def weights_bytes_in(model: EncoderModel, dtype: mx.Dtype | None) -> int:
    """Return the bytes of the weights in a dtype; None for the dtypes as they are."""
    if dtype is not None:
        return parameter_count(model) * dtype.size
    return sum(one.nbytes for one in parameters_of(model).values())
