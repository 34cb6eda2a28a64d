"""Caches of keys and values in a KV format: their base, and one row's replacement of mlx-lm's ``KVCache``.

A prompt is computed in a quantized cache, and a row with a lane of its own stays in it. All keys and
values are encoded when written and decoded when read, the newest too: a token sees the same past however
the prompt was cut, and whether it was computed or came from a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import PLAIN, KvFormat, KvWidths
from machd.engine.protocol.slab_size import COLUMN_STEP


class FormatCache(ABC):
    """One layer's keys and values in a KV format, with the attributes that mlx-lm's models use."""

    def __init__(self, kv_format: KvFormat) -> None:
        self.kv_format = kv_format
        self._widths: KvWidths | None = None

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """[rows, heads, columns, n] each, with room to spare; none before the first write."""

    @property
    def keys(self) -> mx.array | None:
        """The first array. Models that tie arrays together with ``mx.depends`` ask for it."""
        return self.arrays[0] if self.arrays else None

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays[0] = array

    @property
    def values(self) -> mx.array | None:
        """The last array; see :attr:`keys`."""
        return self.arrays[-1] if self.arrays else None

    @values.setter
    def values(self, array: mx.array) -> None:
        # A model that never reads its values may replace them, so that no graph of them is kept.
        # In a quantized format the last array is part of the keys as well.
        if self.kv_format is PLAIN:
            self.arrays[-1] = array

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays that a forward pass has to compute."""
        return tuple(self.arrays)

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare columns included."""
        return sum(array.nbytes for array in self.state)

    def empty(self) -> bool:
        """Return True before the first write."""
        return not self.arrays

    def row_arrays(self, row: int, begin: int = 0) -> tuple[mx.array, ...]:
        """Return a row's arrays [1, heads, columns, n] from a position on; none before the first write."""
        return tuple(array[row : row + 1, :, begin:] for array in self.arrays)

    def decoded(self, begin: int, end: int, width: int) -> tuple[mx.array, mx.array]:
        """Decode rows ``begin`` to ``end`` up to a column: [rows, heads, width, head_dim] each."""
        seen = [array[begin:end, :, :width] for array in self.arrays]
        return self.kv_format.decode(seen, self._known_widths)

    @property
    def _known_widths(self) -> KvWidths:
        assert self._widths is not None, "a layer is written before it is read"
        return self._widths


def format_of(cache: Cache) -> KvFormat:
    """Return the format of a cache's keys and values."""
    return cache.kv_format if isinstance(cache, FormatCache) else PLAIN


class QuantizedCache(FormatCache):
    """One layer's keys and values of one row."""

    def __init__(self, kv_format: KvFormat) -> None:
        super().__init__(kv_format)
        self._arrays: list[mx.array] = []
        self.offset = 0

    @property
    def arrays(self) -> list[mx.array]:
        """[1, heads, columns, n] each, with room to spare; none before the first write."""
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: list[mx.array]) -> None:
        self._arrays = arrays

    def size(self) -> int:
        """Return the number of positions."""
        return self.offset

    def is_trimmable(self) -> bool:
        """Return True: a position's columns are its own."""
        return True

    def trim(self, n: int) -> int:
        """Remove the last positions; returns how many."""
        trimmed = min(self.offset, n)
        self.offset -= trimmed
        return trimmed

    def make_mask(self, *args: object, **kwargs: object) -> mx.array | str | None:
        """Make the mask that mlx-lm's own cache makes."""
        from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
            create_attention_mask,
        )

        mask: mx.array | str | None = create_attention_mask(*args, offset=self.offset, **kwargs)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write tokens [1, heads, tokens, n] and read all positions [1, heads, positions, n], encoded and decoded."""
        begin, end = self.offset, self.offset + keys.shape[2]
        new = self.kv_format.encode(keys, values)
        self._make_room(new, end)
        for array, added in zip(self.arrays, new, strict=True):
            if added.size:
                array[:, :, begin:end] = added
        self._widths = KvWidths.of(keys, values)
        self.offset = end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Read all positions; see :meth:`update_and_fetch`."""
        return self.decoded(0, 1, self.offset)

    def _make_room(self, like: Sequence[mx.array], columns: int) -> None:
        held = self.arrays[0].shape[2] if self.arrays else 0
        if columns <= held:
            return
        missing = -(-(columns - self.offset) // COLUMN_STEP) * COLUMN_STEP
        rooms = [mx.zeros((*one.shape[:2], missing, one.shape[3]), dtype=one.dtype) for one in like]
        if not self.arrays:
            self.arrays = rooms
            return
        self.arrays = [
            mx.concatenate([array[:, :, : self.offset], room], axis=2)
            for array, room in zip(self.arrays, rooms, strict=True)
        ]
