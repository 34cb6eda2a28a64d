"""Load a model with its experts on disk: a bank for the experts, all other weights in memory."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.device import available_memory_bytes, backend_name
from machd.engine.experts.banked_model import BankedModel, open_bank
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import TensorOrigins, expert_parameters, switch_layers
from machd.engine.loading.formats.opened import BuiltModel, Opened, weights_bytes
from machd.engine.loading.placing.precision import Conversion, choose_dtype, refuse_if_too_big
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelFormatError, SettingsError

_NOT_ON_CUDA = (
    "experts.resident_gb: experts on disk need memory that the CPU and the device share, which CUDA does "
    "not have; leave it out, or serve a smaller or more strongly quantised model"
)

_NOT_QUANTISED = (
    "model.quantize: experts on disk are computed as they are stored; leave out model.quantize or "
    "experts.resident_gb, or convert the model once with `mlx_lm.convert --quantize`"
)


@dataclass(frozen=True, slots=True)
class BankPlan:
    """Sizes in memory of a model whose experts lie in a bank.

    Attributes:
        dense_dtype: Dtype of all weights but the experts; None if they stay as stored.
        dense_bytes: Bytes of all weights but the experts.
        experts_bytes: Bytes of all experts, as the bank would hold them.
    """

    dense_dtype: mx.Dtype | None
    dense_bytes: int
    experts_bytes: int
    bank_bytes: int


def plan_bank(model: Module, residency: Residency, dtype: str, *, available_bytes: int) -> BankPlan:
    """Size a model's bank.

    Raises:
        ModelMemoryError: The dtype was named and does not fit.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    backend = backend_name()
    switches = [switch for _, switch in switch_layers(model)]
    dense_parameters = int(get_total_parameters(model))
    dense_parameters -= sum(int(get_total_parameters(one)) for one in switches)
    requested_bytes = 0 if residency.bytes == "auto" else residency.bytes
    dense_dtype = choose_dtype(
        dtype,
        backend=backend,
        parameters=dense_parameters,
        available_bytes=max(available_bytes - requested_bytes, 0),
    )
    dense_bytes = weights_bytes(model) - sum(weights_bytes(one) for one in switches)
    if dense_dtype is not None:
        dense_bytes = dense_parameters * dense_dtype.size
    experts_bytes = sum(
        parameter.nbytes * array.shape[0]
        for one in switches
        for parameter, array in expert_parameters(one, dense_dtype, backend=backend)
    )
    bank_bytes = residency.bank_bytes(
        available_bytes=available_bytes, dense_bytes=dense_bytes, experts_bytes=experts_bytes
    )
    return BankPlan(dense_dtype, dense_bytes, experts_bytes, bank_bytes)


def refuse_quantising(quantize: str | None) -> None:
    """Refuse ``model.quantize`` for a model whose experts are on disk.

    Raises:
        SettingsError: It names a format.
    """
    if quantize is not None:
        raise SettingsError([_NOT_QUANTISED])


def place_banked(
    opened: Opened,
    built: BuiltModel,
    origins: TensorOrigins,
    settings: PlacingSettings,
    residency: Residency,
    progress: LoadProgress,
) -> BankedModel:
    """Open a bank for a model's experts, and read all other weights.

    Quantised experts stay quantised, whatever the dtype.

    Raises:
        ModelError: The memory is too small, or files cannot be read.
        SettingsError: The model was to be quantised, or the backend is CUDA.
    """
    refuse_quantising(settings.quantize)
    model = built.model
    backend = backend_name()
    available_bytes = settings.limit_bytes or available_memory_bytes()
    if backend == "cuda":
        raise SettingsError([_NOT_ON_CUDA])
    plan = plan_bank(model, residency, settings.dtype, available_bytes=available_bytes)
    refuse_if_too_big(
        plan.dense_bytes + plan.bank_bytes + residency.spare_bytes,
        available_bytes,
        what="the weights, experts.resident_gb and what steps take",
    )
    switches = [switch for _, switch in switch_layers(model)]
    dense_stored_bytes = opened.checkpoint.stored_bytes - sum(
        weights_bytes(one) for one in switches
    )
    layers = origins.stored_layers(model, plan.dense_dtype, backend=backend)
    origins.release()
    banked = open_bank(model, layers, capacity_bytes=plan.bank_bytes, progress=progress)
    progress.stage("loading the weights", dense_stored_bytes)
    try:
        with opened.reading() as read:
            materialise(model, Conversion(plan.dense_dtype), progress, read)
    except ModelFormatError:
        banked.bank.close()
        raise
    return banked
