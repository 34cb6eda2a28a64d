"""Memory for experts of one form: an array for each parameter, with a row for each expert."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from machd.engine.experts.conversion import Bytes
from machd.engine.experts.stored_layer import ParameterForm

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Slab:
    """Slots of equal size. The program writes a slot's bytes in place, and mlx computes with the arrays.

    Writing in place needs memory that both can reach: the CPU's, or Metal's, which is the same.
    """

    def __init__(self, forms: Sequence[ParameterForm], slots: int) -> None:
        """Take the memory, all of it.

        Args:
            forms: Parameters of each expert.
            slots: Experts that find room.
        """
        self.slots = slots
        self.arrays: dict[tuple[str, str], mx.array] = {}
        self._rows: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = []
        for form in forms:
            # numpy knows no bfloat16, so the bytes are those of integers of the same size.
            integers = mx.zeros((slots, *form.shape), dtype=_UNSIGNED[form.dtype.size])
            array = integers.view(form.dtype)
            mx.eval(integers, array)
            self.arrays[form.linear, form.name] = array
            self._rows.append(np.asarray(integers).reshape(slots, -1).view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(rows.nbytes for rows in self._rows)

    def room(self, slot: int) -> list[Bytes]:
        """The bytes of one slot, one array for each form."""
        return [rows[slot] for rows in self._rows]
