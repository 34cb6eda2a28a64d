"""A checkpoint, opened: lazy models can be built from it, and no weight is read.

Serving and checking a model both begin here. They differ in whether the checkpoint's own code may run, and in the time
and memory limits of building the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from machd.engine.backend.model_files import own_code_files
from machd.engine.backend.own_code import OwnCode
from machd.engine.experts.tensor_origins import TensorOrigins
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.vision.media_processor import ProcessorFiles

Bounds: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Limits time and memory of a block of code; takes its name, such as ``building the model``."""

ReadLeaf: TypeAlias = Callable[[str, Module], int]
"""Replaces a leaf's lazy arrays with the stored ones, by its path; returns the stored bytes."""

_LANGUAGE_PATH = "language_model."
"""Path of the language model inside one that takes images."""


def weights_bytes(module: Module) -> int:
    """Sum the sizes of a module's parameters, computed or not yet."""
    flat = tree_flatten(module.parameters())
    assert isinstance(flat, list)
    return sum(array.nbytes for _, array in flat)


def leave_to_mlx(_path: str, leaf: Module) -> int:
    """Leave a leaf's arrays to mlx, which reads them when they are computed; returns the stored bytes."""
    return weights_bytes(leaf)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model whose arrays are not read yet, and the process of its images; None for a model that takes text only."""

    model: Module
    architecture: str
    processor: ProcessorFiles | None = None

    @property
    def native_path(self) -> str:
        """Path of the part that machd's own kernels may compute; empty for the whole.

        An encoder's memory is estimated from its graph, which describes only mlx's own operations.
        """
        return "" if self.processor is None else _LANGUAGE_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(ABC):
    """A checkpoint from which lazy models can be built.

    Attributes:
        is_repacked: Packed weights that ``model.dtype`` unpacks may be quantised anew.
        own_code: What becomes of Python code of the checkpoint's own.
        bounds: Of building the model.
    """

    is_repacked: ClassVar[bool] = False
    checkpoint: Checkpoint
    own_code: OwnCode
    bounds: Bounds

    @abstractmethod
    def build(self, recorder: TensorOrigins | None = None) -> BuiltModel:
        """Build the model with lazy arrays, none of which is read.

        Args:
            recorder: Records the stored tensor of each array. The checkpoint's own code cannot be recorded, and does not run.

        Raises:
            ModelError: One of its kinds: configuration and tensors do not fit together.
        """

    @abstractmethod
    def reading(self) -> AbstractContextManager[ReadLeaf]:
        """Open the weights for reading.

        Raises:
            ModelFormatError: The weights could not be read; raised at the end of the block.
        """

    def own_files(self) -> tuple[Path, ...]:
        """List the checkpoint's own Python files if code of them may have run, which may have changed any class."""
        has_run = self.own_code is OwnCode.TRUSTED and self.checkpoint.code_files
        return tuple(own_code_files(self.checkpoint.path)) if has_run else ()

    def keep_as_stored(self, model: Module) -> None:  # noqa: B027 - most formats have nothing to do
        """Give lazy weights the dtypes that they have where none is converted; none are read."""
