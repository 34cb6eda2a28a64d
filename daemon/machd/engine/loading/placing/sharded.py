"""Put a rank's shard of a model into memory; weights are converted before they are cut, as they are for one rank."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.device import available_memory_bytes
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.architecture import architecture_name
from machd.engine.loading.formats.opened import BuiltModel, Opened, weights_bytes
from machd.engine.loading.placing.conversion import hold_in
from machd.engine.loading.placing.precision import choose_conversion, refuse_if_too_big
from machd.engine.loading.placing.shard_reader import ShardReader
from machd.engine.loading.placing.sharding import Sharding, cut, least
from machd.engine.loading.placing.whole import place_whole
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelShardingError


def place_shard(
    opened: Opened,
    build: Callable[[TensorOrigins | None], BuiltModel],
    dtype: str,
    quantize: str | None,
    sharding: Sharding,
    progress: LoadProgress,
) -> BuiltModel:
    """Build a model, cut it to this rank's shard, and read that. A collective.

    Args:
        opened: The model's files.
        build: Builds it with lazy weights, recorded or not.
        dtype: The setting ``model.dtype``.
        quantize: The setting ``model.quantize``.
        sharding: The ranks.
        progress: Told about stages and bytes.

    Raises:
        ModelError: The model cannot be cut, the memory is too small, or files cannot be read.
        SettingsError: The settings do not fit the model.
    """
    if opened.takes_images:
        raise ModelShardingError("a model with vision is served by one rank")
    if opened.tensors is None:
        return _cut_in_memory(opened, build, dtype, quantize, sharding, progress)
    available_bytes, size = least(sharding.group, available_memory_bytes()), sharding.group.size()
    refuse_if_too_big(opened.stored_bytes // size, available_bytes)
    reader = ShardReader(opened.tensors, opened.stored_bytes)

    def built() -> Module:
        model = build(reader).model
        reader.note_stored(model)
        conversion = choose_conversion(
            opened, model, dtype, quantize, native=None, available_bytes=available_bytes * size
        )
        hold_in(model, conversion)
        reader.note_cast(model)
        return model

    with reader.recording_cut():
        model = cut(built, sharding)
    progress.stage("loading the weights", weights_bytes(model))
    with opened.reading():
        reader.materialise(model, progress)
    return BuiltModel(model, architecture_name(model, str(opened.config["model_type"])))


def _cut_in_memory(
    opened: Opened,
    build: Callable[[TensorOrigins | None], BuiltModel],
    dtype: str,
    quantize: str | None,
    sharding: Sharding,
    progress: LoadProgress,
) -> BuiltModel:
    """Read the whole model first: a shard of its tensors lies nowhere in a file."""
    whole = place_whole(opened, lambda: build(None), dtype, quantize, progress, is_cut=True)
    model = cut(lambda: whole.model, sharding)
    mx.eval(model.parameters())
    mx.clear_cache()
    return BuiltModel(model, whole.architecture)
