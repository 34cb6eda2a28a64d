"""A model with adapters in memory: each row of a pass is computed with its own, or with none.

Made with the engine, which costs nothing. :mod:`machd.engine.adapters.residency` decides what is in memory, between two steps:
``base`` is what files are checked against, ``add`` puts a request's adapters into memory under their key, ``remove`` frees them, and
``nbytes`` is what all take. The first one changes the classes of the model's linear layers, and the last one changes them back. The
step calls ``chosen`` around building a pass; a key that is not in memory there is a fault of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import mlx.core as mx
import numpy as np

from machd.engine.adapters.adapted_layer import LayerAdapters, LowRankArrays
from machd.engine.adapters.layer_stack import LayerStack
from machd.engine.adapters.linear_layers import LinearPart, linear_parts
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers, LowRank
from machd.engine.backend.device import backend_name
from machd.engine.backend.native_kernels import native_kernels, outdated_kernels_advice
from machd.engine.backend.untyped import LanguageModel
from machd.engine.kernels.layers_in_one import layers_of_blocks
from machd.engine.kernels.pass_adapters import AdapterKey, PassAdapters, using_adapters
from machd.errors import AdapterError


class AdaptedModel:
    """Adapters of one model. Lives on the engine thread."""

    def __init__(self, model: LanguageModel, under: str = "") -> None:
        """Begin without adapters.

        Args:
            model: Its layers may be merged, and are not any more from now on.
            under: Beginning of the paths of layers that adapters may change.
        """
        self._parts = linear_parts(model, under)
        self._keys: set[AdapterKey] = set()
        self._model = model
        self._layers: dict[tuple[str, ...], LayerAdapters] = {}
        self._in_one: dict[AdapterKey, object] = {}

    @property
    def base(self) -> BaseLayers:
        """Linear layers that adapters may change."""
        return {path: part.shape for path, part in self._parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters in memory."""
        return sum(one.nbytes for one in self._layers.values())

    def add(self, key: AdapterKey, weights: Sequence[AdapterWeights]) -> None:
        """Put a request's adapters into memory.

        Args:
            key: At least one; it is not in memory.
            weights: Of each adapter of the key.

        Raises:
            AdapterError: A layer is missing or of another shape, adapters with magnitudes are combined, or machd's own kernels
                that are installed are too old for adapters.
        """
        assert key not in self._keys, "adapters are added once"
        self._check(key, weights)
        if not self._keys:
            self._attach()
        self._keys.add(key)
        try:
            for paths, layer in self._layers.items():
                layer.add(key, [_joined(key, [one.get(path) for one in weights]) for path in paths])
            self._add_in_one(key)
        except BaseException:
            self.remove(key)
            raise

    def remove(self, key: AdapterKey) -> None:
        """Free the memory of a key's adapters, which no row uses any more."""
        self._keys.remove(key)
        self._in_one.pop(key, None)
        for layer in self._layers.values():
            layer.remove(key)
        if not self._keys:
            for layer in self._layers.values():
                layer.detach()
            self._layers = {}

    def chosen(self, rows: Sequence[AdapterKey]) -> AbstractContextManager[None]:
        """Have the passes that are built within the context computed with these adapters.

        Args:
            rows: Of each row of the pass; of a packed pass of each token. All are in memory.
        """
        if not any(rows):
            return nullcontext()
        adapters = PassAdapters(rows, self._in_one)
        assert self._keys.issuperset(adapters.distinct), "a row's adapters are in memory"
        return using_adapters(adapters)

    def _attach(self) -> None:
        """Give every linear layer a subclass that computes adapters."""
        for _, merged in groupby(self._parts, key=lambda path: id(self._parts[path].layer)):
            paths = tuple(merged)
            parts = [self._parts[path] for path in paths]
            self._layers[paths] = LayerAdapters([LayerStack(one, _dtype(one)) for one in parts])

    def _add_in_one(self, key: AdapterKey) -> None:
        """Have the operation of all layers compute a key's adapters, if it can."""
        blocks = layers_of_blocks(self._model)
        if blocks is None:
            return
        try:
            own = [[layer.adapters.low_rank(key) for layer in layers] for layers in blocks]
        except LookupError:
            return
        self._in_one[key] = native_kernels().LlamaAdapter(own)

    def _check(self, key: AdapterKey, weights: Sequence[AdapterWeights]) -> None:
        outdated = outdated_kernels_advice()
        if outdated is not None:
            raise AdapterError(outdated)
        for adapter, one in zip(key, weights, strict=True):
            for path, low_rank in one.items():
                if not _fits(low_rank, self._parts.get(path)):
                    raise AdapterError(f"the adapter {adapter.name!r} does not fit {path}")
                if low_rank.magnitude is not None and len(key) > 1:
                    raise AdapterError(
                        f"the adapter {adapter.name!r} has magnitudes (DoRA), and cannot be combined with others"
                    )


def _fits(low_rank: LowRank, part: LinearPart | None) -> bool:
    if part is None:
        return False
    rank = low_rank.a.shape[0]
    return (low_rank.a.shape, low_rank.b.shape) == (
        (rank, part.shape.inputs),
        (part.shape.outputs, rank),
    )


def _joined(key: AdapterKey, own: Sequence[LowRank | None]) -> LowRankArrays | None:
    """Return what adapters behind one another add to a layer; None where they leave it as it is."""
    pairs = [(adapter, one) for adapter, one in zip(key, own, strict=True) if one is not None]
    if not pairs:
        return None
    a = np.concatenate([one.a for _, one in pairs])
    b = np.concatenate([one.b * (adapter.scale * one.scale) for adapter, one in pairs], axis=1)
    magnitude = pairs[0][1].magnitude
    return mx.array(a), mx.array(b), None if magnitude is None else mx.array(magnitude)


def _dtype(part: LinearPart) -> mx.Dtype:
    """Return what a layer's adapters are held in: float32 on the CPU, else what the layer computes in."""
    if backend_name() == "cpu":
        return mx.float32
    arrays = (part.layer.get(name) for name in ("biases", "scales", "weight"))
    floats = (
        one.dtype for one in arrays if one is not None and mx.issubdtype(one.dtype, mx.floating)
    )
    return next(floats, mx.bfloat16)
