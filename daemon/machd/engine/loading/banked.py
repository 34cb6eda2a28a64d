"""Load a model with its experts on disk: a bank for the experts, all other weights in memory."""

from __future__ import annotations

from mlx.nn.layers.base import Module

from machd.engine.backend.device import available_memory_bytes, backend_name
from machd.engine.backend.progress import LoadProgress
from machd.engine.experts.banked_model import BankedModel, open_bank
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import TensorOrigins, switch_layers
from machd.engine.loading.checkpoint import Checkpoint
from machd.engine.loading.precision import (
    choose_dtype,
    materialise,
    refuse_if_too_big,
    weights_bytes,
)
from machd.errors import ModelFormatError, SettingsError

_NOT_ON_CUDA = (
    "experts.resident_gb: experts on disk need memory that the CPU and the device share, which CUDA does "
    "not have; leave it out, or serve a smaller or more strongly quantised model"
)


def load_banked(
    model: Module,
    checkpoint: Checkpoint,
    origins: TensorOrigins,
    residency: Residency,
    dtype: str,
    progress: LoadProgress,
) -> BankedModel:
    """Open a bank for a model's experts, and read all other weights.

    Args:
        model: Lazily loaded; changed in place.
        checkpoint: The model's files.
        origins: Recorded while the model was built.
        residency: Memory for the experts.
        dtype: The setting ``model.dtype``, for all weights but quantised experts, which stay quantised.
        progress: Told about stages and bytes.

    Raises:
        ModelError: The memory is too small, or files cannot be read.
        SettingsError: The backend is CUDA.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    backend, available_bytes = backend_name(), available_memory_bytes()
    if backend == "cuda":
        raise SettingsError([_NOT_ON_CUDA])
    switches = [switch for _, switch in switch_layers(model)]
    experts_parameters = sum(int(get_total_parameters(one)) for one in switches)
    dense_stored_bytes = checkpoint.stored_bytes - sum(weights_bytes(one) for one in switches)
    dense_parameters = int(get_total_parameters(model)) - experts_parameters
    requested_bytes = 0 if residency.bytes == "auto" else residency.bytes
    dense_dtype = choose_dtype(
        dtype,
        backend=backend,
        parameters=dense_parameters,
        available_bytes=available_bytes - requested_bytes,
    )
    dense_bytes = dense_parameters * dense_dtype.size if dense_dtype else dense_stored_bytes
    layers = origins.stored_layers(model, dense_dtype, backend=backend)
    capacity_bytes = residency.bank_bytes(
        available_bytes=available_bytes,
        dense_bytes=dense_bytes,
        experts_bytes=sum(one.experts * one.entry_bytes for one in layers),
    )
    refuse_if_too_big(
        dense_bytes + capacity_bytes, available_bytes, what="the weights and experts.resident_gb"
    )
    banked = open_bank(model, layers, capacity_bytes=capacity_bytes, progress=progress)
    progress.stage("loading the weights", dense_stored_bytes)
    try:
        materialise(model, dense_dtype, progress)
    except RuntimeError as error:
        banked.bank.close()
        raise ModelFormatError(f"{checkpoint.path.name}: {error}") from error
    return banked
