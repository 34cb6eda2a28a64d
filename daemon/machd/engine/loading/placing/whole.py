"""Put a whole model into memory, plain or quantised: layers are converted as they are read, without twice the memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from machd.engine.backend.device import available_memory_bytes
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.native_layers import has_native_product, take_native
from machd.engine.kernels.packed_weights import is_left_to_kernels, unpacked
from machd.engine.loading.formats.opened import BuiltModel, Opened, ReadLeaf, leave_to_mlx
from machd.engine.loading.placing.precision import (
    Conversion,
    choose_conversion,
    dtype_name,
    held_bytes,
    refuse_if_too_big,
)
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.weight_formats import can_quantise
from machd.engine.protocol.progress import LoadProgress

_EXPANDED_DTYPE = mx.float16
"""Dtype of weights that nothing here computes packed, where all others stay as they are stored."""

_MAX_CACHED_BYTES = 64 << 20
"""Bytes of freed memory that mlx may keep while weights are loaded: each module's stored weights would add to it."""


def place_whole(
    opened: Opened,
    build: Callable[[], BuiltModel],
    settings: PlacingSettings,
    progress: LoadProgress,
) -> BuiltModel:
    """Build a model and read its weights; those of layers that machd computes itself may stay as they are stored.

    Raises:
        ModelError: The memory is too small, or files cannot be read.
        SettingsError: The settings do not fit the model.
    """
    refuse_if_too_big(opened.checkpoint.stored_bytes, available_memory_bytes())
    built = build()
    available_bytes = settings.limit_bytes or available_memory_bytes()
    conversion = choose_conversion(opened, built, settings, available_bytes)
    if conversion.dtype is not None and conversion.quantise_to is None:
        refuse_if_too_big(
            held_bytes(built.model, conversion.dtype, conversion.native),
            available_bytes,
            what=f"the weights in {dtype_name(conversion.dtype)}",
        )
    progress.stage("loading the weights", opened.checkpoint.stored_bytes)
    with opened.reading() as read:
        materialise(built.model, conversion, progress, read)
    return built


def materialise(
    model: Module,
    conversion: Conversion,
    progress: LoadProgress,
    read: ReadLeaf = leave_to_mlx,
) -> None:
    """Load the weights of a lazily built model module by module, converting them in place on the way.

    A module's stored weights are dropped before the next module's are read, so that memory holds
    the converted model and one stored module.

    Args:
        model: Its parameters are replaced in place.
        conversion: A model with a quantised layer of a kind unknown to machd keeps its dtypes.
        progress: Advanced by the bytes of each module as stored.
        read: Reads a module's stored weights.
    """
    for stored_bytes, module in _converted(model, conversion, read):
        mx.eval(module.parameters())
        progress.advance(stored_bytes)
        if mx.get_cache_memory() > _MAX_CACHED_BYTES:
            mx.clear_cache()
    mx.eval(model.parameters())
    mx.clear_cache()


def hold_in(model: Module, conversion: Conversion) -> None:
    """Give the weights the shapes and dtypes that :func:`materialise` would, and compute nothing."""
    for _ in _converted(model, conversion, leave_to_mlx):
        pass


def _converted(
    model: Module, conversion: Conversion, read: ReadLeaf
) -> Iterator[tuple[int, Module]]:
    """Convert a model leaf by leaf; yields the stored bytes of each, and the leaf to be computed."""
    dtype, quantise_to, native = conversion.dtype, conversion.quantise_to, conversion.native
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
        # Removed from the list, so that the stored weights are freed when they are replaced.
        path, module = leaves.pop()
        stored_bytes = read(path, module)
        is_quantised = quantise_to is not None and can_quantise(model, path, module, quantise_to)
        is_native_here = native is not None and native(path)
        is_expanded = dtype is None and is_left_to_kernels(module)
        to = _EXPANDED_DTYPE if is_expanded else dtype
        if to is not None:
            stays = is_native_here and native is not None and native.as_stored
            stays = stays and not is_quantised and has_native_product(module)
            module = _in_dtype(model, path, module, to, stays=stays)
        if quantise_to is not None and can_quantise(model, path, module, quantise_to):
            module = module.to_quantized(quantise_to.group_size, quantise_to.bits, quantise_to.mode)
            model.update_modules(tree_unflatten([(path, module)]))
        if is_native_here and take_native(module):
            kept_paths.add(path)
        yield stored_bytes, module
    if dtype is not None:
        # Parameters of a module that has children are in no leaf.
        _cast(model, dtype, "", model, kept_paths)


def _in_dtype(model: Layer, path: str, module: Layer, dtype: mx.Dtype, *, stays: bool) -> Layer:
    """Unpack a leaf's parameters and cast them; cast only the bias where the weights stay as stored."""
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
    weight = unpacked(module).astype(dtype)
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
    """Cast a module's floating-point parameters, except those that the model excludes and those of given layers."""
    may_cast = getattr(model, "cast_predicate", None)
    prefix = f"{path}." if path else ""

    def cast(name: str, array: mx.array) -> mx.array:
        stays = may_cast is not None and dtype != mx.float32 and not may_cast(prefix + name)
        stays = stays or (prefix + name).rpartition(".")[0] in kept_paths
        if stays or not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype(dtype)

    module.update(tree_map_with_path(cast, module.parameters()))
