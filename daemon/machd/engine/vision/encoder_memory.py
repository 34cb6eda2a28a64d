"""Memory that a vision encoder takes, read from its graph before anything of it is computed.

mlx builds a graph when a model is called and computes it later, so the sizes of all arrays are known beforehand, whatever the
family. Nothing is learnt from earlier images: the first large one may be the one that does not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

_VIEWS = frozenset(
    {"Broadcast", "Transpose", "ExpandDims", "Squeeze", "Slice", "Split", "AsStrided"}
)
"""Operations whose output lies in the memory of their input. Reshape and its kind copy where strides do not allow it."""

_OVER_SCORES = frozenset({"Add", "Select", "Softmax"})
"""Operations that write over attention's scores, which nothing else uses."""


@dataclass(frozen=True, slots=True)
class EncoderNeed:
    """Memory that a graph takes, an upper bound.

    Attributes:
        peak_bytes: The most that it holds at once.
        stage_bytes: What each stage adds at its peak to what is held before it; the last one is the rest of the graph.
    """

    peak_bytes: int
    stage_bytes: tuple[int, ...]


def encoder_need(stages: Sequence[mx.array], results: Sequence[mx.array]) -> EncoderNeed:
    """Find what a graph takes.

    mlx describes neither operations that it has compiled from several nor a GPU's own kernels. The CPU computes with neither, as
    ``engine.open`` has switched compilation off there. Of any other graph nothing is known, and no need is told: on a GPU an allocation
    that fails raises an error.
    """
    events: list[dict[str, Any]] = []
    try:
        mx.export_function(events.append, lambda: [*stages, *results])
    except ValueError:
        return EncoderNeed(0, (0,) * (len(stages) + 1))
    names = [name for one in events if one["type"] == "outputs" for name, *_ in one["outputs"]]
    graph = _Graph([one for one in events if one["type"] == "primitive"], frozenset(names))
    return graph.need(names[: len(stages)], names[len(stages) :])


class _Graph:
    """Operations with the sizes of their outputs, and which of them are held."""

    def __init__(self, primitives: Sequence[dict[str, Any]], held: Collection[str]) -> None:
        self._inputs: dict[str, list[str]] = {}
        self._bytes: dict[str, int] = {}
        self._owners: dict[str, str] = {}
        self._held_bytes = 0
        uses = Counter(name for one in primitives for name, *_ in one["inputs"])
        scores, views = set[str](), set[str]()
        for one in primitives:
            kind, inputs = one["name"], [name for name, *_ in one["inputs"]]
            workspace_bytes = _spread_bytes(one)
            if kind == "Matmul":  # copies what is no plain matrix
                copied = (array for array in one["inputs"] if array[0] in views)
                workspace_bytes = sum(map(_size, copied))
            shared = None
            if kind in _VIEWS:
                shared = inputs[0]
            elif kind in _OVER_SCORES:
                shared = next((name for name in inputs if name in scores), None)
            for array in one["outputs"]:
                name = array[0]
                self._inputs[name] = inputs
                views |= {name} if kind in _VIEWS else set()
                self._bytes[name] = _size(array) + workspace_bytes
                self._owners[name] = name if shared is None else self._owner(shared)
                is_product = kind == "Matmul" or shared in scores
                if is_product and uses[name] == 1 and name not in held:
                    scores.add(name)
        self._uses = Counter(
            self._owner(one)
            for name, inputs in self._inputs.items()
            for one in inputs
            if self._owner(one) != self._owners[name]
        )

    def need(self, stages: Sequence[str], results: Sequence[str]) -> EncoderNeed:
        """Follow the evaluation stage by stage, then of the results."""
        for name in (*stages, *results):
            self._uses[self._owner(name)] += 1
        peak_bytes, stage_bytes = 0, list[int]()
        for wanted, is_kept in (*(([one], False) for one in stages), (results, True)):
            added_bytes, used = self._evaluate(wanted)
            stage_bytes.append(added_bytes)
            peak_bytes = max(peak_bytes, self._held_bytes + added_bytes)
            self._held_bytes += added_bytes
            self._release(used)
            if not is_kept:
                self._release(map(self._owner, wanted))
        return EncoderNeed(peak_bytes, tuple(stage_bytes))

    def _evaluate(self, wanted: Sequence[str]) -> tuple[int, list[str]]:
        """Evaluate what is not evaluated yet of some arrays; returns the bytes of all that this makes, and what it used.

        None of it is freed on the way: mlx allocates ahead of what it computes.
        """
        added_bytes, used, open_names = 0, list[str](), list(wanted)
        while open_names:
            name = open_names.pop()
            inputs = self._inputs.pop(name, None)
            if inputs is None:
                continue  # evaluated before, or a constant
            owner = self._owners[name]
            added_bytes += self._bytes[name] if owner == name else 0
            used += [one for one in map(self._owner, inputs) if one != owner]
            open_names += inputs
        return added_bytes, used

    def _release(self, names: Iterable[str]) -> None:
        """Count uses of arrays as over, and free those without any left."""
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                self._held_bytes -= self._bytes.get(name, 0)

    def _owner(self, name: str) -> str:
        """Return the array in whose memory an array lies."""
        return self._owners.get(name, name)


def _size(array: tuple[str, tuple[int, ...], mx.Dtype]) -> int:
    """Return the bytes of an array, of which mlx tells name, shape and dtype."""
    _, shape, dtype = array
    return prod(shape) * int(dtype.size)


def _spread_bytes(primitive: dict[str, Any]) -> int:
    """Return what a convolution takes besides its output: its input, spread to a row for each position, and a copy of that."""
    if primitive["name"] != "Convolution":
        return 0
    _, shape, dtype = primitive["outputs"][0]
    _, weight_shape, _ = primitive["inputs"][1]
    return 2 * _size(("", (*shape[:-1], *weight_shape[1:]), dtype))
