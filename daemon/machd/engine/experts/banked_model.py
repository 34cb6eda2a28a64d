"""A model whose experts lie in a bank: its switch layers replaced, and the bank filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from machd.engine.backend.untyped import LanguageModel, Layer
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.banked_layer import BankedExperts, PassState
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.router_preview import (
    RouterPreview,
    record_input,
    takes_hidden_states_alone,
)
from machd.engine.experts.stored_layer import StoredLayer
from machd.engine.protocol.memory import ExpertReading
from machd.engine.protocol.progress import LoadProgress
from machd.errors import ModelFormatError

_MAX_BLOCK_DEPTH = 2
"""Modules around a switch layer that may be its block: some models have a module of experts within it."""


@dataclass(frozen=True, slots=True)
class BankedModel:
    """The part of a model whose experts lie in a bank; satisfies the step's port ``Experts``."""

    bank: ExpertBank
    layers: Sequence[BankedExperts]
    parameters: int
    _state: PassState = field(repr=False)
    _blocks: Sequence[Layer | None] = field(repr=False)

    def reading(self) -> ExpertReading:
        """Return the bank's content now, and its counts since the start."""
        return self.bank.reading()

    def take_fault(self) -> ExpertReadError | None:
        """Return the read error since the last call; rows that lack the expert are NaN."""
        return self._state.take_fault()

    def close(self) -> None:
        """End all reads, and free the memory."""
        self._state.pinned_outputs.clear()
        self.bank.close()

    def connect_previews(self) -> None:
        """Let each layer preview the next one's router, where blocks take hidden states alone.

        It changes the classes of blocks, so the model's code has to be named before.
        """
        successors = zip(self.layers[1:], self._blocks[1:], strict=True)
        for number, (successor, next_block) in enumerate(successors):
            block = self._blocks[number]
            if block is not None and next_block is not None:
                self.layers[number].next_router = RouterPreview(number + 1, next_block, successor)
        for layer, block in zip(self.layers, self._blocks, strict=True):
            if layer.next_router is not None:
                record_input(block, layer.block_input)


def open_bank(
    model: LanguageModel,
    layers: Sequence[StoredLayer],
    *,
    capacity_bytes: int,
    progress: LoadProgress,
) -> BankedModel:
    """Replace a model's switch layers, in place, by those of a bank, and fill the bank.

    Raises:
        ModelError: The memory is too small, or an expert cannot be read.
    """
    files = ExpertFiles(
        {
            location.file
            for layer in layers
            for locations in layer.locations.values()
            for location in locations
        }
    )
    try:
        bank = ExpertBank(layers, files, capacity_bytes=capacity_bytes)
    except BaseException:
        files.close()
        raise
    try:
        progress.stage("reading experts", bank.fill_bytes)
        bank.fill(progress.advance)
        return _replace_switch_layers(model, bank)
    except ExpertReadError as error:
        bank.close()
        raise ModelFormatError(f"an expert cannot be read: {error}") from error
    except BaseException:
        bank.close()
        raise


def _replace_switch_layers(model: LanguageModel, bank: ExpertBank) -> BankedModel:
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    state = PassState()
    named = dict(model.named_modules())
    paths = [layer.path for layer in bank.layers]
    parameters = sum(int(get_total_parameters(named[path])) for path in paths)
    blocks = [_block(path, named) for path in paths]
    banked = [BankedExperts(named[path], bank, index, state) for index, path in enumerate(paths)]
    for path, one in zip(paths, banked, strict=True):
        model.update_modules(tree_unflatten([(path, one)]))
    return BankedModel(bank, banked, parameters, state, blocks)


def _block(path: str, named: dict[str, Module]) -> Layer | None:
    """Return the module around a switch layer that takes hidden states alone; None without one."""
    parts = path.split(".")
    for depth in range(1, _MAX_BLOCK_DEPTH + 1):
        block = named.get(".".join(parts[:-depth]))
        if block is None:
            return None
        if takes_hidden_states_alone(block):
            return block
    return None
