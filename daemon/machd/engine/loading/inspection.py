"""Inspection of a model without its weights: configuration, headers and tokenizer files.

The model is built and repaired as the loader does it, with the real configuration and with arrays
that know their shapes and are never computed. So the inspection fails where loading would, except
for damaged weights, too little memory, a tokenizer that has no ``tokenizer.json``, and values of a JSON
type that transformers alone refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.capabilities.fit import MemoryNeeds
from machd.engine.backend.device import (
    available_memory_bytes,
    device_memory_bytes,
)
from machd.engine.backend.inspection_bounds import bounded, printable
from machd.engine.backend.mlx_lm_import import import_mlx_lm, import_mlx_lm_without_tokenizers
from machd.engine.backend.model_files import shortened
from machd.engine.backend.own_code import OwnCode
from machd.engine.experts.residency import Residency
from machd.engine.experts.tensor_origins import projections, switch_layers
from machd.engine.kernels.batchable import make_batchable
from machd.engine.loading.cache_facts import trace_model
from machd.engine.loading.description import describe_model
from machd.engine.loading.formats.checkpoint import Checkpoint, context_tokens
from machd.engine.loading.formats.opened import BuiltModel, Opened, weights_bytes
from machd.engine.loading.formats.opening import open_model
from machd.engine.loading.generation_config import read_default_sampling
from machd.engine.loading.placing.banked import BankPlan, plan_bank, refuse_quantising
from machd.engine.loading.placing.precision import Conversion, choose_conversion
from machd.engine.loading.placing.settings import PlacingSettings
from machd.engine.loading.placing.sharding_plan import RankPlan, plan_ranks
from machd.engine.loading.placing.weight_formats import Quantization, multiplies, quantization_of
from machd.engine.loading.placing.whole import hold_in
from machd.engine.loading.source import ModelSource
from machd.engine.loading.template_abilities import TemplateAbilities, find_abilities
from machd.engine.loading.tensor_types import TensorType, tensor_types
from machd.engine.loading.tokenizer_files import directory_tokenizer
from machd.engine.loading.vision import NO_MESSAGES, describe_vision, open_processor
from machd.engine.protocol.engine import ModelDescription, VisionDescription
from machd.engine.vision.media_processor import ProcessorFiles
from machd.errors import ChatTemplateMissingError, MachdError, ModelFormatError

_BUILD_LIMIT_S = 15.0
_BUILD_MEMORY_BYTES = 1 << 30
_MAX_NOTE_CHARS = 300

EXPERTS_IN_GGUF = (
    "experts of a GGUF file stay in memory: to leave them on disk, take the model in mlx-lm layout"
)

_WORKING_TOKENS = 512
"""Prompt tokens of one chunk, for the estimate of working memory."""

_WORKING_ARRAYS = 8
"""Number of arrays of a layer's largest width that are alive at once."""

_NO_LIMIT_BYTES = 1 << 62

_LARGEST_FIGURE = 1 << 53
"""Largest integer that every JSON parser reads exactly; no real model exceeds it."""

_MODES = (
    Quantization("affine", 4, 64),
    Quantization("mxfp4", 4, 32),
    Quantization("nvfp4", 4, 16),
    Quantization("mxfp8", 8, 32),
)
"""Every mode of mlx 0.32.4, with its usual bits and group."""


@dataclass(frozen=True, slots=True)
class ExpertsInspection:
    """The experts of a mixture-of-experts model.

    Attributes:
        count: Experts of all layers together.
        bank: Sizes with the experts on disk.
        is_banked: Experts are on disk, so that ``weights_bytes`` and ``dtype`` are those of ``bank``.
    """

    count: int
    resident_bytes: int
    bank: BankPlan
    is_banked: bool


