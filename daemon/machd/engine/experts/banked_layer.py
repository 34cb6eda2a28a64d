"""Switch layers that compute with the experts of a bank.

A mixture-of-experts block's router chooses experts for each token, and mlx-lm's switch layer multiplies each token with
its experts. :class:`BankedExperts` stands in for the switch layer: it reads what the router chose, waits until
the bank holds those experts, and calls the switch layer with their slots. The projections inside compute with
the bank's arrays, so the model's own code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import Layer
from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.expert_files import ExpertReadError
from machd.engine.experts.router_preview import BlockInput, RoutedError, RouterPreview
from machd.engine.experts.tensor_origins import projections
from machd.engine.experts.use_counts import Indices


class PassState:
    """State of the current pass that all banked layers of a model share.

    Attributes:
        pinned_outputs: Lazy outputs that are computed with pinned experts.
        has_failed: True once an expert could not be read; :meth:`take_fault` resets it.
    """

    def __init__(self) -> None:
        self.pinned_outputs: list[mx.array] = []
        self.has_failed = False

    def take_fault(self) -> ExpertReadError | None:
        """Return the read error since the last call; the outputs that lack the expert are NaN."""
        if not self.has_failed:
            return None
        self.has_failed = False
        return ExpertReadError("an expert of the model could not be read from its file")


class BankedProjection(Module):
    """A projection of a switch layer, with the bank's slots for experts."""

    def __init__(self, projection: Layer, bank: ExpertBank, layer: int, name: str) -> None:
        """Replace a projection's weights, which are dropped, by the bank's."""
        super().__init__()  # type: ignore[no-untyped-call]
        for parameter in list(projection.keys()):
            array = bank.array(layer, name, parameter)
            if array is not None:
                projection[parameter] = array
        self.stands_for = getattr(projection, "stands_for", type(projection))
        # A bound method and not a child module, because the arrays belong to the bank.
        self._compute = projection.__call__

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        sorted_indices: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's
    ) -> mx.array:
        """Multiply; ``indices`` are slots."""
        product: mx.array = self._compute(x, indices, sorted_indices)
        return product


