"""The ranks of one model, and the two collectives that machd itself needs of them.

Everything goes over mx.distributed: ring on Ethernet and loopback, jaccl on Thunderbolt, nccl on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

_FRAME_BYTES = 1024
"""What one collective takes of a message; decode steps of 16 rows fit."""

_LENGTH_BYTES = 4

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class RankGroup:
    """This process's place among the ranks. Used on the thread that computes."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        """This process's number; rank 0 leads."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def tell(self, message: bytes) -> bytes:
        """Return the message of rank 0; what the other ranks pass does not count.

        Goes from each rank to the next. Waits for what was dispatched before on this rank, and rank 0 for no
        other.
        """
        head = np.zeros(_FRAME_BYTES, dtype=np.uint8)
        if self.leads:
            begin = len(message).to_bytes(_LENGTH_BYTES, "little") + message
            begin = begin[:_FRAME_BYTES]
            head[: len(begin)] = np.frombuffer(begin, dtype=np.uint8)
        first = self._passed_on(head)
        length_bytes = int.from_bytes(first[:_LENGTH_BYTES], "little")
        told = first[_LENGTH_BYTES : _LENGTH_BYTES + length_bytes]
        if length_bytes > len(told):
            rest = np.zeros(length_bytes - len(told), dtype=np.uint8)
            if self.leads:
                rest[:] = np.frombuffer(message[len(told) :], dtype=np.uint8)
            told += self._passed_on(rest)
        return told

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every rank, by rank; as many on each. Waits for all ranks."""
        own = mx.array([list(values)], dtype=mx.int64)
        every = mx.distributed.all_gather(own, group=self.group, stream=mx.cpu)
        rows: list[list[int]] = every.tolist()  # type: ignore[assignment]
        return rows

    def _passed_on(self, array: Bytes) -> bytes:
        """Return rank 0's array, as long on every rank."""
        frame = mx.array(array)
        if not self.leads:
            frame = mx.distributed.recv_like(frame, self.rank - 1, group=self.group, stream=mx.cpu)
        if self.rank + 1 < self.size:
            frame = mx.distributed.send(frame, self.rank + 1, group=self.group, stream=mx.cpu)
        mx.eval(frame)
        return np.array(frame).tobytes()
