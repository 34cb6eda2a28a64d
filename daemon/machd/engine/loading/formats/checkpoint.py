"""A checkpoint: what a model's files say of it, read and checked without mlx and without a weight.

Serve, its front and check read a model's files here, and only here. Of a directory ``config.json`` and the headers of the
weight files tell what would make loading fail, crash or run foreign code; :mod:`machd.engine.loading.formats.gguf.reading`
reads the header of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machd.engine.backend.inspection_bounds import check_counts, check_finite
from machd.engine.backend.model_files import read_object, shortened
from machd.engine.backend.own_code import OwnCode, auto_map_files, is_runnable
from machd.engine.backend.safetensors_header import (
    MAX_TENSORS,
    SafetensorsHeader,
    StoredTensor,
    read_safetensors_header,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.vision.families import why_refused
from machd.engine.vision.mlx_vlm_import import has_vision, is_installed
from machd.errors import ModelCodeError, ModelFormatError, ModelNotFoundError, SettingsError
from machd.installed import how_to_install

_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_MAX_NAME_CHARS = 80
_INDEX = "model.safetensors.index.json"

UNBOUNDED_CONTEXT_TOKENS = 32_768
"""Context length of a model without a limit, such as a recurrent one, unless
``model.max_context_tokens`` is set."""

_LARGEST_CONTEXT_TOKENS = 1 << 53
"""Largest integer that every JSON parser reads exactly."""

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
    "seq_length",
)

_NO_VISION_WEIGHTS = (
    "config.json names a vision tower, and the weights hold none (mlx_lm.convert leaves it out), so the model "
    "serves text only; for images take a checkpoint that mlx_vlm.convert made"
)

_NOT_INSTALLED = (
    "the checkpoint has a vision tower, and the extra vision is not installed, so it serves text only; "
    "for images: {how}"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory or a GGUF file whose parts agree with each other.

    Attributes:
        path: Of the directory, or of the file.
        config: What mlx-lm builds the model of: ``config.json``, or what a GGUF header has in its place.
        weight_files: The files of the weights, sorted.
        stored_bytes: Size of all tensors as stored.
        tensors: All tensors by name, each with its file; empty for a GGUF file, whose tensors mlx cannot take as they lie.
        code_files: Files that name Python code of the checkpoint's own; empty for most.
        has_runnable_code: Code that they name is there, or may be.
        header: A GGUF file's header, which holds the tokenizer; None for a directory.
    """

    path: Path
    config: dict[str, object]
    weight_files: tuple[Path, ...]
    stored_bytes: int
    tensors: Mapping[str, tuple[Path, StoredTensor]] = field(default_factory=dict)
    code_files: tuple[str, ...] = ()
    has_runnable_code: bool = False
    header: GgufHeader | None = None

    @property
    def model_type(self) -> str:
        """The architecture's name in ``config.json``."""
        return str(self.config["model_type"])

    @property
    def has_own_model(self) -> bool:
        """True if the model is built by Python code of the checkpoint's."""
        return "model_file" in self.config

    @property
    def takes_images(self) -> bool:
        """True if the model is served with its vision tower."""
        return has_vision(self.config) and not self._why_without_tower() and not self.has_own_model

    @property
    def leaves_experts_on_disk(self) -> bool:
        """True if experts can be read from their files one by one, where the model has some.

        Those of a GGUF file lie in blocks that mlx does not compute with. Code of the checkpoint's own cannot be recorded while it
        builds the model, and a model with vision is built by mlx-vlm.
        """
        return bool(self.tensors) and not self.takes_images and not self.has_own_model

    @property
    def vision_reason(self) -> str:
        """Why a checkpoint with a vision tower is served without it; empty for all others."""
        return self._why_without_tower() if has_vision(self.config) else ""

    def _why_without_tower(self) -> str:
        if reason := why_refused(self.config):
            return (
                f"the checkpoint has a vision tower, but images are not served: {reason}; it serves text only, and "
                "docs/concepts/vision.md lists the families that take images"
            )
        if not any("vision" in name or "visual" in name for name in self.tensors):
            return _NO_VISION_WEIGHTS
        return "" if is_installed() else _NOT_INSTALLED.format(how=how_to_install("vision"))


def read_directory(path: Path, own_code: OwnCode) -> Checkpoint:
    """Read the configuration and every weight file's header.

    Raises:
        ModelNotFoundError: A file that must be there is not.
        ModelFormatError: A file is corrupt, truncated, or of a format that machd does not read.
        ModelCodeError: Python code of the checkpoint's own would have to run, and that is not allowed.
    """
    config = _configuration(path)
    if own_code is OwnCode.REFUSED:
        refuse_own_model(config)
    weight_files = _weight_files(path)
    headers: list[SafetensorsHeader] = []
    tensor_count = 0
    for file in weight_files:
        headers.append(read_safetensors_header(file, MAX_TENSORS - tensor_count))
        tensor_count += len(headers[-1].tensors)
    check_counts(config, tensor_count)
    check_finite(config)
    named = auto_map_files(path)
    checkpoint = Checkpoint(
        path=path,
        config=config,
        weight_files=weight_files,
        stored_bytes=sum(header.tensor_bytes for header in headers),
        tensors={
            name: (file, tensor)
            for file, header in zip(weight_files, headers, strict=True)
            for name, tensor in header.tensors.items()
        },
        code_files=(*_own_model(config), *(f"{shortened(name)} (auto_map)" for name in named)),
        has_runnable_code="model_file" in config
        or any(is_runnable(path, one) for one in named.values()),
    )
    _refuse_own_code(checkpoint, own_code)
    return checkpoint