@dataclass(frozen=True, slots=True)
class ModelInspection:
    """A model as its files describe it, and as it would be on this machine.

    Attributes:
        description: The description that serve would publish, of a trace instead of a run, and without a tokenizer's facts.
        template: Abilities of its chat template.
        stored_bytes: Size of the tensors on disk.
        working_bytes: An estimate of the memory that a step takes beside weights and KV cache.
        available_bytes: The part of the device's memory that could be taken now.
        stored_as: Packing of the weights as stored; None when they are plain.
        tensor_types: What becomes of each type of a GGUF file's tensors; empty for a directory.
        quantised_to: The format that ``model.quantize`` names; None without it.
        native_modes: Quantisation mode to whether this backend multiplies with packed weights.
        experts: The model's experts; None for a model without.
        rank_plans: The model cut for several ranks, each number and each way; none for one with vision.
        notes: Warnings for the report.
    """

    description: ModelDescription
    template: TemplateAbilities
    stored_bytes: int
    working_bytes: int
    available_bytes: int
    stored_as: Quantization | None
    tensor_types: tuple[TensorType, ...]
    quantised_to: Quantization | None
    native_modes: dict[str, bool]
    experts: ExpertsInspection | None
    rank_plans: tuple[RankPlan, ...]
    notes: tuple[str, ...]


def inspect_model(  # noqa: PLR0913 - one argument for each setting of the model
    source: ModelSource,
    *,
    dtype: str = "auto",
    max_context_tokens: int | None = None,
    chat_template: str | None = None,
    quantize: str | None = None,
    residency: Residency | None = None,
    kv_budget_bytes: int = 0,
    generation_config: str = "none",
    has_tokenizers: bool = True,
) -> ModelInspection:
    """Read configuration, headers and tokenizer files, and build the model without its weights.

    Takes about as long as importing mlx-lm, and for a model with vision twice as long. No code of the checkpoint's runs, whatever the
    settings say; its chat template runs in transformers' sandbox, with little time and memory.
    A model without a chat template is no error, though serving it needs a setting: the template's
    ``problem`` says which. The arguments are those of ``load_model``; ``kv_budget_bytes`` is the KV budget,
    for the report of what experts on disk would take. Without ``has_tokenizers`` mlx-lm is imported in half the time
    for a model that takes text only; this process can load no tokenizer afterwards.

    Raises:
        ModelError: One of its kinds: the error that serving the model would raise, and an error for
            a model that is Python code of the checkpoint's, which serve may be allowed to run.
        SettingsError: ``max_context_tokens`` or ``chat_template`` do not fit the model.
    """
    opened = open_model(
        source,
        own_code=OwnCode.NEVER_RUN,
        bounds=_limits,
        import_for_text=import_mlx_lm if has_tokenizers else import_mlx_lm_without_tokenizers,
    )
    checkpoint = opened.checkpoint
    template = find_abilities(checkpoint, chat_template)
    built = opened.build()
    vision, vision_reason = _vision(checkpoint, built.processor, chat_template)
    limit_tokens = context_tokens(checkpoint.config, max_context_tokens)
    # Read before the weights are held, under a limit on memory that is not the device's.
    available_bytes, device_bytes = available_memory_bytes(), device_memory_bytes()
    settings = PlacingSettings(dtype, quantize, residency=residency)
    with _tracing(source):
        bank = None
        if checkpoint.leaves_experts_on_disk:
            asked = residency or Residency("auto", kv_budget_bytes)
            bank = _bank(built.model, asked, dtype, available_bytes)
        weights = _Weights(settings, bank, available_bytes)
        found = _inspect(source, opened, built, weights, template, limit_tokens)
    sampling, left_out = read_default_sampling(source, generation_config)
    description = replace(
        found.description,
        device_memory_bytes=device_bytes,
        vision=vision,
        vision_reason=vision_reason,
        default_sampling=sampling,
    )
    if checkpoint.header is not None and switch_layers(built.model):
        left_out = (*left_out, EXPERTS_IN_GGUF)
    return replace(found, description=description, notes=(*found.notes, *left_out))


def memory_needs(
    source: ModelSource,
    opened: Opened,
    settings: PlacingSettings,
    *,
    context_tokens: int,
    media_bytes: int,
) -> MemoryNeeds:
    """Return the memory that a model will take but for a KV budget, with the figures of :func:`inspect_model`.

    A lazy model is built for it and dropped.

    Args:
        source: Named in errors.
        opened: Its files.
        settings: How it will be placed.
        context_tokens: Positions of one sequence.
        media_bytes: What is kept of images and videos, which is working memory of a model that takes some.

    Raises:
        ModelError: One of its kinds: it cannot be built, or its files contradict each other.
    """
    with _naming_misfits(source):
        return _memory_needs(opened, settings, context_tokens, media_bytes)


