"""Assembly of an engine: the rooms that satisfy the step's ports, plugged into the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from machd.capabilities.facts import KvCacheKind
from machd.capabilities.rules import PrefixExtent, prefix_cache
from machd.clock import SystemClock
from machd.engine.adapters.adapted_model import AdaptedModel
from machd.engine.adapters.adapter_files import read_adapter
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers
from machd.engine.adapters.residency import AdapterLimits, AdapterResidency
from machd.engine.backend.device import computing_memory_bytes
from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.grammar.masks import TokenMasks
from machd.engine.grammar.matcher import matcher_for
from machd.engine.kernels.fused_llama import (
    first_logits,
    fuse_layers,
    reads_by_slab,
    shares_prefixes,
    takes_packed_caches,
)
from machd.engine.kernels.native_attention import take_native_attention
from machd.engine.kernels.native_layers import lay_in_large_pages
from machd.engine.kernels.packed import packed_caches
from machd.engine.kernels.started_layers import start_layers
from machd.engine.kv.kv_format import PLAIN
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.model_kv import ModelKv
from machd.engine.loading.loader import LoadedModel
from machd.engine.prefix_blocks.conversion import BlockForm
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.key import block_key
from machd.engine.prefix_blocks.memory_tier import MemoryTier
from machd.engine.protocol.adapters import ClosableAdapterRoom, NoAdapterRoom
from machd.engine.protocol.step import ProposerKind
from machd.engine.step.decode_pass import NO_PACKING, Packing
from machd.engine.step.memory import StepMemory
from machd.engine.step.mlx_engine import EngineParts, MlxEngine
from machd.engine.step.ports import (
    Decider,
    NoExperts,
    NoMedia,
    NoRowAdapters,
    PromptMedia,
    Proposer,
    RowAdapters,
)
from machd.engine.vision.media_encoder import MediaEncoder
from machd.engine.vision.vision_model import VisionLanguageModel
from machd.request.adapter import Adapter


def make_engine(  # noqa: PLR0913 - see engine_parts
    loaded: LoadedModel,
    *,
    max_rows: int = 256,
    looks_ahead: bool | None = None,
    leaves_blocks: bool = True,
    disk_tier: DiskTier | None = None,
    proposer: Proposer | None = None,
    decider: Decider | None = None,
    adapters: AdapterLimits | None = None,
) -> MlxEngine:
    """Make an engine of a loaded model; see :func:`engine_parts`."""
    parts = engine_parts(
        loaded,
        looks_ahead=looks_ahead,
        leaves_blocks=leaves_blocks,
        disk_tier=disk_tier,
        proposer=proposer,
        decider=decider,
        adapters=adapters,
    )
    return MlxEngine(parts, max_rows=max_rows)


def engine_parts(  # noqa: PLR0913 - one argument for each thing that differs between its callers
    loaded: LoadedModel,
    *,
    looks_ahead: bool | None = None,
    leaves_blocks: bool = True,
    disk_tier: DiskTier | None = None,
    proposer: Proposer | None = None,
    decider: Decider | None = None,
    adapters: AdapterLimits | None = None,
) -> EngineParts:
    """Collect the parts of an engine, which owns them from then on.

    Args:
        loaded: The model; its layers are replaced by machd's own where these are faster.
        looks_ahead: Dispatch steps before the last one's tokens are read; by default where the
            device works beside the program.
        leaves_blocks: Blocks may be stored of rows that have left with their last token.
        disk_tier: Blocks on disk; None for none.
        proposer: Source of draft tokens; None for none.
        decider: Decides with the ranks that compute the model, each its shard; None where this process
            computes it alone.
        adapters: Limits of those in memory; None for the usual ones.
    """
    model, description = loaded.model, loaded.description
    is_cpu = description.backend == "cpu"
    experts = loaded.experts
    # A pass with experts on disk waits for each layer's choice, so none can be dispatched ahead of it.
    looks_ahead = (not is_cpu if looks_ahead is None else looks_ahead) and experts is None
    # A rank is told the tokens of a pass, so they have to be read before it.
    looks_ahead = looks_ahead and decider is None
    if experts is not None:
        experts.connect_previews()
    if is_cpu and decider is None:
        fuse_layers(model)  # what it fuses would have to be sharded
        lay_in_large_pages(model)
        take_native_attention(model)
        start_layers(model)
    is_standard = description.cache.kind is KvCacheKind.STANDARD
    # Under look-ahead a pass is dispatched before the chunk that could share it is known.
    is_packable = not looks_ahead and is_standard and takes_packed_caches(model)
    has_length_classes = reads_by_slab(model)
    has_blocks = prefix_cache(description.cache).extent is not PrefixExtent.NONE
    vocabulary_tokens = description.vocabulary_tokens
    form = BlockForm.of_model(model, loaded.kv_format) if disk_tier is not None else None
    blocks = MemoryTier(disk_tier, form)
    row_adapters: RowAdapters = NoRowAdapters()
    adapter_room: ClosableAdapterRoom
    adapter_obstacle = ""
    if experts is not None:
        adapter_obstacle = "a model whose experts are on disk is computed without adapters"
    elif decider is not None:
        adapter_obstacle = "a model of several ranks is computed without adapters"
    if adapter_obstacle:
        adapter_room = NoAdapterRoom(adapter_obstacle)
    else:
        row_adapters = adapted = _adapted(loaded)
        adapter_room = AdapterResidency(
            adapted, _reader(adapted.base), adapters or AdapterLimits(), SystemClock()
        )
    decider = decider or Decider()
    memory = StepMemory(computing_memory_bytes, SystemClock(), decider)
    media: PromptMedia = NoMedia()
    if loaded.vision is not None:
        assert isinstance(model, VisionLanguageModel), "only such a model has a processor"
        media = MediaEncoder(
            model,
            loaded.vision,
            SystemClock(),
            max_bytes=loaded.media_bytes,
            read_usable_bytes=memory.read_usable_bytes,
        )
    return EngineParts(
        model=model,
        description=replace(
            description,
            block_key=block_key(loaded),
            has_length_classes=has_length_classes,
            shares_prefixes=is_standard and loaded.kv_format is PLAIN and shares_prefixes(model),
            proposer=ProposerKind.OFF if proposer is None else proposer.kind,
            adapter_obstacle=adapter_obstacle,
        ),
        tokenizer=loaded.tokenizer,
        kv=ModelKv(
            model,
            loaded.kv_format,
            len(description.cache.layers),
            can_pad=is_standard,
            has_length_classes=has_length_classes,
        ),
        grammars=LlguidanceCompiler(loaded.tokenizer, vocabulary_tokens, description.eos_token_ids),
        open_matcher=matcher_for,
        masks=TokenMasks(vocabulary_tokens, SystemClock()),
        blocks=blocks,
        keep_finished=blocks.keep_row if leaves_blocks and has_blocks else _keep_nothing,
        memory=memory,
        proposer=proposer,
        looks_ahead=looks_ahead,
        packing=Packing(packed_caches, partial(first_logits, model)) if is_packable else NO_PACKING,
        decider=decider,
        experts=NoExperts() if experts is None else experts,
        media=media,
        adapter_room=adapter_room,
        row_adapters=row_adapters,
    )


def _adapted(loaded: LoadedModel) -> AdaptedModel:
    """Return what adds adapters to a loaded model whose layers are as they will be computed."""
    if loaded.vision is None:
        return AdaptedModel(loaded.model)
    return AdaptedModel(loaded.model.model, under="language_model.")


def _reader(base: BaseLayers) -> Callable[[Adapter], AdapterWeights]:
    return lambda adapter: read_adapter(Path(adapter.path), adapter.digest, base)


def _keep_nothing(slot_index: int, row: CachedRow) -> None:
    """Let a row leave without a copy."""
    del slot_index, row
