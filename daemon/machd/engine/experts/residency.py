"""How much of a model's experts is in memory, and the bank that holds it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from machd.engine.backend.progress import LoadProgress
from machd.engine.backend.untyped import LanguageModel, Layer
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.banked_layer import BankedExperts, Outputs, connect_previews
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.origins import Origins, switch_layers
from machd.engine.experts.stored_layer import StoredLayer
from machd.engine.protocol.engine import ExpertReading
from machd.errors import ModelFormatError

_SPARE_SHARE = 0.1
"""Share of the available memory that ``auto`` leaves to steps and to everything else."""

_KV_SHARE = 0.25
"""Share of the available memory that ``auto`` leaves to running sequences at the most."""

_OWNER_DEPTH = 2
"""Modules around a switch layer among which its owner may be: the block, and a class within it."""


@dataclass(frozen=True, slots=True)
class Residency:
    """What of the experts is to be in memory.

    Attributes:
        bytes: Bytes of the bank, or ``auto`` for what is left.
        kv_budget_bytes: What ``auto`` leaves to running sequences.
    """

    bytes: int | Literal["auto"]
    kv_budget_bytes: int

    def bank_bytes(self, *, available_bytes: int, dense_bytes: int, experts_bytes: int) -> int:
        """Bytes of the bank.

        Args:
            available_bytes: What the process can take before the model is loaded.
            dense_bytes: What the rest of the model takes.
            experts_bytes: What all experts would take, the most that is of use.
        """
        if self.bytes != "auto":
            return min(self.bytes, experts_bytes)
        spare_bytes = int(available_bytes * _SPARE_SHARE)
        kv_bytes = min(self.kv_budget_bytes, int(available_bytes * _KV_SHARE))
        left_bytes = available_bytes - dense_bytes - kv_bytes - spare_bytes
        return max(min(left_bytes, experts_bytes), 0)


@dataclass(frozen=True, slots=True)
class BankedModel:
    """The part of a model whose experts lie in a bank.

    Attributes:
        layers: Stand before the model's switch layers.
        parameters: Weights of all experts.
    """

    bank: ExpertBank
    layers: Sequence[BankedExperts]
    outputs: Outputs
    parameters: int
    _owners: Sequence[Layer | None] = field(repr=False)

    def reading(self) -> ExpertReading:
        """Return the bank at this moment."""
        return self.bank.reading()

    def take_fault(self) -> ExpertReadError | None:
        """Return the fault of the passes since the last call; the rows that it concerns are NaN."""
        return self.outputs.take_fault()

    def close(self) -> None:
        """End all reading, and give the memory back."""
        self.outputs.arrays.clear()
        self.bank.close()

    def connect(self) -> None:
        """Let layers preview what the next ones will need; once the model's code has been named."""
        connect_previews(self.layers, self._owners)


def stored_layers(
    model: LanguageModel, origins: Origins, dense_dtype: mx.Dtype | None, *, backend: str
) -> list[StoredLayer]:
    """Locate the experts of every layer.

    Args:
        model: Lazily loaded.
        origins: Of its arrays.
        dense_dtype: Dtype of the rest of the model; None if it stays as stored.
        backend: ``cpu``, ``metal`` or ``cuda``.

    Raises:
        ModelFormatError: The files do not hold the experts one by one.
    """

    def choose(parameter: str, stored: mx.Dtype, projection: Layer) -> mx.Dtype:
        if not mx.issubdtype(stored, mx.floating) or parameter == "global_scale":
            return stored
        if dense_dtype is not None:
            return dense_dtype
        # mlx's gather_mm on the CPU takes float32 alone.
        return mx.float32 if backend == "cpu" and "scales" not in projection else stored

    return [origins.layer(path, switch, choose) for path, switch in switch_layers(model)]


def open_bank(
    model: LanguageModel,
    layers: Sequence[StoredLayer],
    *,
    capacity_bytes: int,
    progress: LoadProgress,
) -> BankedModel:
    """Replace a model's switch layers by those of a bank, and fill it.

    Args:
        model: Changed in place; its experts' own arrays are dropped.
        layers: As :func:`stored_layers` found them.
        capacity_bytes: Of the bank.
        progress: Told about the bytes that are read.

    Raises:
        ModelError: The memory is too small, or an expert cannot be read.
    """
    files = ExpertFiles(
        {place.file for one in layers for part in one.places.values() for place in part}
    )
    try:
        bank = ExpertBank(layers, files, capacity_bytes=capacity_bytes)
    except BaseException:
        files.close()
        raise
    try:
        progress.stage("reading experts", bank.fill_bytes)
        bank.fill(progress.advance)
        return _replace(model, bank)
    except ExpertReadError as error:
        bank.close()
        raise ModelFormatError(f"an expert cannot be read: {error}") from error
    except BaseException:
        bank.close()
        raise


def _replace(model: LanguageModel, bank: ExpertBank) -> BankedModel:
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    outputs = Outputs()
    named = dict(model.named_modules())
    paths = [layer.path for layer in bank.layers]
    parameters = sum(int(get_total_parameters(named[path])) for path in paths)
    owners = [_owner(path, named) for path in paths]
    banked = [BankedExperts(named[path], bank, index, outputs) for index, path in enumerate(paths)]
    for path, one in zip(paths, banked, strict=True):
        model.update_modules(tree_unflatten([(path, one)]))
    return BankedModel(bank, banked, outputs, parameters, owners)


def _owner(path: str, named: dict[str, Module]) -> Layer | None:
    """Find the module around a switch layer that is called with hidden states alone; None without one."""
    parts = path.split(".")
    for depth in range(1, _OWNER_DEPTH + 1):
        owner = named.get(".".join(parts[:-depth]))
        if owner is None:
            return None
        parameters = list(inspect.signature(type(owner).__call__).parameters.values())
        if len(parameters) == len(("self", "x")):
            return owner
    return None
