"""Weights of an adapter, as every format comes to: plain arrays, without mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

_Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A linear layer of the base model that adapters may change.

    Attributes:
        outputs: Numbers that it makes of a row.
        inputs: Numbers of a row.
        experts: Of a layer with one matrix for each expert; 0 for a plain one.
        heads: That its outputs are of, for projections of queries and keys; 0 for others, and where the model does not tell.
    """

    outputs: int
    inputs: int
    experts: int = 0
    heads: int = 0


BaseLayers: TypeAlias = Mapping[str, BaseLayer]
"""Linear layers by their paths in mlx-lm's module, such as ``model.layers.0.self_attn.q_proj``, before machd merges any."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one layer: ``scale * b @ (a @ x)``.

    Attributes:
        a: float32 [rank, inputs], or [experts, rank, inputs].
        b: float32 [outputs, rank], or [experts, outputs, rank].
        scale: As its files have it: mlx-lm's ``scale``, PEFT's alpha over the rank or over its root.
        magnitude: Of DoRA, float32 [outputs]: the length of each output's weights with the adapter; None without.
    """

    a: _Floats
    b: _Floats
    scale: float
    magnitude: _Floats | None = None


AdapterWeights: TypeAlias = Mapping[str, LowRank]
"""An adapter by the paths of the layers that it changes; at least one."""
