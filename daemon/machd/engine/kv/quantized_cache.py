"""Keys and values of one row in a format, where mlx-lm has its ``KVCache``.

A prompt is computed in one, and a row that decodes alone stays in it. What comes in is encoded, and
what goes out is decoded, that of the newest tokens too: so a token sees the same of its past however
the prompt was cut, and whether it was computed or came from a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv.kv_format import KvFormat, KvWidths

_STEP_TOKENS = 256
"""Columns are added in multiples of this, as mlx-lm's caches do."""


class QuantizedCache:
    """One layer's keys and values, in the shape that mlx-lm's models expect of a cache.

    Attributes:
        kv_format: What the arrays are of.
        arrays: [1, heads, columns, n] each; none before anything was written.
        offset: Positions.
    """

    def __init__(self, kv_format: KvFormat) -> None:
        """Begin without positions."""
        self.kv_format = kv_format
        self.arrays: list[mx.array] = []
        self.offset = 0
        self._widths: KvWidths | None = None

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
        """Refuse: a model that never reads its values may put others there, but keys need it."""

    @property
    def state(self) -> tuple[mx.array, ...]:
        """What a forward pass has to compute."""
        return tuple(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes held, room to spare included."""
        return sum(array.nbytes for array in self.arrays)

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.arrays

    def size(self) -> int:
        """Positions."""
        return self.offset

    def is_trimmable(self) -> bool:
        """Always: a position's columns are its own."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last positions; returns how many."""
        trimmed = min(self.offset, n)
        self.offset -= trimmed
        return trimmed

    def make_mask(self, *args: object, **kwargs: object) -> mx.array | str | None:
        """As of mlx-lm's own cache."""
        from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
            create_attention_mask,
        )

        mask: mx.array | str | None = create_attention_mask(*args, offset=self.offset, **kwargs)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write tokens and give all that there are.

        Args:
            keys: [1, heads, tokens, head_dim].
            values: The same, with a head_dim of its own.

        Returns:
            Keys and values [1, heads, positions, head_dim], encoded and decoded.
        """
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
        """All that there are; see :meth:`update_and_fetch`."""
        assert self._widths is not None, "a layer is written before it is read"
        seen = [array[:, :, : self.offset] for array in self.arrays]
        return self.kv_format.decode(seen, self._widths)

    def _make_room(self, like: Sequence[mx.array], columns: int) -> None:
        held = self.arrays[0].shape[2] if self.arrays else 0
        if columns <= held:
            return
        missing = -(-(columns - self.offset) // _STEP_TOKENS) * _STEP_TOKENS
        rooms = [mx.zeros((*one.shape[:2], missing, one.shape[3]), dtype=one.dtype) for one in like]
        if not self.arrays:
            self.arrays = rooms
            return
        self.arrays = [
            mx.concatenate([array[:, :, : self.offset], room], axis=2)
            for array, room in zip(self.arrays, rooms, strict=True)
        ]
