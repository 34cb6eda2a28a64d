"""The dtype of a model's weights in memory, and their size in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.device import backend_name
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.kernels.native_layers import has_native_product, is_native
from machd.engine.kernels.packed_weights import is_left_to_kernels
from machd.engine.loading.formats.opened import BuiltModel, Opened, weights_bytes
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.weight_formats import (
    Quantization,
    can_quantise,
    quantization_of,
    weight_format,
)
from machd.errors import ModelMemoryError, SettingsError

_DTYPES: Mapping[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
_FLOAT32_SHARE = 0.6
"""Share of the available memory that float32 weights may take on the CPU; the rest is for KV."""

_ONLY_FLOAT32 = (
    "model.dtype: mlx multiplies experts in float32 only on the CPU, not in {}; leave model.dtype at auto, "
    "or set model.quantize for fewer bytes"
)

_GIB = 1024**3


def choose_dtype(
    requested: str,
    *,
    backend: str,
    parameters: int,
    available_bytes: int,
    float32_bytes: int | None = None,
) -> mx.Dtype | None:
    """Choose the dtype of the weights in memory; None keeps them as they are stored.

    ``auto`` keeps them on a GPU. On the CPU it takes float32 where that fits: there a quantised
    product of mlx's costs the same for every row of a batch, and 16-bit ones gain little. Layers that
    machd computes itself compute in float32 with their weights as they are stored; see :func:`native_layers`.

    A named dtype (``float32``, ``float16``, ``bfloat16``) dequantises.

    Args:
        requested: The setting ``model.dtype``.
        backend: ``cpu``, ``metal`` or ``cuda``.
        parameters: Number of weights.
        available_bytes: Memory that the weights may take.
        float32_bytes: Their bytes if ``auto`` computes in float32; all of them expanded unless given.

    Raises:
        ModelMemoryError: The dtype was named and does not fit.
    """
    if requested == "auto":
        if float32_bytes is None:
            float32_bytes = parameters * mx.float32.size
        fits = float32_bytes <= _FLOAT32_SHARE * available_bytes
        return mx.float32 if backend == "cpu" and fits else None
    dtype = _DTYPES[requested]
    refuse_if_too_big(parameters * dtype.size, available_bytes, what=f"the weights in {requested}")
    return dtype


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """The layers under a path that machd's own kernels compute in float32, perhaps with their weights as stored."""

    within: str = ""
    as_stored: bool = True

    def __call__(self, path: str) -> bool:
        """Return True for the path of a layer that may be computed so."""
        return path.startswith(self.within)


