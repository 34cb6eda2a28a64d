"""A model's files, opened: read and checked, and no weight read.

Serving and checking a model both begin here. What differs between them is given: whether the checkpoint's own code may
run, and the bounds of what trusts a stranger's numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TypeAlias

from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.engine.backend.model_files import own_code_files
from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.gguf_header import GgufHeader
from machd.engine.loading.source import ModelSource
from machd.engine.vision.media_processor import ProcessorFiles

Bounds: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Limits time and memory of a block, which is named, such as ``building the model``."""

ReadLeaf: TypeAlias = Callable[[str, Module], int]
"""Puts the stored arrays in the place of a leaf's lazy ones, by its path; returns their bytes as stored."""

_LANGUAGE_PATH = "language_model."
"""Path of the language model inside one that takes images."""


def weights_bytes(module: Module) -> int:
    """Sum the sizes of a module's parameters, computed or not yet."""
    flat = tree_flatten(module.parameters())
    assert isinstance(flat, list)
    return sum(array.nbytes for _, array in flat)


def leave_to_mlx(_path: str, leaf: Module) -> int:
    """Leave a leaf's arrays to mlx, which reads one when it is computed; returns their bytes as stored."""
    return weights_bytes(leaf)


class OwnCode(Enum):
    """What becomes of Python code that a checkpoint brings."""

    REFUSED = auto()
    """A model that needs it is refused; the error names the setting that trusts it."""

    TRUSTED = auto()
    """It runs where the model needs it."""

    NEVER_RUN = auto()
    """Files that name it are read all the same, whatever the settings trust."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model whose arrays are not read yet, and the process of its images; None for a model that takes text only."""

    model: Module
    architecture: str
    processor: ProcessorFiles | None = None

    @property
    def native_path(self) -> str:
        """Path of the part that machd's own kernels may compute; empty for the whole.

        What an encoder takes is read from its graph, in which mlx describes its own operations only.
        """
        return "" if self.processor is None else _LANGUAGE_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(ABC):
    """A model's files, from which lazy models can be built.

    Attributes:
        config: What mlx-lm builds the model of, as ``config.json`` has it.
        tensors: Each tensor's place in a file, by name; None for a format whose tensors mlx cannot take as they lie.
        is_repacked: Packed weights that ``model.dtype`` unpacks may be quantised anew.
        takes_images: The model is built with its vision tower.
        vision_reason: Why a checkpoint with a vision tower is served without it; empty for all others.
        code_files: Files that name Python code of the checkpoint's own.
        has_own_model: Such code builds the model.
    """

    source: ModelSource
    files: Checkpoint | GgufHeader
    config: Mapping[str, object]
    stored_bytes: int
    weight_files: tuple[Path, ...]
    own_code: OwnCode
    bounds: Bounds
    tensors: Mapping[str, tuple[Path, StoredTensor]] | None = None
    is_repacked: bool = False
    takes_images: bool = False
    vision_reason: str = ""
    code_files: tuple[str, ...] = ()
    has_own_model: bool = False

    @abstractmethod
    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model with lazy arrays, none of which is read.

        Args:
            recorder: Records which tensors the arrays are. Code of the checkpoint's own cannot be recorded, and does not run.

        Raises:
            ModelError: One of its kinds: configuration and tensors do not fit together.
        """

    @abstractmethod
    def reading(self) -> AbstractContextManager[ReadLeaf]:
        """Open the weights for reading.

        Raises:
            ModelFormatError: At the end of the block: they could not be read in it.
        """

    def own_files(self) -> tuple[Path, ...]:
        """List the checkpoint's own Python files if code of them may have run, which may have changed any class."""
        has_run = self.own_code is OwnCode.TRUSTED and (self.has_own_model or self.code_files)
        return tuple(own_code_files(self.source.path)) if has_run else ()

    def keep_as_stored(self, model: Module) -> None:  # noqa: B027 - most formats have nothing to do
        """Give lazy weights the dtypes that they have where none is converted; none are read."""
