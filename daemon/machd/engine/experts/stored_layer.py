"""Where the experts of a mixture-of-experts layer lie in the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Place:
    """A range of bytes in a file: one parameter of one expert.

    Attributes:
        offset: Of the first byte, from the beginning of the file.
    """

    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class ParameterForm:
    """A parameter of one expert, as stored and as computed.

    Attributes:
        linear: Name of the projection within its layer, such as ``gate_proj``.
        name: ``weight``, ``scales``, ``biases``, ``bias`` or ``global_scale``.
        shape: Of one expert.
        stored_dtype: In the file.
        dtype: In memory; another one is converted to when an expert is read.
    """

    linear: str
    name: str
    shape: tuple[int, ...]
    stored_dtype: mx.Dtype
    dtype: mx.Dtype

    @property
    def elements(self) -> int:
        """Numbers in the parameter of one expert."""
        elements = 1
        for length in self.shape:
            elements *= length
        return elements

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return self.elements * self.stored_dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.elements * self.dtype.size


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The experts of one layer.

    Attributes:
        path: Of the module that holds the projections, such as ``model.layers.3.mlp.switch_mlp``.
        places: For each parameter, the place of each expert's, in the order of the experts.
    """

    path: str
    places: Mapping[ParameterForm, tuple[Place, ...]]

    @property
    def forms(self) -> tuple[ParameterForm, ...]:
        """Parameters of each expert."""
        return tuple(self.places)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(next(iter(self.places.values())))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return sum(form.nbytes for form in self.places)

    @property
    def stored_entry_bytes(self) -> int:
        """Bytes of one expert in the files."""
        return sum(form.stored_bytes for form in self.places)
