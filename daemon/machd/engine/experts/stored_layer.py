"""The experts of one mixture-of-experts layer: their parameters, and where the checkpoint's files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Location:
    """The first byte of one expert's parameter, counted from the beginning of its file."""

    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter that every expert of a layer has, in the same shape.

    Attributes:
        projection: Name of the projection within its layer, such as ``gate_proj``.
        name: ``weight``, ``scales``, ``biases``, ``bias`` or ``global_scale``.
        stored_dtype: The dtype in the file.
        dtype: The dtype in memory; reading converts to it.
    """

    projection: str
    name: str
    shape: tuple[int, ...]
    stored_dtype: mx.Dtype
    dtype: mx.Dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of one expert in the file."""
        return prod(self.shape) * self.stored_dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of one expert in memory."""
        return prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The experts of one layer as the files hold them.

    Attributes:
        path: Path of the switch layer in the model, such as ``model.layers.3.mlp.switch_mlp``.
        locations: For each parameter, its location for each expert, in the order of the experts.
    """

    path: str
    locations: Mapping[ExpertParameter, tuple[Location, ...]]

    @property
    def parameters(self) -> tuple[ExpertParameter, ...]:
        """Parameters of each expert."""
        return tuple(self.locations)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(next(iter(self.locations.values())))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return sum(parameter.nbytes for parameter in self.locations)

    @property
    def stored_entry_bytes(self) -> int:
        """Bytes of one expert in the files."""
        return sum(parameter.stored_bytes for parameter in self.locations)
