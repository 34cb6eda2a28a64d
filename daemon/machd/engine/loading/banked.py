"""Loading of a model whose experts stay on disk: a bank for them, and all other weights in memory."""

from __future__ import annotations

from mlx.nn.layers.base import Module

from machd.engine.backend.device import available_memory_bytes, backend_name
from machd.engine.backend.progress import LoadProgress
from machd.engine.experts.origins import Origins, switch_layers
from machd.engine.experts.residency import BankedModel, Residency, open_bank, stored_layers
from machd.engine.loading.checkpoint import Checkpoint
from machd.engine.loading.precision import (
    choose_dtype,
    materialise,
    refuse_if_too_big,
    weights_bytes,
)
from machd.errors import ModelFormatError, SettingsError

_NOT_ON_CUDA = (
    "experts.resident_gb: experts on disk need memory that the program and mlx share, which CUDA's is "
    "not; leave it out, or serve a smaller or more strongly quantised model"
)


def load_banked(
    model: Module,
    checkpoint: Checkpoint,
    origins: Origins,
    residency: Residency,
    dtype: str,
    progress: LoadProgress,
) -> BankedModel:
    """Open a bank for a model's experts, and read all other weights.

    Args:
        model: Lazily loaded; changed in place.
        checkpoint: Its files.
        origins: Of its arrays.
        residency: What of the experts is to be in memory.
        dtype: As of ``choose_dtype``, for all weights but packed experts, which stay packed.
        progress: Told about stages and bytes.

    Raises:
        ModelError: The memory is too small, or files cannot be read.
        SettingsError: The device cannot compute so.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    backend, available_bytes = backend_name(), available_memory_bytes()
    if backend == "cuda":
        raise SettingsError([_NOT_ON_CUDA])
    switches = [switch for _, switch in switch_layers(model)]
    experts_parameters = sum(int(get_total_parameters(one)) for one in switches)
    dense_stored_bytes = checkpoint.stored_bytes - sum(weights_bytes(one) for one in switches)
    dense_parameters = int(get_total_parameters(model)) - experts_parameters
    asked_bytes = 0 if residency.bytes == "auto" else residency.bytes
    plain_dtype = choose_dtype(
        dtype,
        backend=backend,
        parameters=dense_parameters,
        available_bytes=available_bytes - asked_bytes,
    )
    dense_bytes = dense_parameters * plain_dtype.size if plain_dtype else dense_stored_bytes
    layers = stored_layers(model, origins, plain_dtype, backend=backend)
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
        materialise(model, plain_dtype, progress)
    except RuntimeError as error:
        banked.bank.close()
        raise ModelFormatError(f"{checkpoint.path.name}: {error}") from error
    return banked
