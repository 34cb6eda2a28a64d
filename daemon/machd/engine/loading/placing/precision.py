"""The dtype of a model's weights, and their conversion without twice the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.native_layers import (
    has_native_product,
    is_native,
    take_native,
)
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelMemoryError, SettingsError

_DTYPES: Mapping[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
_FLOAT32_SHARE = 0.6
"""Share of the available memory that float32 weights may take on the CPU; the rest is for KV."""

_MAX_CACHED_BYTES = 64 << 20
"""Freed memory that mlx may keep for reuse while weights are loaded; stored weights would add up in it."""

_TRIAL_TOLERANCE = 1e-2

_ONLY_FLOAT32 = (
    "model.dtype: mlx multiplies experts in float32 only on the CPU, not in {}; leave model.dtype at auto, "
    "or set model.quantize for fewer bytes"
)

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Quantization:
    """The packing of a layer's weights.

    Attributes:
        mode: ``affine``, ``mxfp4``, ``nvfp4`` or ``mxfp8``.
        group_size: Weights that share a scale.
    """

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, group {self.group_size}"


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
        available_bytes: Memory that they may take.
        float32_bytes: What they take if ``auto`` computes in float32; all of them expanded unless given.

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


LANGUAGE_PATH = "language_model."
"""Path of the language model inside one that takes images."""


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """The layers that machd's own kernels compute, in float32.

    Attributes:
        within: The part of the model where they are, by its path; empty for the whole.
        as_stored: Their weights stay as they are stored.
    """

    within: str = ""
    as_stored: bool = True

    def __call__(self, path: str) -> bool:
        """Return True for the path of a layer that may be computed so."""
        return path.startswith(self.within)


def native_layers(requested: str, within: str = "") -> NativeLayers | None:
    """Return which layers machd's own kernels compute; None for no layer.

    Args:
        requested: The setting ``model.dtype``: ``auto`` leaves their weights as they are stored, float32 unpacks them.
        within: The part of the model that may be computed so, by its path; the whole of it unless given.
    """
    if requested not in ("auto", "float32") or native_kernels() is None:
        return None
    return NativeLayers(within, as_stored=requested == "auto")


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

    Args:
        model: Lazily loaded.
        requested: The setting ``model.dtype``.
        quantise_to: Format that plain layers are quantised to.
        backend: ``cpu``, ``metal`` or ``cuda``.
        available_bytes: Memory that the weights may take.
        native: As of :func:`materialise`.

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
    experts = SwitchLinear if dtype is None else (SwitchLinear, QuantizedSwitchLinear)
    stay_plain = any(
        isinstance(one, experts)
        and (quantise_to is None or not _can_quantise(model, path, one, quantise_to))
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
    """Compare two sizes before memory is taken.

    Raises:
        ModelMemoryError: More is needed than available.
    """
    if needed_bytes > available_bytes:
        raise ModelMemoryError(
            f"{what} need {needed_bytes / _GIB:.2f} GiB and {available_bytes / _GIB:.2f} GiB are "
            "available; take a smaller or more strongly quantised model, or free some memory"
        )


WEIGHT_FORMATS: Mapping[str, Quantization] = {
    "affine8": Quantization("affine", 8, 64),
    "affine4": Quantization("affine", 4, 64),
    "affine2": Quantization("affine", 2, 64),
    "mxfp8": Quantization("mxfp8", 8, 32),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "nvfp4": Quantization("nvfp4", 4, 16),
}
"""The values of ``model.quantize``, with the group sizes that mlx-lm uses."""


def weight_format(name: str | None, model: Module) -> Quantization | None:
    """Return the format that ``model.quantize`` names; None without it.

    Raises:
        SettingsError: The model is quantised already, or the backend cannot compute in this format.
    """
    if name is None:
        return None
    wanted = WEIGHT_FORMATS[name]
    if (stored := quantization_of(model)) is not None:
        problem = f"the model is quantised already ({stored})"
    elif not multiplies(wanted):
        problem = f"mlx does not compute {wanted} on {mx.default_device().type.name}"
    else:
        return wanted
    raise SettingsError([f"model.quantize: {problem}; leave {name} out, or take another format"])


def multiplies(quantization: Quantization) -> bool:
    """Tell whether two rows times 64 x 64 packed weights give the right product here.

    Takes a millisecond. The right product is that of the unpacked weights.
    """
    group, bits, mode = quantization.group_size, quantization.bits, quantization.mode
    plain = mx.sin(mx.arange(64 * 64, dtype=mx.float32)).reshape(64, 64)
    rows = mx.cos(mx.arange(2 * 64, dtype=mx.float32)).reshape(2, 64)
    try:
        weight, scales, *rest = mx.quantize(plain, group, bits, mode)
        biases = rest[0] if rest else None
        product = mx.quantized_matmul(
            rows, weight, scales, biases, transpose=True, group_size=group, bits=bits, mode=mode
        )
        unpacked = mx.dequantize(weight, scales, biases, group, bits, mode, dtype=mx.float32)
        difference = mx.abs(product - rows @ unpacked.T).max().item()
    except (RuntimeError, ValueError, TypeError):
        return False  # mlx has no kernel for it here
    return isinstance(difference, float) and difference < _TRIAL_TOLERANCE


def materialise(
    model: Module,
    dtype: mx.Dtype | None,
    progress: LoadProgress,
    quantise_to: Quantization | None = None,
    native: NativeLayers | None = None,
) -> None:
    """Load the weights of a lazily loaded model module by module, converting them on the way.

    A module's stored weights are dropped before the next module's are read, so that memory holds
    the converted model and one module more.

    Args:
        model: Its parameters are replaced in place.
        dtype: Dtype of all floating-point weights; None changes nothing. A model with a quantised
            layer of a kind unknown to machd stays as stored.
        progress: Advanced by the bytes of each module as stored.
        quantise_to: Format that plain layers are quantised to; None to leave them plain.
        native: Which layers compute in float32 with their weights as they are stored; none of them unless given.
    """
    for stored_bytes, module in _converted(model, dtype, quantise_to, native):
        mx.eval(module.parameters())
        progress.advance(stored_bytes)
        if mx.get_cache_memory() > _MAX_CACHED_BYTES:
            mx.clear_cache()
    mx.eval(model.parameters())
    mx.clear_cache()


def hold_in(
    model: Module,
    dtype: mx.Dtype | None,
    quantise_to: Quantization | None = None,
    native: NativeLayers | None = None,
) -> None:
    """Give the weights the shapes and dtypes that :func:`materialise` would, and compute nothing."""
    for _ in _converted(model, dtype, quantise_to, native):
        pass


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


def weights_bytes(module: Module) -> int:
    """Sum the sizes of a module's parameters, computed or not yet."""
    return sum(array.nbytes for array in _arrays(module))


