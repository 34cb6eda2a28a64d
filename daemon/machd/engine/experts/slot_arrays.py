"""Memory of equally shaped experts: an array for each parameter, with one row for each slot."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from machd.engine.experts.dtype_conversion import Bytes
from machd.engine.experts.stored_layer import ExpertParameter

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class SlotArrays:
    """Slots of equal size, written in place by the CPU and computed with by mlx.

    Writing in place needs memory that both can address: the CPU's own, or Metal's unified memory.

    Attributes:
        arrays: By projection and parameter name, [slots, *shape].
    """

    def __init__(self, parameters: Sequence[ExpertParameter], slots: int) -> None:
        """Allocate all slots, filled with zeros."""
        self.slots = slots
        self.arrays: dict[tuple[str, str], mx.array] = {}
        self._rows: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = []
        for parameter in parameters:
            # numpy has no bfloat16, so it writes into a view of unsigned integers of the same size.
            integers = mx.zeros((slots, *parameter.shape), dtype=_UNSIGNED[parameter.dtype.size])
            array = integers.view(parameter.dtype)
            mx.eval(integers, array)
            self.arrays[parameter.projection, parameter.name] = array
            self._rows.append(np.asarray(integers).reshape(slots, -1).view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(rows.nbytes for rows in self._rows)

    def slot_bytes(self, slot: int) -> list[Bytes]:
        """Return the writable bytes of a slot, one array for each parameter."""
        return [rows[slot] for rows in self._rows]
