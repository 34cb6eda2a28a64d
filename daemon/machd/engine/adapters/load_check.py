"""A pass of one random row through a layer that has got adapters, against the weights of their files.

A layer keeps adapters in another form than their files: turned, scaled, padded, packed, beside those of the layers that were merged
with it. What the kernels make of that form has to be what the files say. Whether the files say what was trained is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.adapters.adapted_layer import LayerAdapters
from machd.engine.adapters.linear_layers import LinearPart
from machd.engine.adapters.low_rank import LowRank
from machd.engine.kernels.pass_adapters import AdapterKey, PassAdapters
from machd.errors import AdapterError
from machd.request.adapter import Adapter

_Floats: TypeAlias = NDArray[np.float32]

_ROUNDINGS = 4
"""Roundings to the dtype of adapters that may add up in an output."""

_SUMMING = 1e-4
"""Rounding of long sums in float32, of the lengths of their vectors."""

_MERGED_OUTPUTS = 16
"""Outputs with a magnitude whose weights are merged; merging all takes as long as the load."""


@dataclass(frozen=True, slots=True)
class PartWeights:
    """What files say of a part of a layer.

    Attributes:
        path: Its path in the model.
        part: The part.
        low_ranks: Of each adapter that changes it; at least one.
    """

    path: str
    part: LinearPart
    low_ranks: Sequence[tuple[Adapter, LowRank]]

    @property
    def has_magnitudes(self) -> bool:
        """True for an adapter of DoRA, which is alone."""
        return self.low_ranks[0][1].magnitude is not None


def check_layer(layer: LayerAdapters, key: AdapterKey, changed: Sequence[PartWeights]) -> None:
    """Compare what a layer makes of a row with adapters and what it has to.

    Args:
        layer: Of the model; it has the adapters.
        key: Theirs.
        changed: Its parts that they change.

    Raises:
        AdapterError: An output is another.
    """
    limits = mx.finfo(layer.dtype)
    random = np.random.default_rng(0)
    x = random.standard_normal(layer.inputs, np.float32)
    y = random.standard_normal(layer.outputs, np.float32)
    added, size = np.zeros_like(y), np.zeros_like(y)
    for one in changed:
        own = slice(one.part.begin, one.part.end)
        added[own], size[own] = _added(one, x, float(limits.smallest_normal))
        # As large as what is added, so that rounding of one hides no fault of the other.
        y[own] *= float(np.sqrt(np.mean(added[own] ** 2))) or 1.0
    heard = layer.changed(mx.array(x)[None], mx.array(y)[None], PassAdapters([key]))
    heard = heard.astype(mx.float32)
    sampled = [_SampledOutputs(one) for one in changed if one.has_magnitudes]
    mx.eval(heard, [one.arrays for one in sampled])  # together: each wait costs as much as an array
    expected, compared = y + added, np.ones(y.shape, bool)
    for sample in sampled:
        compared[sample.one.part.begin : sample.one.part.end] = False
        at, bias, ratios = sample.at, sample.bias(), sample.ratios()
        compared[at] = True
        expected[at] = ratios * (expected[at] - bias) + bias
        size[at] = ratios * size[at] + np.abs(bias)
    apart = np.abs(np.array(heard)[0] - expected)
    tolerated = max(_SUMMING, _ROUNDINGS * float(limits.eps))
    is_right = apart <= tolerated * (np.abs(expected) + size)
    if not is_right[compared].all():
        wrong = int(np.flatnonzero(compared & ~is_right)[0])
        path = next(one.path for one in changed if wrong < one.part.end)
        names = " and ".join(repr(adapter.name) for adapter in key)
        raise AdapterError(
            f"with the adapter {names} {path} does not compute what its weights with the adapter in them would, which is a fault of machd"
        )


def _added(one: PartWeights, x: _Floats, least: float) -> tuple[_Floats, _Floats]:
    """Return what adapters add to the outputs of ``x``, and the size of numbers whose rounding may change it, both [outputs].

    Args:
        one: The part.
        x: [inputs].
        least: Below it, numbers are rounded as if they were as large.
    """
    added = np.zeros(one.part.shape.outputs, np.float32)
    size = np.full_like(added, least)
    for adapter, low_rank in one.low_ranks:
        scale = adapter.scale * low_rank.scale
        low = low_rank.a @ x
        added += scale * (low_rank.b @ low)
        lengths = (
            abs(scale) * np.sqrt(np.einsum("or,or->o", low_rank.b, low_rank.b))
            + least * len(low) ** 0.5
        )
        size += lengths * (
            np.linalg.norm(low) + np.linalg.norm(low_rank.a) + least * low_rank.a.size**0.5
        )
    return added, size


class _SampledOutputs:
    """Outputs of a part with magnitudes, with their base weights."""

    def __init__(self, one: PartWeights) -> None:
        """Take the first output, the last one, and some in between; nothing is computed yet."""
        self.one = one
        last = one.part.shape.outputs - 1
        self._outputs = np.linspace(0, last, _MERGED_OUTPUTS).astype(np.int64)
        self._weights = one.part.dense(self._outputs.tolist())
        bias = one.part.bias()
        self._bias = None if bias is None else bias.astype(mx.float32)

    @property
    def arrays(self) -> list[mx.array]:
        """What is to be computed before the others are asked for."""
        return [self._weights] if self._bias is None else [self._weights, self._bias]

    @property
    def at(self) -> NDArray[np.int64]:
        """Their places among the layer's outputs."""
        return self.one.part.begin + self._outputs

    def bias(self) -> _Floats:
        """Return their bias."""
        if self._bias is None:
            return np.zeros(self._outputs.shape, np.float32)
        return np.array(self._bias)[self._outputs]

    def ratios(self) -> _Floats:
        """Return their magnitudes by the lengths of their merged weights."""
        ((adapter, low_rank),) = self.one.low_ranks
        assert low_rank.magnitude is not None, "outputs of others are not sampled"
        scale = adapter.scale * low_rank.scale
        merged = np.array(self._weights) + scale * (low_rank.b[self._outputs] @ low_rank.a)
        return np.asarray(low_rank.magnitude[self._outputs] / np.linalg.norm(merged, axis=1))