def quantization_of(model: Module) -> Quantization | None:
    """Find the packing of most of the quantised layers; None when all weights are plain."""
    kinds: Counter[Quantization] = Counter()
    for _, module in model.named_modules():
        if "scales" in module and hasattr(module, "bits"):
            mode = str(getattr(module, "mode", "affine"))
            kinds[Quantization(mode, int(module.bits), int(module.group_size))] += 1
    return kinds.most_common(1)[0][0] if kinds else None


def _arrays(module: Module) -> list[mx.array]:
    flat = tree_flatten(module.parameters())
    assert isinstance(flat, list)
    return [array for _, array in flat]


def held_bytes(model: Module, dtype: mx.Dtype, native: NativeLayers | None) -> int:
    """Return what a model's weights take in a dtype, before they are converted.

    Args:
        model: Lazily loaded.
        dtype: Of all weights, but in float32 those that may stay as they are stored.
        native: As of :func:`materialise`.
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


def _converted(
    model: Module,
    dtype: mx.Dtype | None,
    quantise_to: Quantization | None,
    native: NativeLayers | None,
) -> Iterator[tuple[int, Module]]:
    """Convert a model leaf by leaf; yields the stored bytes of each, and the leaf to be computed."""
    flat = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    assert isinstance(flat, list)
    known = _plain_makers()
    if any("scales" in module and type(module) not in known for _, module in flat):
        dtype = None  # machd cannot undo such a packing
    if dtype is not mx.float32:
        native = None
    kept_paths = set[str]()
    leaves = flat[::-1]
    del flat
    while leaves:
        # Removed from the list, so that nothing holds the stored weights when they are replaced.
        path, module = leaves.pop()
        stored_bytes = weights_bytes(module)
        is_quantised = quantise_to is not None and _can_quantise(model, path, module, quantise_to)
        is_native_here = native is not None and native(path)
        if dtype is not None:
            stays = is_native_here and native is not None and native.as_stored
            stays = stays and not is_quantised and has_native_product(module)
            module = _in_dtype(model, path, module, dtype, stays=stays)
        if quantise_to is not None and is_quantised:
            module = module.to_quantized(quantise_to.group_size, quantise_to.bits, quantise_to.mode)
            model.update_modules(tree_unflatten([(path, module)]))
        if is_native_here and take_native(module):
            kept_paths.add(path)
        yield stored_bytes, module
    if dtype is not None:
        # Parameters of a module that has children are in no leaf.
        _cast(model, dtype, "", model, kept_paths)


def _in_dtype(model: Layer, path: str, module: Layer, dtype: mx.Dtype, *, stays: bool) -> Layer:
    """Give a leaf's parameters the dtype, unpacked; of one whose weights stay as they are stored, the bias alone."""
    make = _plain_makers().get(type(module))
    if stays:
        if "bias" in module:
            module.bias = module.bias.astype(dtype)
    elif make is not None:
        module = _dequantised(module, make, dtype)
        model.update_modules(tree_unflatten([(path, module)]))
    else:
        _cast(module, dtype, path, model)
    return module


