"""Read a GGUF file's header, and check that its family, types and tensors are those that machd reads; without mlx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from machd.engine.backend.inspection_bounds import check_counts, check_finite
from machd.engine.backend.model_files import shortened
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.known import FAMILIES
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.engine.loading.formats.gguf.packings import is_readable
from machd.engine.loading.formats.gguf.parts import read_parts
from machd.errors import ModelArchitectureError, ModelFormatError


def read_gguf(path: Path, bounds: Callable[[str], AbstractContextManager[None]]) -> Checkpoint:
    """Read and check a file's header, under limits of time and memory.

    Raises:
        ModelArchitectureError: The file's architecture is none that machd reads.
        ModelFormatError: The file is damaged, or holds what machd does not read.
    """
    with bounds("reading the header"):
        header = read_parts(path)
    check_gguf(header)
    return Checkpoint(
        path=header.path,
        config=gguf_config(header),
        weight_files=tuple(sorted({header.path, *(one.path for one in header.tensors)})),
        stored_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        header=header,
    )


_NO_MODELS: Mapping[str, str] = {
    "adapter": "a LoRA adapter: serve its base model, and name the adapter in the settings, as `path` of a table "
    "[adapters.NAME]",
    "imatrix": "an importance matrix, which quantising reads: give the file of the model",
    "mmproj": "the encoder of images or sound alone: give the file of the language model, which serves text; for images "
    "take the model in mlx-vlm layout",
}
"""By ``general.type``: what lies in a GGUF file that is no model."""


def _refuse_no_model(header: GgufHeader) -> None:
    kind = header.text("general.type", "model")
    if header.text("general.architecture", "") == "clip":
        kind = "mmproj"
    if kind in _NO_MODELS:
        raise ModelFormatError(f"{header.path.name} is {_NO_MODELS[kind]}")


_VISION_TENSORS = ("v.", "mm.")
"""How names of tensors of vision begin, which Ollama puts into the file of the language model."""


def family_of(header: GgufHeader) -> Family:
    """Find the family of a file.

    Raises:
        ModelArchitectureError: machd does not read it.
    """
    architecture = header.text("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelArchitectureError(
            f"{header.path.name} holds the architecture {shortened(architecture)}; of GGUF files machd reads "
            f"{', '.join(sorted(FAMILIES))}: take the model in mlx-lm layout (safetensors) instead"
        )
    return family if family.variant is None else family.variant(header)


def gguf_config(header: GgufHeader) -> dict[str, object]:
    """Make the configuration that mlx-lm's ``ModelArgs.from_dict`` takes.

    Raises:
        ModelArchitectureError: machd does not read the file's family.
        ModelFormatError: A key is missing, or asks for what mlx-lm's architecture has not.
    """
    family = family_of(header)
    return {"model_type": family.model_type} | family.config(header)


def check_gguf(header: GgufHeader) -> None:
    """Refuse what cannot become a model of mlx-lm's, before anything large is read.

    Raises:
        ModelArchitectureError: Another family.
        ModelFormatError: No model at all, a tensor type that machd does not read, a tensor that the family has not, or more
            layers than tensors.
    """
    name = header.path.name
    _refuse_no_model(header)
    family = family_of(header)
    for tensor in header.tensors:
        if not is_readable(tensor.type_name):
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is stored as {tensor.type_name}, which is no type of weights"
            )
        if len(tensor.shape) == 1 and tensor.block_elements > 1:
            raise ModelFormatError(
                f"{name}: {shortened(tensor.name)} is a vector stored as {tensor.type_name}; no converter writes that"
            )
        if tensor.name.startswith(_VISION_TENSORS):
            raise ModelFormatError(
                f"{name} holds the vision part of a model, too ({shortened(tensor.name)}); take the language model's own file, "
                "or the model in mlx-lm layout (safetensors)"
            )
        if family.needs(header, tensor.name) and not family.parameters(tensor.name):
            raise ModelFormatError(
                f"{name}: {family.architecture} has no tensor {shortened(tensor.name)}"
            )
    if not header.has("token_embd.weight"):
        raise ModelFormatError(f"{name} holds no token_embd.weight; it is no language model")
    config = gguf_config(header)
    check_counts(config, len(header.tensors))
    check_finite(config)
