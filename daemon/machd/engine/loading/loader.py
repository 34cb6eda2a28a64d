"""Loading of a model into memory: checks first, then weights, then a first short run.

The calling thread has to be the engine's: mlx ties its streams to the thread that first uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.capabilities.facts import CacheFacts
from machd.capabilities.rules import kv_quantization
from machd.capabilities.verdict import Support
from machd.engine.backend.device import (
    available_memory_bytes,
    backend_name,
    computing_memory_bytes,
    device_memory_bytes,
    device_name,
)
from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.model_files import own_code_files
from machd.engine.experts.banked_model import BankedModel
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import TensorOrigins, switch_layers
from machd.engine.kernels.batchable import make_batchable
from machd.engine.kernels.native_attention import is_native_model
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.loading.architecture import architecture_name, check_architecture
from machd.engine.loading.cache_facts import layer_facts, measure_model
from machd.engine.loading.formats.checkpoint import Checkpoint, context_tokens, read_checkpoint
from machd.engine.loading.formats.gguf import (
    build_llama,
    check_gguf,
    llama_config,
    load_llama_weights,
)
from machd.engine.loading.formats.gguf_header import GgufHeader, read_gguf_header
from machd.engine.loading.model_code import read_model_code
from machd.engine.loading.placing.banked import load_banked, refuse_quantising
from machd.engine.loading.placing.precision import (
    LANGUAGE_PATH,
    Quantization,
    choose_dtype,
    computed_dtype,
    dtype_name,
    held_bytes,
    hold_in,
    materialise,
    model_dtype,
    native_layers,
    quantization_of,
    refuse_if_too_big,
    weight_format,
    weights_bytes,
)
from machd.engine.loading.placing.shard_reader import ShardReader
from machd.engine.loading.placing.sharding import Sharding, cut, least
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.loading.tokenizer_files import open_tokenizer
from machd.engine.loading.vision import (
    NO_MESSAGES,
    LoadedVision,
    build_vision_model,
    describe_vision,
    loads_vision,
    open_processor,
    refuse_own_code,
    why_text_only,
)
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.progress import LoadProgress, SilentProgress
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.media_processor import CheckpointProcessor
from machd.errors import ModelError, ModelFormatError, ModelShardingError, SettingsError

MEDIA_BYTES = 256_000_000
"""Memory for processed images and videos, and as much for their embeddings, unless given."""

_MEDIA_SHARE = 1 / 16
"""Of the memory that is left once the model is loaded, for either of them at most: under a tight limit one large image
that is kept would leave no room for the next small one."""

_NO_EXPERTS = (
    "experts.resident_gb has no effect: the model has no experts that machd can leave on disk"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        notes: Warnings for the start-up log.
        weight_files: Files of the weights; none for a model that was made in memory.
        kv_format: Format of keys and values; the description's cache facts are of this.
        experts: The experts that are read from disk when they are needed; None if the whole model is in
            memory.
        vision: Decoder and processor of images and videos; None for a model that takes text only.
        media_bytes: Memory for their embeddings.
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
) -> LoadedModel:
    """Check, load and measure a model.

    Args:
        source: The model's files.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``; see ``precision.choose_dtype``.
        max_context_tokens: Fewer positions than the model has; None for all of them.
        trust_remote_code: Whether the checkpoint's own Python code may run.
        chat_template: A file that replaces the model's template, ``none`` to serve without chat,
            or None for the model's own.
        progress: Told about stages and bytes, on this thread.
        blas: Name of the CPU's BLAS, for the description.
        kv_format: Format of keys and values in the caches.
        residency: Memory for the experts; None to keep the whole model in memory.
        quantize: The setting ``model.quantize``.
        media_bytes: Memory for processed images and videos.
        sharding: The ranks that compute the model, of which this one loads its shard; every rank calls this.

    Raises:
        ModelError: One of its kinds; nothing is left in memory.
        SettingsError: ``max_context_tokens``, ``chat_template``, ``kv_format`` or ``quantize`` do
            not fit the model.
    """
    import_mlx_lm()
    progress = progress or SilentProgress()
    experts: BankedModel | None = None
    vision: LoadedVision | None = None
    vision_reason = ""
    # Refusals come before the weights, which take the time.
    progress.stage("reading the tokenizer", None)
    if source.kind is SourceKind.GGUF:
        header = read_gguf_header(source.path)
        check_gguf(header)
        tokenizer, notes = open_tokenizer(
            header, chat_template, trust_remote_code=trust_remote_code
        )
        context = context_tokens(llama_config(header), max_context_tokens)
        # A llama's caches are standard ones, which every KV format fits.
        model = _load_gguf(header, dtype, progress, quantize, sharding)
        architecture = "llama"
        weight_files: tuple[Path, ...] = (source.path,)
        own_files: tuple[Path, ...] = ()
    else:
        checkpoint = read_checkpoint(source.path, trust_remote_code=trust_remote_code)
        refuse_own_code(checkpoint, trust_remote_code=trust_remote_code)
        vision_reason = why_text_only(checkpoint)
        if "model_file" not in checkpoint.config and not loads_vision(checkpoint):
            check_architecture(checkpoint.config)
        tokenizer, notes = open_tokenizer(
            checkpoint, chat_template, trust_remote_code=trust_remote_code
        )
        notes = (vision_reason, *notes) if vision_reason else notes
        context = context_tokens(checkpoint.config, max_context_tokens)
        loaded = _load_directory(
            checkpoint,
            dtype,
            progress,
            trust_remote_code=trust_remote_code,
            kv_format=kv_format,
            residency=residency,
            quantize=quantize,
            sharding=sharding,
        )
        model, experts, vision = loaded.model, loaded.experts, loaded.vision
        architecture = loaded.architecture
        weight_files = tuple(checkpoint.weight_files)
        # Code that has run may have changed any class, mlx-lm's too.
        has_run = "model_file" in checkpoint.config or checkpoint.code_files
        own_files = tuple(own_code_files(source.path)) if has_run and trust_remote_code else ()
    if residency is not None and experts is None:
        notes = (*notes, _NO_EXPERTS)
    progress.stage("trying the model", None)
    description = describe_model(
        model,
        model_id=source.model_id,
        architecture=architecture,
        context_tokens=context,
        eos_token_ids=tokenizer.eos_token_ids,
        blas=blas,
        kv_format=kv_format,
        own_files=own_files,
        experts=experts,
    )
    written_unix_s = int(weight_files[0].stat().st_mtime)
    description = replace(description, created_unix_s=written_unix_s, vision_reason=vision_reason)
    whole = LoadedModel(model, tokenizer, description, notes, weight_files, kv_format, experts)
    return whole if vision is None else _with_vision(whole, vision, progress, media_bytes)


def _with_vision(
    loaded: LoadedModel, vision: LoadedVision, progress: LoadProgress, media_bytes: int
) -> LoadedModel:
    if not loaded.tokenizer.has_chat_template:
        vision.files.close()
        description = replace(loaded.description, vision_reason=NO_MESSAGES)
        return replace(loaded, description=description, notes=(*loaded.notes, NO_MESSAGES))
    progress.stage("loading the processor of images", None)
    media_bytes = min(media_bytes, int(_MEDIA_SHARE * computing_memory_bytes()))
    processor = open_processor(vision.files, loaded.tokenizer, max_bytes=media_bytes)
    seen = describe_vision(vision.files, processor)
    description = replace(loaded.description, vision=seen)
    return replace(loaded, description=description, vision=processor, media_bytes=media_bytes)


@dataclass(frozen=True, slots=True)
class _LoadedDirectory:
    """A model of a directory.

    Attributes:
        architecture: The library's name of it.
        experts: Its experts on disk; None if all are in memory.
        vision: What it sees with; None for text only.
    """

    model: Module
    architecture: str
    experts: BankedModel | None = None
    vision: LoadedVision | None = None


def _load_gguf(
    header: GgufHeader,
    dtype: str,
    progress: LoadProgress,
    quantize: str | None,
    sharding: Sharding | None,
) -> Module:
    stored_bytes = sum(tensor.size_bytes for tensor in header.tensors)
    available_bytes = available_memory_bytes()
    refuse_if_too_big(stored_bytes, available_bytes)
    native = native_layers(dtype) if sharding is None else None
    plain_dtype = choose_dtype(
        dtype,
        backend=backend_name(),
        parameters=sum(tensor.elements for tensor in header.tensors),
        available_bytes=available_bytes,
        float32_bytes=stored_bytes if native is not None and native.as_stored else None,
    )
    progress.stage("loading the weights", stored_bytes)
    as_stored = native is not None and native.as_stored
    dequantised = None if as_stored else plain_dtype
    weights = load_llama_weights(header, dequantised, progress, is_mixed=as_stored)
    model = build_llama(header, weights)
    if native is not None:
        materialise(model, plain_dtype, SilentProgress(), native=native)
    if (target := weight_format(quantize, model)) is not None:
        materialise(model, None, SilentProgress(), target)
    if sharding is not None:
        model = cut(lambda: model, sharding)
        mx.eval(model.parameters())
    mx.clear_cache()
    return model


def _load_directory(  # noqa: PLR0913 - one argument for each setting of the model
    checkpoint: Checkpoint,
    dtype: str,
    progress: LoadProgress,
    *,
    trust_remote_code: bool,
    kv_format: KvFormat,
    residency: Residency | None,
    quantize: str | None,
    sharding: Sharding | None,
) -> _LoadedDirectory:
    """Load a directory: with its vision tower, its experts on disk, or a shard, as far as there are any."""
    if sharding is not None:
        return _load_shard(checkpoint, dtype, progress, kv_format, quantize, sharding)
    if loads_vision(checkpoint):
        refuse_if_too_big(checkpoint.stored_bytes, available_memory_bytes())
        vision = build_vision_model(checkpoint, trust_remote_code=trust_remote_code)
        _check_kv_format(vision.model, kv_format)
        target = weight_format(quantize, vision.model)
        # What an encoder takes is read from its graph, in which mlx describes its own operations only.
        _read_weights(vision.model, checkpoint, dtype, progress, target, LANGUAGE_PATH)
        return _LoadedDirectory(vision.model, vision.family, vision=vision)
    origins: TensorOrigins | None = None
    # A checkpoint's own model class is built by its own code, which cannot be recorded.
    if residency is not None and not checkpoint.has_own_model:
        origins = TensorOrigins(checkpoint.tensors)
    else:
        refuse_if_too_big(checkpoint.stored_bytes, available_memory_bytes())
    model = _built(checkpoint, origins, trust_remote_code=trust_remote_code)
    architecture = architecture_name(model, checkpoint.model_type)
    _check_kv_format(model, kv_format)
    if origins is not None and residency is not None:
        if switch_layers(model):
            refuse_quantising(quantize)
            banked = load_banked(model, checkpoint, origins, residency, dtype, progress)
            return _LoadedDirectory(model, architecture, banked)
        refuse_if_too_big(checkpoint.stored_bytes, available_memory_bytes())
    _read_weights(model, checkpoint, dtype, progress, weight_format(quantize, model))
    return _LoadedDirectory(model, architecture)


def _load_shard(
    checkpoint: Checkpoint,
    dtype: str,
    progress: LoadProgress,
    kv_format: KvFormat,
    quantize: str | None,
    sharding: Sharding,
) -> _LoadedDirectory:
    """Load this rank's shard; weights are converted before they are cut, as they are for one rank."""
    if loads_vision(checkpoint):
        raise ModelShardingError("a model with vision is served by one rank")
    available_bytes, size = least(sharding.group, available_memory_bytes()), sharding.group.size()
    refuse_if_too_big(checkpoint.stored_bytes // size, available_bytes)

    reader = ShardReader(checkpoint)

    def built() -> Module:
        model = _built(checkpoint, reader, trust_remote_code=False)
        reader.note_stored(model)
        _check_kv_format(model, kv_format)
        target = weight_format(quantize, model)
        plain_dtype = model_dtype(
            model, dtype, target, backend=backend_name(), available_bytes=available_bytes * size
        )
        hold_in(model, plain_dtype, target)
        reader.note_cast(model)
        return model

    with reader.recording_cut():
        model = cut(built, sharding)
    architecture = architecture_name(model, checkpoint.model_type)
    progress.stage("loading the weights", weights_bytes(model))
    try:
        reader.materialise(model, progress)
    except RuntimeError as error:
        raise ModelFormatError(f"{checkpoint.path.name}: {printable(error)}") from error
    return _LoadedDirectory(model, architecture)


def _built(
    checkpoint: Checkpoint, origins: TensorOrigins | None, *, trust_remote_code: bool
) -> Module:
    """Build the model of a directory with lazy weights, of which nothing is read yet."""
    from mlx_lm import utils  # noqa: PLC0415 - after import_mlx_lm()

    classes = {} if origins is None else {"get_model_classes": origins.model_classes}
    try:
        model, _ = utils.load_model(
            checkpoint.path, lazy=True, trust_remote_code=trust_remote_code, **classes
        )
    except ModelError:
        raise
    except Exception as error:
        # mlx-lm raises KeyError, TypeError or ValueError for a contradiction.
        raise ModelFormatError(
            f"{checkpoint.path.name}: weights and config.json do not fit together: {printable(error)}"
        ) from error
    if origins is not None:
        origins.restore_class(model)
    built: Module = model
    return built


def _check_kv_format(model: Module, kv_format: KvFormat) -> None:
    """Refuse a KV format that none of the model's caches can have."""
    if kv_format is PLAIN:
        return
    verdict = kv_quantization(CacheFacts(layer_facts(model), 0, 0))
    if verdict.support is Support.BLOCKED:
        problem = (
            f"cache.kv_quantization: {kv_format.name} does not work with the model at model.path: "
            f"{verdict.reason}. Set cache.kv_quantization to none, or model.path to another model"
        )
        raise SettingsError([problem])


def _read_weights(
    model: Module,
    checkpoint: Checkpoint,
    dtype: str,
    progress: LoadProgress,
    quantise_to: Quantization | None = None,
    within: str = "",
) -> None:
    """Read a model's weights; those inside one part of it may stay as they are stored."""
    available_bytes = available_memory_bytes()
    native = native_layers(dtype, within)
    plain_dtype = model_dtype(
        model,
        dtype,
        quantise_to,
        backend=backend_name(),
        available_bytes=available_bytes,
        native=native,
    )
    if plain_dtype is not None and quantise_to is None:
        refuse_if_too_big(
            held_bytes(model, plain_dtype, native),
            available_bytes,
            what=f"the weights in {dtype_name(plain_dtype)}",
        )
    progress.stage("loading the weights", checkpoint.stored_bytes)
    try:
        materialise(model, plain_dtype, progress, quantise_to, native)
    except RuntimeError as error:
        raise ModelFormatError(f"{checkpoint.path.name}: {printable(error)}") from error


def describe_model(  # noqa: PLR0913 - one argument for each fact of files and settings
    model: Module,
    *,
    model_id: str,
    architecture: str,
    context_tokens: int,
    eos_token_ids: frozenset[int],
    blas: str | None = None,
    kv_format: KvFormat = PLAIN,
    own_files: Sequence[Path] = (),
    experts: BankedModel | None = None,
) -> ModelDescription:
    """Repair a model's layers for batches where they need it, and measure it on a short prompt."""
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    make_batchable(model)
    measured = measure_model(model, kv_format)
    backend, quantization = backend_name(), quantization_of(model)
    banked_parameters = 0 if experts is None else experts.parameters
    banked_bytes = 0 if experts is None else experts.bank.capacity_bytes
    return ModelDescription(
        model_id=model_id,
        architecture=architecture,
        context_tokens=context_tokens,
        vocabulary_tokens=measured.logits_tokens,
        parameters=int(get_total_parameters(model)) + banked_parameters,
        weights_bytes=weights_bytes(model) + banked_bytes,
        dtype=computed_dtype(model),
        quantization=None if quantization is None else str(quantization),
        backend=backend,
        blas=blas if backend == "cpu" else None,
        eos_token_ids=eos_token_ids,
        cache=measured.cache,
        created_unix_s=0,
        device_memory_bytes=device_memory_bytes(),
        device_name=device_name(),
        code=read_model_code(model, measured.cache, own_files),
        is_native=is_native_model(model, measured.head_dims),
        experts_on_disk=experts is not None,
    )
