"""Loading of a model: its files are opened, put into memory and described after a first short run.

The calling thread has to be the engine's: mlx ties its streams to the thread that first uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlx.nn.layers.base import Module

from machd.capabilities.fit import MemoryNeeds
from machd.engine.backend.device import computing_memory_bytes
from machd.engine.backend.own_code import OwnCode
from machd.engine.experts.banked_model import BankedModel
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import switch_layers
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.loading.description import describe_model
from machd.engine.loading.formats.checkpoint import context_tokens
from machd.engine.loading.formats.opening import open_model
from machd.engine.loading.inspection import EXPERTS_IN_GGUF, memory_needs
from machd.engine.loading.placing.place import place
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.sharding import Sharding
from machd.engine.loading.source import ModelSource
from machd.engine.loading.tokenizer_files import open_tokenizer
from machd.engine.loading.vision import NO_MESSAGES, describe_vision, open_processor
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.progress import LoadProgress, SilentProgress
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.media_processor import CheckpointProcessor, ProcessorFiles

MEDIA_BYTES = 256_000_000
"""Memory for processed images and videos, and as much for their embeddings, unless given."""

_MEDIA_SHARE = 1 / 16
"""Most of the memory that is left after loading, for processed media and for embeddings each: under a tight limit one
large image in the cache would leave no room for the next small one."""

_NO_EXPERTS = (
    "experts.resident_gb has no effect: the model has no experts that machd can leave on disk"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        weight_files: Files of the weights; none for a model that was made in memory.
        kv_format: Format of keys and values; the description's cache facts are of this.
        experts: The experts that are read from disk when they are needed; None if the whole model is in
            memory.
        vision: Decoder and processor of images and videos; None for a model that takes text only.
    """

    model: Module
    tokenizer: Tokenizer
    description: ModelDescription
    notes: tuple[str, ...] = ()
    weight_files: tuple[Path, ...] = ()
    kv_format: KvFormat = PLAIN
    experts: BankedModel | None = None
    vision: CheckpointProcessor | None = None
    media_bytes: int = MEDIA_BYTES


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory of a model that is served beside others.

    Attributes:
        limit_bytes: The most that its weights may take.
        wait: Called with what the model needs, but for a KV budget; returns once it may be put into memory.
    """

    limit_bytes: int
    wait: Callable[[MemoryNeeds], None]


def load_model(  # noqa: PLR0913 - one argument for each setting of the model
    source: ModelSource,
    *,
    dtype: str = "auto",
    max_context_tokens: int | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    progress: LoadProgress | None = None,
    blas: str | None = None,
    kv_format: KvFormat = PLAIN,
    residency: Residency | None = None,
    quantize: str | None = None,
    media_bytes: int = MEDIA_BYTES,
    sharding: Sharding | None = None,
    share: MemoryShare | None = None,
) -> LoadedModel:
    """Check, load and measure a model.

    ``chat_template`` is a file that replaces the model's template, ``none`` to serve without chat, or None for the
    model's own; ``residency`` None keeps the whole model in memory. With ``sharding`` every rank calls this. ``share`` is for
    a model among others.

    Raises:
        ModelError: One of its kinds; nothing is left in memory.
        SettingsError: ``max_context_tokens``, ``chat_template``, ``kv_format`` or ``quantize`` do
            not fit the model.
    """
    progress = progress or SilentProgress()
    # Refused before the weights are read, which takes most of the time.
    progress.stage("reading the tokenizer", None)
    opened = open_model(source, own_code=OwnCode.of(is_trusted=trust_remote_code))
    checkpoint = opened.checkpoint
    tokenizer, tokenizer_notes = open_tokenizer(
        checkpoint, chat_template, trust_remote_code=trust_remote_code
    )
    context = context_tokens(checkpoint.config, max_context_tokens)
    limit_bytes = None if share is None else share.limit_bytes
    settings = PlacingSettings(dtype, quantize, kv_format, residency, sharding, limit_bytes)
    if share is not None:
        # As processed and as embeddings; without a chat template no image is taken.
        kept_bytes = 2 * media_bytes if tokenizer.has_chat_template else 0
        share.wait(
            memory_needs(source, opened, settings, context_tokens=context, media_bytes=kept_bytes)
        )
    placed = place(opened, settings, progress)
    built, experts = placed.built, placed.experts
    no_experts = ""
    if residency is not None and experts is None:
        has_some = checkpoint.header is not None and switch_layers(built.model)
        no_experts = EXPERTS_IN_GGUF if has_some else _NO_EXPERTS
    notes = tuple(filter(None, (checkpoint.vision_reason, *tokenizer_notes, no_experts)))
    progress.stage("trying the model", None)
    description = describe_model(
        built.model,
        model_id=source.model_id,
        architecture=built.architecture,
        context_tokens=context,
        eos_token_ids=tokenizer.eos_token_ids,
        blas=blas,
        kv_format=kv_format,
        own_files=opened.own_files(),
        experts=experts,
    )
    description = replace(
        description,
        created_unix_s=int(checkpoint.weight_files[0].stat().st_mtime),
        vision_reason=checkpoint.vision_reason,
    )
    whole = LoadedModel(
        built.model, tokenizer, description, notes, checkpoint.weight_files, kv_format, experts
    )
    if built.processor is None:
        return whole
    return _with_vision(whole, built.processor, progress, media_bytes)


def _with_vision(
    loaded: LoadedModel, files: ProcessorFiles, progress: LoadProgress, media_bytes: int
) -> LoadedModel:
    if not loaded.tokenizer.has_chat_template:
        files.close()
        description = replace(loaded.description, vision_reason=NO_MESSAGES)
        return replace(loaded, description=description, notes=(*loaded.notes, NO_MESSAGES))
    progress.stage("loading the processor of images", None)
    media_bytes = min(media_bytes, int(_MEDIA_SHARE * computing_memory_bytes()))
    processor = open_processor(files, loaded.tokenizer, max_bytes=media_bytes)
    seen = describe_vision(files, processor)
    description = replace(loaded.description, vision=seen)
    return replace(loaded, description=description, vision=processor, media_bytes=media_bytes)
