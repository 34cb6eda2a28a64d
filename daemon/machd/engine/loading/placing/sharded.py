"""Put a rank's shard of a model into memory; weights are converted before they are cut, as they are for one rank."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.backend.device import available_memory_bytes
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.architecture import architecture_name
from machd.engine.loading.formats.opened import BuiltModel, Opened, weights_bytes
from machd.engine.loading.placing.precision import Conversion, choose_conversion, refuse_if_too_big
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.shard_reader import ShardReader
from machd.engine.loading.placing.sharding import Sharding, cut, least
from machd.engine.loading.placing.whole import hold_in, materialise, place_whole
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelShardingError


def place_shard(
    opened: Opened,
    build: Callable[[TensorOrigins | None], BuiltModel],
    settings: PlacingSettings,
    sharding: Sharding,
    progress: LoadProgress,
) -> BuiltModel:
    """Build a model, cut it to this rank's shard, and read that. A collective.

    Raises:
        ModelError: The model cannot be cut, the memory is too small, or files cannot be read.
        SettingsError: The settings do not fit the model.
    """
    checkpoint = opened.checkpoint
    if checkpoint.takes_images:
        raise ModelShardingError("a model with vision is served by one rank")
    if not checkpoint.tensors:
        # No part of a tensor can be read by itself: the whole model is, and then it is cut.
        whole = place_whole(opened, lambda: build(None), settings, progress)
        model = cut(lambda: whole.model, sharding)
        mx.eval(model.parameters())
        mx.clear_cache()
        return BuiltModel(model, whole.architecture)
    available_bytes, size = least(sharding.group, available_memory_bytes()), sharding.group.size()
    refuse_if_too_big(checkpoint.stored_bytes // size, available_bytes)
    reader = ShardReader(checkpoint.tensors, checkpoint.stored_bytes)

    def build_converted() -> Module:
        built = build(reader)
        reader.note_stored(built.model)
        hold_in(built.model, choose_conversion(opened, built, settings, available_bytes * size))
        reader.note_cast(built.model)
        return built.model

    with reader.recording_cut():
        model = cut(build_converted, sharding)
    progress.stage("loading the weights", weights_bytes(model))
    with opened.reading():
        materialise(model, Conversion(None), progress, reader.reading(model))
    return BuiltModel(model, architecture_name(model, checkpoint.model_type))
