"""The code that computes a model, by which evidence about one model is applied to another.

Plain data, read from a model in memory by ``engine/loading/model_code.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCode:
    """The classes and source files that a model is made of.

    Attributes:
        package: Python module of the model's class, such as ``mlx_lm.models.llama``.
        layers: Qualified names of the classes of its layers, machd's repairs among them, each with the
            switches that are on; a packed layer counts as a plain one.
        caches: What its caches are, a text for each kind of layer.
        digest: Of the source files that define the model, imported ones included.
    """

    package: str
    layers: frozenset[str]
    caches: frozenset[str]
    digest: str

    @property
    def parts(self) -> frozenset[str]:
        """Return its layers and its caches."""
        return self.layers | self.caches

    def covers(self, other: ModelCode, shared: frozenset[str] = frozenset()) -> bool:
        """Return whether evidence measured on a model with this code holds for ``other``.

        ``shared`` are layers that were measured in other architectures, such as rotations.
        """
        return (
            self.digest == other.digest
            and other.layers - shared <= self.layers
            and other.caches <= self.caches
        )

    def joined(self, other: ModelCode) -> ModelCode:
        """Return the union of the code of two models of one architecture."""
        assert (self.package, self.digest) == (other.package, other.digest), "one architecture"
        return ModelCode(
            self.package, self.layers | other.layers, self.caches | other.caches, self.digest
        )


@dataclass(frozen=True, slots=True)
class LoadedCode(ModelCode):
    """The code of a model in memory, with what no evidence depends on.

    Attributes:
        shard_modes: Ways in which the code can cut the model for several ranks, the better one first.
    """

    shard_modes: tuple[str, ...]


def shared_layers(every: Iterable[ModelCode]) -> frozenset[str]:
    """Return the layers that belong to no architecture: mlx's, and those in shared modules.

    A layer belongs to an architecture if its module defines a model, or if machd has repaired it.
    """
    known = tuple(every)
    packages = {one.package for one in known}
    layers = {layer for one in known for layer in one.layers}
    return frozenset(
        layer
        for layer in layers
        if (module := layer.rpartition(".")[0]) not in packages and not module.startswith("machd.")
    )
