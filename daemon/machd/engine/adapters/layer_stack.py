"""Low-rank weights of all adapters in memory for one linear layer, laid out so that each row chooses its own by an index."""

from __future__ import annotations

import mlx.core as mx

from machd.engine.adapters.linear_layers import LinearPart
from machd.engine.kernels.pass_adapters import AdapterKey

_NOTHING = 0
"""Place of zeros, for a row whose adapter leaves the layer as it is."""


class LayerStack:
    """Adapters of one linear layer, padded with zeros to the largest rank.

    Attributes:
        part: The layer.
        a: [places, rank, inputs].
        b: [places, outputs, rank], with the scale.
        ratios: Of DoRA, [places, outputs]: what the layer's own outputs count for, 1 without; None if no adapter has any.
        offsets: [places, outputs], what the ratio is to leave of the bias; None without a bias or ratios.
    """

    def __init__(self, part: LinearPart, dtype: mx.Dtype) -> None:
        """Begin without adapters; weights are held in ``dtype``."""
        self.part = part
        self.a = mx.zeros((1, 0, part.shape.inputs), dtype=dtype)
        self.b = mx.zeros((1, part.shape.outputs, 0), dtype=dtype)
        self.ratios: mx.array | None = None
        self.offsets: mx.array | None = None
        self._ranks: dict[AdapterKey, int] = {}  # in the order of places, from 1 on

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def is_empty(self) -> bool:
        """True if no adapter changes the layer."""
        return not self._ranks

    @property
    def _arrays(self) -> list[mx.array]:
        arrays = (self.a, self.b, self.ratios, self.offsets)
        return [array for array in arrays if array is not None]

    def has(self, key: AdapterKey) -> bool:
        """Return True if a row's adapters change the layer."""
        return key in self._ranks

    def place(self, key: AdapterKey) -> int:
        """Return the place of a row's adapters."""
        return 1 + list(self._ranks).index(key) if key in self._ranks else _NOTHING

    def add(
        self, key: AdapterKey, a: mx.array, b: mx.array, magnitude: mx.array | None = None
    ) -> None:
        """Append adapters.

        Args:
            key: It has no place yet.
            a: float32 [rank, inputs].
            b: float32 [outputs, rank], with the scale.
            magnitude: Of DoRA, float32 [outputs].
        """
        assert key not in self._ranks, "adapters are added once"
        ratio = None
        if magnitude is not None:
            ratio = length_ratio(self.part, a, b, magnitude)
            b = ratio[:, None] * b
        dtype, rank = self.a.dtype, max(self.a.shape[1], a.shape[0])
        self.a = mx.concatenate(
            [_to_rank(self.a, rank, 1), _to_rank(a[None].astype(dtype), rank, 1)]
        )
        self.b = mx.concatenate(
            [_to_rank(self.b, rank, 2), _to_rank(b[None].astype(dtype), rank, 2)]
        )
        self._append_ratio(ratio)
        self._ranks[key] = int(a.shape[0])
        mx.eval(self._arrays)

    def remove(self, key: AdapterKey) -> None:
        """Free the memory of adapters, if they change the layer; those behind them move."""
        place = self.place(key)
        if place == _NOTHING:
            return
        del self._ranks[key]
        stays = mx.array([one for one in range(len(self._ranks) + 2) if one != place])
        rank = max(self._ranks.values(), default=0)
        self.a = self.a[stays, :rank]
        self.b = self.b[stays, :, :rank]
        if self.ratios is not None:
            self.ratios = self.ratios[stays]
        if self.offsets is not None:
            self.offsets = self.offsets[stays]
        mx.eval(self._arrays)

    def changed(self, x: mx.array, y: mx.array, index: mx.array) -> mx.array:
        """Return the outputs of rows with their adapters.

        Args:
            x: [rows, tokens, inputs].
            y: Outputs of the base layer, [rows, tokens, outputs].
            index: uint32 [rows], their places.
        """
        x = x.astype(self.a.dtype)
        low = mx.gather_mm(x, self.a.swapaxes(1, 2), rhs_indices=index)  # [rows, tokens, rank]
        delta = mx.gather_mm(low, self.b.swapaxes(1, 2), rhs_indices=index)
        if self.ratios is None:
            return y + delta.astype(y.dtype)
        changed = y * self.ratios[index][:, None] + delta
        if self.offsets is not None:
            changed = changed + self.offsets[index][:, None]
        return changed.astype(y.dtype)

    def _append_ratio(self, ratio: mx.array | None) -> None:
        """Append an adapter's ratio, the first one behind ones for all others."""
        if ratio is None and self.ratios is None:
            return
        outputs, bias = self.part.shape.outputs, self.part.bias()
        if self.ratios is None:
            self.ratios = mx.ones((1 + len(self._ranks), outputs))
            if bias is not None:
                self.offsets = mx.zeros((1 + len(self._ranks), outputs))
        own = mx.ones((outputs,)) if ratio is None else ratio
        self.ratios = mx.concatenate([self.ratios, own[None]])
        if self.offsets is not None and bias is not None:
            self.offsets = mx.concatenate([self.offsets, bias_offset(bias, own)[None]])


def length_ratio(part: LinearPart, a: mx.array, b: mx.array, magnitude: mx.array) -> mx.array:
    """Return what a layer's own outputs count for with an adapter of DoRA: its magnitude over the length of the sum of both weights, [outputs]."""
    return magnitude / mx.linalg.norm(part.dense() + b @ a, axis=1)


def bias_offset(bias: mx.array, ratio: mx.array) -> mx.array:
    """Return what gives a layer back the part of its bias that a ratio of its outputs takes, float32 [outputs]."""
    return bias.astype(mx.float32) * (1 - ratio)


def _to_rank(array: mx.array, rank: int, axis: int) -> mx.array:
    """Pad an array with zeros to a rank."""
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, rank - array.shape[axis])
    return mx.pad(array, padding)