class BankedExperts(Module):
    """A switch layer whose experts lie in a bank.

    Attributes:
        stands_for: Class of the switch layer.
        next_router: Preview of the next layer's router; None without one.
        block_input: What the block around this layer was called with.
        is_previewed: True while a preview of this layer's router runs.
    """

    def __init__(self, switch: Module, bank: ExpertBank, layer: int, state: PassState) -> None:
        """Replace a switch layer's weights by the bank's."""
        super().__init__()  # type: ignore[no-untyped-call]
        for name, projection in projections(switch):
            setattr(switch, name, BankedProjection(projection, bank, layer, name))
        self.switch = switch
        self.stands_for = type(switch)
        self.next_router: RouterPreview | None = None
        self.block_input = BlockInput()
        self.is_previewed = False
        self._bank = bank
        self._layer = layer
        self._state = state

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Compute each token [..., input_dims] with each of its experts, uint32 [..., k].

        Returns:
            [..., k, output_dims]; NaN for an expert that could not be read.
        """
        if self.is_previewed:
            raise RoutedError(indices)
        hidden, self.block_input.hidden = self.block_input.hidden, None
        if (table := self._bank.resident_table(self._layer)) is not None:
            output: mx.array = self.switch(x, table[indices])
            if self._bank.can_evict(self._layer):
                self._bank.pin_all(self._layer)
                self._state.pinned_outputs.append(output)
            return output
        chosen, next_chosen = self._read_choices(indices, hidden)
        return self._compute_chosen(x, chosen, next_chosen)

    def _read_choices(
        self, indices: mx.array, hidden: mx.array | None
    ) -> tuple[Indices, Indices | None]:
        """Evaluate what this router chose and the next one probably will, and unpin earlier experts."""
        preview = None
        if self.next_router is not None and hidden is not None:
            preview = self.next_router.choice(hidden)
        # One synchronisation: earlier outputs are evaluated with it, so their experts may be evicted.
        mx.eval(indices, *([] if preview is None else [preview]), *self._state.pinned_outputs)
        self._state.pinned_outputs.clear()
        self._bank.unpin_all()
        return np.array(indices), None if preview is None else np.unique(np.array(preview))

    def _compute_chosen(
        self, x: mx.array, chosen: Indices, next_chosen: Indices | None
    ) -> mx.array:
        """Compute with a layer that is not in memory whole; ``next_chosen`` will probably be needed by the next one."""
        bank, layer = self._bank, self._layer
        needed, tokens = np.unique(chosen, return_counts=True)
        bank.count_uses(layer, needed, tokens)
        max_experts = bank.max_experts(layer)
        is_present = bank.slots(layer)[needed] >= 0
        have_slots = bank.request(layer, needed[:max_experts])
        if next_chosen is not None and have_slots:
            assert self.next_router is not None
            bank.read_ahead(self.next_router.layer, next_chosen)
        if needed.size > max_experts:
            return self._compute_in_turns(x, chosen, needed)
        if is_present.all() or not is_present.any():
            return self._compute_with(x, chosen, needed)
        # Experts in memory are computed while the others are read.
        outputs = [
            self._compute_part(x, chosen, part)
            for part in (needed[is_present], needed[~is_present])
        ]
        return _joined(outputs, chosen.shape)

    def _compute(self, x: mx.array, slots: mx.array) -> mx.array:
        output: mx.array = self.switch(x, slots)
        self._state.pinned_outputs.append(output)
        return output

    def _compute_with(self, x: mx.array, chosen: Indices, needed: Indices) -> mx.array:
        """Compute with requested experts, once they are read."""
        failed = self._bank.wait(self._layer, needed)
        slots = self._bank.slots(self._layer)[chosen]
        output = self._compute(x, mx.array(np.maximum(slots, 0).astype(np.uint32)))
        if not failed:
            return output
        self._state.has_failed = True
        is_lost = mx.array(np.isin(chosen, failed))
        return mx.where(is_lost[..., None], mx.array(float("nan"), output.dtype), output)

    def _compute_in_turns(self, x: mx.array, chosen: Indices, needed: Indices) -> mx.array:
        """Compute with more experts than fit: as many as fit at a time, the first of which are requested."""
        bank, size = self._bank, self._bank.max_experts(self._layer)
        outputs = [self._compute_part(x, chosen, needed[:size])]
        for start in range(size, needed.size, size):
            mx.eval(outputs[-1].values)
            self._state.pinned_outputs.clear()
            bank.unpin_all()
            part = needed[start : start + size]
            bank.request(self._layer, part)
            outputs.append(self._compute_part(x, chosen, part))
        return _joined(outputs, chosen.shape)

    def _compute_part(self, x: mx.array, chosen: Indices, part: Indices) -> _PartOutput:
        """Compute each pair of a token [..., input_dims] and one of a part of the experts, which are requested."""
        pairs = chosen.reshape(-1)  # [tokens * k]
        positions = np.flatnonzero(np.isin(pairs, part))
        tokens = x.reshape(-1, x.shape[-1])[mx.array(positions // chosen.shape[-1])]
        output = self._compute_with(tokens, pairs[positions][:, None], part)
        mx.async_eval(output)
        return _PartOutput(positions, output[:, 0])


@dataclass(frozen=True, slots=True)
class _PartOutput:
    """Outputs [n, output_dims] for some pairs of a token and an expert, and the pairs' numbers, int64 [n]."""

    positions: Indices
    values: mx.array


def _joined(outputs: Sequence[_PartOutput], shape: tuple[int, ...]) -> mx.array:
    """Join outputs that cover each pair once to [*shape, output_dims]."""
    order = np.argsort(np.concatenate([one.positions for one in outputs]))
    values = mx.concatenate([one.values for one in outputs])
    return values[mx.array(order)].reshape(*shape, -1)