def _memory_needs(
    opened: Opened, settings: PlacingSettings, context_tokens: int, media_bytes: int
) -> MemoryNeeds:
    built = opened.build()
    if built.processor is not None:
        built.processor.close()
    else:
        media_bytes = 0
    limit_bytes = settings.limit_bytes or available_memory_bytes()
    bank = None
    if settings.residency is not None and opened.checkpoint.leaves_experts_on_disk:
        bank = _bank(built.model, settings.residency, settings.dtype, limit_bytes)
    weights = _Weights(settings, bank, limit_bytes)
    hold_in(built.model, _conversion(opened, built, weights))
    make_batchable(built.model)
    cache = trace_model(built.model).cache
    used = weights.used_bank
    return MemoryNeeds(
        weights_bytes=used.dense_bytes + used.bank_bytes if used else weights_bytes(built.model),
        working_bytes=_working_bytes(built.model) + media_bytes,
        kv_budget_bytes=0,
        bytes_per_token=cache.bytes_per_token,
        bytes_per_sequence=cache.bytes_per_sequence,
        context_tokens=context_tokens,
    )


def _vision(
    checkpoint: Checkpoint, processor: ProcessorFiles | None, chat_template: str | None
) -> tuple[VisionDescription | None, str]:
    """Try an image on the processor of a checkpoint with a vision tower, in the words of the chat template.

    Returns:
        What it takes, and why the checkpoint is served without its tower.

    Raises:
        ModelError: One of its kinds: the error that serving the model would raise.
    """
    if processor is None:
        return None, checkpoint.vision_reason
    with closing(processor):
        try:
            tokenizer = directory_tokenizer(checkpoint, chat_template, trust_remote_code=False)
        except ChatTemplateMissingError:
            return None, NO_MESSAGES
        with closing(tokenizer):
            if not tokenizer.has_chat_template:
                return None, NO_MESSAGES
            front = open_processor(processor, tokenizer, max_bytes=0)
            return describe_vision(processor, front), ""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Placement of the weights in memory.

    Attributes:
        settings: Settings of the placement.
        bank: Sizes with the experts on disk; None for a model without experts.
        available_bytes: Memory that they may take.
    """

    settings: PlacingSettings
    bank: BankPlan | None
    available_bytes: int

    @property
    def used_bank(self) -> BankPlan | None:
        """Sizes of the bank if experts would be on disk."""
        return None if self.settings.residency is None else self.bank


def _bank(model: Module, residency: Residency, dtype: str, available_bytes: int) -> BankPlan | None:
    if not switch_layers(model):
        return None
    # A dtype that the settings name is reported with its size, not refused.
    limit_bytes = available_bytes if dtype == "auto" else _NO_LIMIT_BYTES
    plan = plan_bank(model, residency, dtype, available_bytes=limit_bytes)
    if dtype == "auto":
        return plan
    bank_bytes = residency.bank_bytes(
        available_bytes=available_bytes,
        dense_bytes=plan.dense_bytes,
        experts_bytes=plan.experts_bytes,
    )
    return replace(plan, bank_bytes=bank_bytes)


def _conversion(opened: Opened, built: BuiltModel, weights: _Weights) -> Conversion:
    """Choose the conversion of the weights as serve would."""
    settings, bank = weights.settings, weights.used_bank
    if bank is not None:
        refuse_quantising(settings.quantize)
        return Conversion(bank.dense_dtype)
    # A dtype that the settings name is reported with its size, not refused.
    limit_bytes = weights.available_bytes if settings.dtype == "auto" else _NO_LIMIT_BYTES
    return choose_conversion(opened, built, settings, limit_bytes)


def _inspect(
    source: ModelSource,
    opened: Opened,
    built: BuiltModel,
    weights: _Weights,
    template: TemplateAbilities,
    limit_tokens: int,
) -> ModelInspection:
    model, bank = built.model, weights.used_bank
    stored_as = quantization_of(model)
    conversion = _conversion(opened, built, weights)
    hold_in(model, conversion)
    types = tensor_types(opened, model)
    make_batchable(model)
    switches = [switch for _, switch in switch_layers(model)]
    traced = trace_model(model)
    cache = traced.cache
    description = describe_model(
        model,
        model_id=source.model_id,
        architecture=built.architecture,
        context_tokens=limit_tokens,
        traced=traced,
    )
    if bank is not None:
        banked_bytes = bank.dense_bytes + bank.bank_bytes
        description = replace(description, weights_bytes=banked_bytes, experts_on_disk=True)
    _refuse_absurd(
        source,
        {
            "positions": limit_tokens,
            "parameters": description.parameters,
            "bytes a token": cache.bytes_per_token,
            "bytes a sequence": cache.bytes_per_sequence,
            "a window": max(cache.window_tokens, default=0),
            "tokens kept": max(cache.keep_tokens, default=0),
        },
    )
    unrun = (
        f"{name} names code of the checkpoint's own, which was not run"
        for name in opened.checkpoint.code_files
    )
    return ModelInspection(
        description=description,
        template=template,
        stored_bytes=opened.checkpoint.stored_bytes,
        working_bytes=_working_bytes(model),
        available_bytes=weights.available_bytes,
        stored_as=stored_as,
        tensor_types=types,
        quantised_to=conversion.quantise_to,
        native_modes=native_modes(),
        experts=_experts(switches, weights),
        rank_plans=() if built.processor is not None else plan_ranks(model, _working_bytes),
        notes=tuple(
            shortened(note, _MAX_NOTE_CHARS)
            for note in (*unrun, *template.notes, traced.note)
            if note
        ),
    )


def _experts(switches: Sequence[Module], weights: _Weights) -> ExpertsInspection | None:
    if weights.bank is None:
        return None
    return ExpertsInspection(
        count=sum(next(iter(projections(one)))[1].num_experts for one in switches),
        resident_bytes=sum(weights_bytes(one) for one in switches),
        bank=weights.bank,
        is_banked=weights.used_bank is not None,
    )


def _working_bytes(model: Module) -> int:
    """Estimate memory beside weights and KV: a copy of the largest tensor, and a prefill chunk."""
    flat = tree_flatten(model.parameters())
    assert isinstance(flat, list)
    arrays = [array for _, array in flat]
    largest_bytes = max((array.nbytes for array in arrays), default=0)
    # The widest is the vocabulary, which is computed for the few positions that are decoded.
    widths = sorted({array.shape[-2] for array in arrays if array.ndim >= 2})
    width = widths[-2] if len(widths) > 1 else 0
    return largest_bytes + _WORKING_TOKENS * _WORKING_ARRAYS * width * mx.float32.size


def _refuse_absurd(source: ModelSource, figures: Mapping[str, int]) -> None:
    """Refuse a report whose figures are out of bounds: they follow from untrusted files."""
    for name, value in figures.items():
        if value > _LARGEST_FIGURE:
            raise ModelFormatError(
                f"{source.path.name}: its configuration makes {name} more than 2^53, which is absurd; "
                "fetch or copy it again"
            )


def _limits(what: str) -> AbstractContextManager[None]:
    return bounded(what, seconds=_BUILD_LIMIT_S, memory_bytes=_BUILD_MEMORY_BYTES)


@contextmanager
def _tracing(source: ModelSource) -> Iterator[None]:
    """Bound mlx-lm's classes in time and memory, and turn their errors into ModelFormatError."""
    with _naming_misfits(source), _limits("building the model"):
        yield


@contextmanager
def _naming_misfits(source: ModelSource) -> Iterator[None]:
    """Turn errors of mlx-lm's classes into ModelFormatError."""
    try:
        yield
    except MachdError:
        raise
    except Exception as error:
        raise ModelFormatError(
            f"{source.path.name}: weights and configuration do not fit together: {printable(error)}"
        ) from error


def native_modes() -> dict[str, bool]:
    """Return for each quantisation mode whether this backend computes with it; takes a few milliseconds."""
    return {one.mode: multiplies(one) for one in _MODES}
