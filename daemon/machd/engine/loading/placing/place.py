"""Put an opened model into memory, in the one way that its files and the settings ask for.

Every way is a module beside this one; :func:`place` alone chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.facts import CacheFacts
from machd.capabilities.rules import kv_quantization
from machd.capabilities.verdict import Support
from machd.engine.experts.banked_model import BankedModel
from machd.engine.experts.tensor_origins import TensorOrigins, switch_layers
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.loading.cache_facts import layer_facts
from machd.engine.loading.formats.opened import BuiltModel, Opened
from machd.engine.loading.placing.banked import place_banked
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.sharded import place_shard
from machd.engine.loading.placing.whole import place_whole
from machd.engine.protocol.progress import LoadProgress
from machd.errors import SettingsError


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model, or this rank's shard of it, in memory.

    Attributes:
        built: The model, with its weights read.
        experts: Its experts on disk; None if all are in memory.
    """

    built: BuiltModel
    experts: BankedModel | None = None


def place(opened: Opened, settings: PlacingSettings, progress: LoadProgress) -> PlacedModel:
    """Build a model and read its weights; refuse before reading, which takes most of the time.

    Args:
        opened: The model's files.
        settings: Dtype, quantisation, experts and ranks.
        progress: Told about stages and bytes.

    Raises:
        ModelError: One of its kinds: it cannot be built, cut or read, or the memory is too small.
        SettingsError: The settings do not fit the model.
    """

    def build(recorder: TensorOrigins | None = None) -> BuiltModel:
        built = opened.build(recorder)
        _check_kv_format(built, settings.kv_format)
        return built

    if settings.sharding is not None:
        return PlacedModel(place_shard(opened, build, settings, settings.sharding, progress))
    if settings.residency is None or not opened.checkpoint.leaves_experts_on_disk:
        return PlacedModel(place_whole(opened, build, settings, progress))
    origins = TensorOrigins(opened.checkpoint.tensors)
    built = build(origins)
    if switch_layers(built.model):
        experts = place_banked(opened, built, origins, settings, settings.residency, progress)
        return PlacedModel(built, experts)
    origins.release()
    return PlacedModel(place_whole(opened, lambda: built, settings, progress))


def _check_kv_format(built: BuiltModel, kv_format: KvFormat) -> None:
    """Refuse a KV format that none of the model's caches can have."""
    if kv_format is PLAIN:
        return
    verdict = kv_quantization(CacheFacts(layer_facts(built.model), 0, 0))
    if verdict.support is Support.BLOCKED:
        problem = (
            f"cache.kv_quantization: {kv_format.name} does not work with the model at model.path: "
            f"{verdict.reason}. Set cache.kv_quantization to none, or model.path to another model"
        )
        raise SettingsError([problem])
