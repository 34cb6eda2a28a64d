"""Put a whole model into memory, plain or quantised."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.backend.device import available_memory_bytes
from machd.engine.loading.formats.opened import BuiltModel, Opened
from machd.engine.loading.placing.conversion import materialise
from machd.engine.loading.placing.precision import (
    choose_conversion,
    dtype_name,
    held_bytes,
    native_layers,
    refuse_if_too_big,
)
from machd.engine.protocol.progress import LoadProgress


def place_whole(
    opened: Opened,
    build: Callable[[], BuiltModel],
    dtype: str,
    quantize: str | None,
    progress: LoadProgress,
    *,
    is_cut: bool = False,
) -> BuiltModel:
    """Build a model and read its weights; those of layers that machd computes itself may stay as they are stored.

    Args:
        opened: The model's files.
        build: Builds it with lazy weights.
        dtype: The setting ``model.dtype``.
        quantize: The setting ``model.quantize``.
        progress: Told about stages and bytes.
        is_cut: It is cut afterwards, which machd's own layers cannot be.

    Raises:
        ModelError: The memory is too small, or files cannot be read.
        SettingsError: The settings do not fit the model.
    """
    refuse_if_too_big(opened.stored_bytes, available_memory_bytes())
    built, available_bytes = build(), available_memory_bytes()
    native = None if is_cut else native_layers(dtype, built.native_path)
    conversion = choose_conversion(
        opened, built.model, dtype, quantize, native=native, available_bytes=available_bytes
    )
    if conversion.dtype is not None and conversion.quantise_to is None:
        refuse_if_too_big(
            held_bytes(built.model, conversion.dtype, native),
            available_bytes,
            what=f"the weights in {dtype_name(conversion.dtype)}",
        )
    progress.stage("loading the weights", opened.stored_bytes)
    with opened.reading() as read:
        materialise(built.model, conversion, progress, read)
    return built