def _refuse_own_code(checkpoint: Checkpoint, own_code: OwnCode) -> None:
    """Refuse code that would build the model or process its images, before mlx-vlm and transformers see it."""
    name = checkpoint.path.name
    if checkpoint.has_own_model and own_code is OwnCode.NEVER_RUN:
        # The error does not ask for a flag that has no effect on a check.
        raise ModelCodeError(
            f"{name} is built by Python code of its own, which is never run to check "
            "it: whether it runs here is not known; read the file that config.json names as "
            "model_file, and serve it with `--model-trust-remote-code` if you trust it"
        )
    is_trusted = own_code is OwnCode.TRUSTED
    if checkpoint.has_runnable_code and not is_trusted and checkpoint.takes_images:
        raise ModelCodeError(
            f"{name} brings Python code of its own for its images, named in "
            f"{checkpoint.code_files[0]}: read it, and serve the model with `--model-trust-remote-code` if "
            "you trust it, or try it without its .py files, which few families need"
        )


def refuse_own_model(config: Mapping[str, object]) -> None:
    """Refuse a model that is built by Python code of the checkpoint's.

    Raises:
        ModelCodeError: ``config.json`` names such code as ``model_file``.
    """
    for name in _own_model(config):
        raise ModelCodeError(
            f"the checkpoint wants to run {name}, Python code of its own; read it, and pass "
            "`--model-trust-remote-code` if you trust it"
        )


def _configuration(path: Path) -> dict[str, object]:
    config = read_object(path / "config.json")
    if config is None and (adapter := _adapter_file(path)) is not None:
        raise ModelNotFoundError(
            f"{path.name} holds an adapter ({adapter}) and no model: serve its base model, and name the adapter in the "
            "settings, as `path` of a table [adapters.NAME]"
        )
    if config is None:
        raise ModelNotFoundError(
            f"{path.name} holds no config.json; give a directory in mlx-lm layout (config.json, "
            "model*.safetensors, tokenizer files)"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFormatError("config.json names no model_type; this is no model of mlx-lm's")
    # The name goes into messages, reports and metrics.
    if len(model_type) > _MAX_NAME_CHARS:
        raise ModelFormatError(
            f"config.json names a model_type of {len(model_type):,} characters; fetch or copy it "
            "again"
        )
    return config


def _adapter_file(path: Path) -> str | None:
    """The file that makes a directory one of mlx-lm's or peft's adapters; None where there is none."""
    names = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")
    return next((name for name in names if (path / name).is_file()), None)


def _weight_files(path: Path) -> tuple[Path, ...]:
    files = tuple(sorted(path.glob("model*.safetensors")))
    index = read_object(path / _INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFormatError(f"{_INDEX} has no weight_map")
        present = {file.name for file in files}
        absent = sorted({str(name) for name in weight_map.values()} - present)
        if absent:
            raise ModelNotFoundError(
                f"{shortened(absent[0])} is missing ({len(absent)} of the files that {_INDEX} names); fetch "
                "the model again"
            )
    if files:
        return files
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ModelFormatError(
            f"the weights are pickled ({pickled[0]}), and loading them would run whatever they "
            "hold: convert them with `mlx_lm.convert`, or take a safetensors version"
        )
    raise ModelNotFoundError(
        f"{path.name} holds no model*.safetensors file; where are the weights?"
    )


def _own_model(config: Mapping[str, object]) -> Iterator[str]:
    if "model_file" in config:
        yield shortened(str(config["model_file"]))


def context_tokens(config: Mapping[str, object], max_context_tokens: int | None) -> int:
    """Find the positions that a prompt and its completion share.

    Raises:
        SettingsError: The user's limit is above the model's.
        ModelFormatError: The model's limit is out of bounds.
    """
    text_config = config.get("text_config")
    places = (config, text_config) if isinstance(text_config, dict) else (config,)
    values = (place.get(key) for place in places for key in _CONTEXT_KEYS)
    lengths = (one for one in values if isinstance(one, int) and not isinstance(one, bool))
    own = next((one for one in lengths if one > 0), None)
    if own is not None and own > _LARGEST_CONTEXT_TOKENS:
        raise ModelFormatError(
            "the configuration says a context of more than 2^53 tokens, which is absurd; fetch or copy it again"
        )
    if max_context_tokens is None:
        return own or UNBOUNDED_CONTEXT_TOKENS
    if own is not None and max_context_tokens > own:
        raise SettingsError(
            [f"model.max_context_tokens: the model has {own}, fewer than {max_context_tokens}"]
        )
    return max_context_tokens
