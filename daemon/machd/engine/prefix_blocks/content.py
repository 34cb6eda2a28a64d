"""What a block holds, as plain arrays that any thread may write to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

PlainArray = NDArray[Any]
"""An array of numpy's, of a type that safetensors has: floats, integers, booleans."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Arrays by name, and what else has to be known to make a block of them.

    Attributes:
        arrays: Of numpy's own memory, and nobody writes to them any more.
        notes: Short texts that come back as they were.
    """

    arrays: Mapping[str, PlainArray]
    notes: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """What the arrays take."""
        return sum(array.nbytes for array in self.arrays.values())
