"""A model with adapters in memory: each row of a pass is computed with its own, or with none.

Made with the engine, which costs nothing. :mod:`machd.engine.adapters.residency` decides what is in memory, between two steps:
``base`` is what files are checked against, ``adding`` puts a request's adapters into memory under their key, ``remove`` frees them, and
``nbytes`` is what all take. The first one changes the classes of the model's linear layers, and the last one changes them back. The
step calls ``chosen`` around building a pass; a key that is not in memory there is a fault of the engine.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import mlx.core as mx
import numpy as np

from machd.engine.adapters.adapted_layer import LayerAdapters, LowRankArrays
from machd.engine.adapters.layer_stack import LayerStack
from machd.engine.adapters.linear_layers import LinearPart, linear_parts
from machd.engine.adapters.load_check import PartWeights, check_layer
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers, LowRank
from machd.engine.backend.device import backend_name
from machd.engine.backend.native_kernels import native_kernels, outdated_kernels_advice
from machd.engine.backend.untyped import LanguageModel
from machd.engine.kernels.layers_in_one import layers_of_blocks
from machd.engine.kernels.pass_adapters import AdapterKey, PassAdapters, using_adapters
from machd.errors import AdapterError
from machd.request.adapter import Adapter


class AdaptedModel:
    """Adapters of one model. Lives on the engine thread."""

    def __init__(self, model: LanguageModel, under: str = "") -> None:
        """Begin without adapters.

        Args:
            model: Its layers may be merged, and are not any more from now on.
            under: Beginning of the paths of layers that adapters may change.
        """
        self._parts = linear_parts(model, under)
        self._keys: set[AdapterKey] = set()  # those being added among them
        self._whole: set[AdapterKey] = set()
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
        """Put a request's adapters into memory in one go; see :meth:`adding`."""
        for _ in self.adding(key, weights):
            pass

    def adding(
        self, key: AdapterKey, weights: Sequence[AdapterWeights]
    ) -> Generator[None, None, None]:
        """Put a request's adapters into memory, a layer at each step of the iteration; rows may have them behind its end.

        Steps of the engine may run between two of its own. An iteration that is left early leaves nothing.

        Args:
            key: At least one; it is not in memory.
            weights: Of each adapter of the key.

        Raises:
            AdapterError: A layer is missing or of another shape, adapters with magnitudes are combined, a layer computes something
                else with them than their weights say, or machd's own kernels that are installed are too old for adapters.
        """
        assert key not in self._keys, "adapters are added once"
        self._check(key, weights)
        if not self._keys:
            self._attach()
        self._keys.add(key)
        try:
            for paths, layer in self._layers.items():
                if any(path in one for path in paths for one in weights):
                    self._add_to(layer, paths, key, weights)
                    yield
            self._add_in_one(key)
            self._whole.add(key)
        except BaseException:
            self.remove(key)
            raise

    def remove(self, key: AdapterKey) -> None:
        """Free the memory of a key's adapters, which no row uses any more."""
        self._keys.remove(key)
        self._whole.discard(key)
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
        assert self._whole.issuperset(adapters.distinct), "a row's adapters are in memory"
        return using_adapters(adapters)

    def _attach(self) -> None:
        """Give every linear layer a subclass that computes adapters."""
        for _, merged in groupby(self._parts, key=lambda path: id(self._parts[path].layer)):
            paths = tuple(merged)
            parts = [self._parts[path] for path in paths]
            self._layers[paths] = LayerAdapters([LayerStack(one, _dtype(one)) for one in parts])

    def _add_to(
        self,
        layer: LayerAdapters,
        paths: Sequence[str],
        key: AdapterKey,
        weights: Sequence[AdapterWeights],
    ) -> None:
        """Give a layer the adapters of a key, and check what it makes of them."""
        changed: list[PartWeights] = []
        arrays: list[LowRankArrays | None] = []
        for path in paths:
            own = [
                (adapter, one[path])
                for adapter, one in zip(key, weights, strict=True)
                if path in one
            ]
            arrays.append(_joined(own) if own else None)
            if own:
                changed.append(PartWeights(path, self._parts[path], own))
        layer.add(key, arrays)
        check_layer(layer, key, changed)

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


def _joined(own: Sequence[tuple[Adapter, LowRank]]) -> LowRankArrays:
    """Return what adapters behind one another add to a layer."""
    a = np.concatenate([one.a for _, one in own])
    b = np.concatenate([one.b * (adapter.scale * one.scale) for adapter, one in own], axis=1)
    magnitude = own[0][1].magnitude
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