def _can_quantise(model: Layer, path: str, module: Layer, quantise_to: Quantization) -> bool:
    """Return True for a layer that has a quantised form, unless the model excludes it."""
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % quantise_to.group_size:
        return False
    wants = getattr(model, "quant_predicate", None)
    return wants is None or wants(path, module) is not False


def _plain_makers() -> Mapping[type, Callable[[mx.array], Layer]]:
    """Map each quantised layer's class to a function that makes a plain layer in a weight's shape.

    The plain layer has no bias, and lazy weights that are replaced before anything computes them.
    """
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear  # noqa: PLC0415
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: PLC0415

    # mlx-lm's layers take their sizes in the reverse order of their weight's shape.
    return {
        QuantizedLinear: lambda weight: Linear(weight.shape[1], weight.shape[0], bias=False),
        QuantizedEmbedding: lambda weight: Embedding(*weight.shape),
        QuantizedSwitchLinear: lambda weight: SwitchLinear(*weight.shape[::-1], bias=False),
        QuantizedMultiLinear: lambda weight: MultiLinear(*weight.shape[::-1]),
    }


def _dequantised(module: Layer, make: Callable[[mx.array], Layer], dtype: mx.Dtype) -> Layer:
    is_affine = module.mode == "affine"
    # float32 scales keep the product exact; the scales of the other modes are exponents.
    scales = module.scales.astype(mx.float32) if is_affine else module.scales
    biases = module.biases.astype(mx.float32) if is_affine else None
    weight = mx.dequantize(
        module.weight,
        scales,
        biases,
        module.group_size,
        module.bits,
        module.mode,
        global_scale=module.get("global_scale"),
        dtype=None if is_affine else mx.float32,
    ).astype(dtype)
    plain = make(weight)
    plain.weight = weight
    if "bias" in module:
        plain.bias = module.bias.astype(dtype)
    return plain


def _cast(
    module: Module,
    dtype: mx.Dtype,
    path: str,
    model: Module,
    kept_paths: Collection[str] = (),
) -> None:
    """Give a module's floating-point parameters the dtype, except those that the model wants kept, and those of some layers."""
    may_cast = getattr(model, "cast_predicate", None)
    prefix = f"{path}." if path else ""

    def cast(name: str, array: mx.array) -> mx.array:
        stays = may_cast is not None and dtype != mx.float32 and not may_cast(prefix + name)
        stays = stays or (prefix + name).rpartition(".")[0] in kept_paths
        if stays or not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype(dtype)

    module.update(tree_map_with_path(cast, module.parameters()))