def native_layers(requested: str, within: str = "") -> NativeLayers | None:
    """Return which layers machd's own kernels compute, under the path ``within``; None for no layer.

    ``auto`` leaves their weights as they are stored, float32 unpacks them.
    """
    if requested not in ("auto", "float32") or native_kernels() is None:
        return None
    return NativeLayers(within, as_stored=requested == "auto")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of a model's weights as they are read.

    Attributes:
        dtype: Dtype of all floating-point weights; None changes nothing.
        quantise_to: Format that plain layers are quantised to; None to leave them plain.
        native: Which layers compute in float32 with their weights as they are stored; None for none of them.
    """

    dtype: mx.Dtype | None
    quantise_to: Quantization | None = None
    native: NativeLayers | None = None


def choose_conversion(
    opened: Opened, built: BuiltModel, settings: PlacingSettings, available_bytes: int
) -> Conversion:
    """Choose the conversion of a model without experts on disk, whole or sharded.

    Raises:
        ModelMemoryError: The dtype was named and does not fit.
        SettingsError: The model cannot be quantised so, or its experts cannot be computed in the dtype.
    """
    # machd's own layers cannot be cut.
    is_cut = settings.sharding is not None
    native = None if is_cut else native_layers(settings.dtype, built.native_path)

    def choose(quantise_to: Quantization | None) -> mx.Dtype | None:
        return model_dtype(
            built.model,
            settings.dtype,
            quantise_to,
            backend=backend_name(),
            available_bytes=available_bytes,
            native=native,
        )

    keeps_stored = native is not None and native.as_stored
    is_unpacked = opened.is_repacked and not keeps_stored and choose(None) is not None
    packed = None if is_unpacked else quantization_of(built.model)
    quantise_to = weight_format(settings.quantize, packed)
    dtype = choose(quantise_to)
    if dtype is None:
        opened.keep_as_stored(built.model)
    return Conversion(dtype, quantise_to, native)


def model_dtype(
    model: Module,
    requested: str,
    quantise_to: Quantization | None,
    *,
    backend: str,
    available_bytes: int,
    native: NativeLayers | None = None,
) -> mx.Dtype | None:
    """Choose the dtype of a model's weights as :func:`choose_dtype`, and one that its experts can compute in.

    It may not fit: where experts leave no choice but float32, the caller compares the sizes.

    mlx's ``gather_mm``, which multiplies tokens with plain experts, computes float32 only on the CPU. Experts that
    machd multiplies itself compute in float32, too, and keep their weights as they are stored.

    Raises:
        ModelMemoryError: The dtype was named and does not fit.
        SettingsError: The experts cannot be computed in the dtype that was named.
    """
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: PLC0415
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415

    parameters = int(get_total_parameters(model))
    dtype = choose_dtype(
        requested,
        backend=backend,
        parameters=parameters,
        available_bytes=available_bytes,
        float32_bytes=held_bytes(model, mx.float32, native),
    )
    if backend != "cpu" or dtype is mx.float32:
        return dtype

    def is_expanded(layer: Module) -> bool:
        return dtype is not None or is_left_to_kernels(layer)

    stay_plain = any(
        (
            isinstance(one, SwitchLinear)
            or (isinstance(one, QuantizedSwitchLinear) and is_expanded(one))
        )
        and (quantise_to is None or not can_quantise(model, path, one, quantise_to))
        for path, one in model.named_modules()
    )
    if not stay_plain:
        return dtype
    if dtype is not None:
        raise SettingsError([_ONLY_FLOAT32.format(requested)])
    return mx.float32


def refuse_if_too_big(
    needed_bytes: int, available_bytes: int, *, what: str = "the weights"
) -> None:
    """Refuse to take more memory than is available.

    Raises:
        ModelMemoryError: More is needed than available.
    """
    if needed_bytes > available_bytes:
        raise ModelMemoryError(
            f"{what} need {needed_bytes / _GIB:.2f} GiB and {available_bytes / _GIB:.2f} GiB are "
            "available; take a smaller or more strongly quantised model, or free some memory"
        )


def dtype_name(dtype: mx.Dtype) -> str:
    """Name a dtype as the setting ``model.dtype`` does."""
    return str(dtype).removeprefix("mlx.core.")


def computed_dtype(model: Module) -> str:
    """Name the floating-point dtype of most of the weights, or of their scales."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        for array in module.values():
            if isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating):
                computed = mx.float32 if is_native(module) else array.dtype
                sizes[dtype_name(computed)] += array.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def held_bytes(model: Module, dtype: mx.Dtype, native: NativeLayers | None) -> int:
    """Return the bytes of a model's weights in a dtype, before they are converted.

    Args:
        model: Lazily built.
        dtype: Dtype of all weights; under float32 some may stay as stored.
        native: As of :class:`Conversion`.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    expanded_bytes = int(get_total_parameters(model)) * dtype.size
    if native is None or not native.as_stored or dtype is not mx.float32:
        return expanded_bytes
    saved_bytes = 0
    for path, module in model.named_modules():
        if native(path) and has_native_product(module):
            weight = module["weight"]
            expanded = weight.size * 32 // module.bits if "scales" in module else weight.size
            saved_bytes += expanded * mx.float32.size - weights_bytes(module)
    return expanded_bytes - saved_bytes
