"""An adapter as its files describe it, whatever their format: which tensors lie where, and for which layer; no weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from machd.engine.adapters.adapter_config import CONFIG_FILE
from machd.engine.adapters.low_rank import BaseLayer
from machd.engine.backend.model_files import shortened
from machd.errors import AdapterError


class AdapterFormat(StrEnum):
    """Which program writes such files."""

    MLX_LM = "mlx-lm"
    PEFT = "PEFT"
    GGUF = "GGUF"


DTYPES: Mapping[str, str] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q8_0": "q8_0",
}
"""The types of weights that are read, as files name them."""

MAX_TENSORS = 1 << 16
"""Tensors of an adapter; one of 256 experts in each of 61 layers has 281,088 in PEFT's files, which no program trains so far."""

_EMBEDDINGS = frozenset({"embed", "embed_tokens", "embeddings", "lm_head", "tok_embeddings", "wte"})
"""Last parts of names of embeddings and of output layers."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor of a file, which has floats of a type of :data:`DTYPES`.

    Attributes:
        name: In the file.
        shape: Row-major.
        offset: Position of its first byte in the file.
        size_bytes: Size in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """What an adapter adds to one layer, or to the experts of one.

    Attributes:
        name: The layer's, as the files say it.
        a: float [rank, inputs] or [experts, rank, inputs]; or one [rank, inputs] for each expert.
        b: float [outputs, rank] or [experts, outputs, rank]; or one [outputs, rank] for each expert.
        scale: What ``b @ a`` counts for.
        magnitude: Of DoRA, [outputs].
        is_transposed: ``a`` is [inputs, rank] and ``b`` [rank, outputs], as mlx-lm's plain layers have them.
        has_paired_rows: The rows of ``b`` are in the order of llama.cpp's rotary pairs.
    """

    name: str
    a: tuple[StoredArray, ...]
    b: tuple[StoredArray, ...]
    scale: float
    magnitude: StoredArray | None = None
    is_transposed: bool = False
    has_paired_rows: bool = False

    @property
    def arrays(self) -> Iterator[StoredArray]:
        """All of its tensors."""
        yield from self.a
        yield from self.b
        if self.magnitude is not None:
            yield self.magnitude

    @property
    def rank(self) -> int:
        """Numbers between ``a`` and ``b``."""
        return self.a[0].shape[-1 if self.is_transposed else -2]

    @property
    def fits(self) -> BaseLayer:
        """The layer that it is for, by the shapes."""
        a, b = self.a[0].shape, self.b[0].shape
        outputs, inputs = (b[-1], a[-2]) if self.is_transposed else (b[-2], a[-1])
        experts = len(self.a) if len(self.a) > 1 else (a[0] if len(a) > 2 else 0)
        return BaseLayer(outputs, inputs, experts)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter's files, read as far as their headers.

    Attributes:
        layers: At least one.
        base_model: What the files say of the model that it was trained on; None if nothing.
    """

    layers: tuple[StoredLayer, ...]
    base_model: str | None


def check_arrays(arrays: Iterable[StoredArray]) -> None:
    """Refuse tensors that hold no weights, before anything is sought.

    Raises:
        AdapterError: One is of a type that is not read.
    """
    for array in arrays:
        if array.dtype not in DTYPES:
            raise AdapterError(
                f"{shortened(array.name)} is stored as {array.dtype}; of adapters {', '.join(DTYPES.values())} are read"
            )


def check_layers(layers: Iterable[StoredLayer]) -> tuple[StoredLayer, ...]:
    """Refuse layers whose tensors contradict each other.

    Raises:
        AdapterError: There are none, an embedding is one of them, or their ranks do not agree.
    """
    checked = tuple(layers)
    if not checked:
        raise AdapterError("it changes no layer: its file holds no tensors of an adapter")
    for layer in checked:
        refuse_embedding(layer.name)
        _check_ranks(layer)
    return checked


def refuse_embedding(name: str) -> None:
    """Refuse a layer that makes embeddings or logits.

    Raises:
        AdapterError: The name is that of one.
    """
    if name.rpartition(".")[2] in _EMBEDDINGS:
        raise AdapterError(
            f"it changes {shortened(name)}: trained embeddings and output layers are not served; train the "
            "linear layers alone, or fuse the adapter into its model"
        )


def _check_ranks(layer: StoredLayer) -> None:
    shown = shortened(layer.name)
    for a, b in zip(layer.a, layer.b, strict=True):
        if len(a.shape) not in (2, 3) or len(a.shape) != len(b.shape):
            raise AdapterError(
                f"A and B of {shown} have the shapes {list(a.shape)} and {list(b.shape)}; they have to be matrices"
            )
        of_a, of_b = (-1, -2) if layer.is_transposed else (-2, -1)
        if a.shape[of_a] != b.shape[of_b] or a.shape[:-2] != b.shape[:-2]:
            raise AdapterError(
                f"A and B of {shown} have the shapes {list(a.shape)} and {list(b.shape)}, which have no rank in "
                "common: they are exchanged, transposed, or of different adapters"
            )
        if a.shape[of_a] != layer.rank:
            raise AdapterError(f"the experts of {shown} have different ranks")
    if layer.rank == 0:
        raise AdapterError(f"{shown} has rank 0")


def check_rank(layer: StoredLayer, said: int) -> None:
    """Compare a layer's rank with what the configuration says.

    Raises:
        AdapterError: It is another.
    """
    if layer.rank == said:
        return
    a, b = layer.a[0].shape, layer.b[0].shape
    others = (a[-2], b[-1]) if layer.is_transposed else (a[-1], b[-2])
    raise AdapterError(
        f"{CONFIG_FILE} says rank {said:,} for {shortened(layer.name)}, which has A {list(a)} and B {list(b)}"
        + (
            ": they are exchanged or transposed"
            if others == (said, said)
            else f" of rank {layer.rank:,}"
        )
    )


def together(parts: Mapping[str, Mapping[str, StoredArray]]) -> None:
    """Refuse layers of which half is missing.

    Args:
        parts: By the layer's name, then by ``a``, ``b`` and ``magnitude``.

    Raises:
        AdapterError: A layer has A without B, or B without A.
    """
    for name, of_layer in parts.items():
        for part in ("a", "b"):
            if part not in of_layer:
                there = next(iter(of_layer.values())).name
                raise AdapterError(
                    f"{shortened(name)} has no {part.upper()}: the file holds {shortened(there)} without it"
                )
