"""Layers that compute with the experts of a bank.

A model's router chooses experts for each token; mlx-lm's switch layer multiplies each token with those.
:class:`BankedExperts` stands before a switch layer: it reads what the router chose, waits until the bank has
those experts, and calls the switch layer with their slots. The projections inside compute with the
bank's arrays instead of their own, so the model's own code runs on whatever it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from machd.engine.backend.untyped import Layer
from machd.engine.experts.bank import ExpertBank, Numbers
from machd.engine.experts.expert_files import ExpertReadError
from machd.engine.experts.origins import projections


class RoutedError(Exception):
    """Ends a preview: the router has chosen.

    Attributes:
        indices: uint32 [..., k], the experts that it chose.
    """

    def __init__(self, indices: mx.array) -> None:
        """Keep what was chosen."""
        super().__init__()
        self.indices = indices


class Outputs:
    """What was computed with experts that are still held, shared by all layers of a model.

    Attributes:
        arrays: Lazy outputs.
        has_failed: True since an expert could not be read; :meth:`take_fault` resets it.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.arrays: list[mx.array] = []
        self.has_failed = False

    def take_fault(self) -> ExpertReadError | None:
        """Return the fault of the passes since the last call; the rows that it concerns are NaN."""
        if not self.has_failed:
            return None
        self.has_failed = False
        return ExpertReadError("an expert of the model could not be read from its file")


class RouterInput:
    """What a layer's router was called with; no module, whose arrays would count as weights.

    Attributes:
        seen: Hidden states; None where they are not known.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.seen: mx.array | None = None


class BankedProjection(Module):
    """A projection of mlx-lm's whose experts are those in the bank's slots."""

    def __init__(self, projection: Layer, bank: ExpertBank, layer: int, name: str) -> None:
        """Take a projection over; its own weights are dropped."""
        super().__init__()  # type: ignore[no-untyped-call]
        for parameter in list(projection.keys()):
            array = bank.array(layer, name, parameter)
            if array is not None:
                projection[parameter] = array
        self.stands_for = type(projection)
        # Not as a child, because the arrays belong to the bank.
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
        ahead: The layer after this one, whose choice is previewed; None for none.
        router: What this layer's router was called with.
    """

    def __init__(self, switch: Module, bank: ExpertBank, layer: int, outputs: Outputs) -> None:
        """Take a switch layer over.

        Args:
            switch: Its projections' own weights are dropped.
            bank: Has the experts.
            layer: Number of the layer among those with experts.
            outputs: Shared by all layers.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        for name, projection in projections(switch):
            setattr(switch, name, BankedProjection(projection, bank, layer, name))
        self.switch = switch
        self.stands_for = type(switch)
        self.ahead: Preview | None = None
        self.router = RouterInput()
        self._bank = bank
        self._layer = layer
        self._outputs = outputs
        self._is_previewed = False

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Compute each token with each of its experts.

        Args:
            x: [..., input_dims].
            indices: uint32 [..., k], experts.

        Returns:
            [..., k, output_dims]; NaN for an expert that could not be read.
        """
        if self._is_previewed:
            raise RoutedError(indices)
        seen, self.router.seen = self.router.seen, None
        bank, layer = self._bank, self._layer
        if (table := bank.table(layer)) is not None:
            bank.hold_all(layer)
            return self._computed(x, table[indices])
        ahead = None if self.ahead is None or seen is None else self.ahead.choice(seen)
        # Whatever was computed before is done after this, so no slot of it is needed any more.
        mx.eval(indices, *([] if ahead is None else [ahead]), *self._outputs.arrays)
        self._outputs.arrays.clear()
        bank.free()
        chosen = np.array(indices)
        needed: Numbers = np.unique(chosen)
        room = bank.room(layer)
        is_present = bank.slots(layer)[needed] >= 0
        has_room = bank.begin(layer, needed[:room])
        if ahead is not None and has_room:
            assert self.ahead is not None
            bank.read_ahead(self.ahead.layer, np.unique(np.array(ahead)))
        if needed.size > room:
            parts = [needed[start : start + room] for start in range(0, needed.size, room)]
            return self._in_parts(x, chosen, parts, take_turns=True)
        if is_present.all() or not is_present.any():
            return self._with(x, chosen, needed)
        # What is in memory is computed while the rest is read.
        return self._in_parts(x, chosen, [needed[is_present], needed[~is_present]])

    def choice(
        self, seen: mx.array, owner: Layer, compute: Callable[[Layer, mx.array], mx.array]
    ) -> mx.array | None:
        """Return what this layer's router would choose for hidden states; None if it chose nothing."""
        self._is_previewed = True
        try:
            compute(owner, seen)
        except RoutedError as routed:
            return routed.indices
        finally:
            self._is_previewed = False
        return None

    @property
    def layer(self) -> int:
        """Number of the layer among those with experts."""
        return self._layer

    def _computed(self, x: mx.array, slots: mx.array) -> mx.array:
        output: mx.array = self.switch(x, slots)
        self._outputs.arrays.append(output)
        return output

    def _with(self, x: mx.array, chosen: Numbers, needed: Numbers) -> mx.array:
        """Compute with experts that all find room, for which reading has begun."""
        failed = self._bank.finish(self._layer, needed)
        slots = self._bank.slots(self._layer)[chosen]
        output = self._computed(x, mx.array(np.maximum(slots, 0).astype(np.uint32)))
        if not failed:
            return output
        self._outputs.has_failed = True
        is_lost = mx.array(np.isin(chosen, failed))
        return mx.where(is_lost[..., None], mx.array(float("nan"), output.dtype), output)

    def _in_parts(
        self, x: mx.array, chosen: Numbers, parts: Sequence[Numbers], *, take_turns: bool = False
    ) -> mx.array:
        """Compute with some experts after others, each pair of a token and an expert once.

        Args:
            x: [..., input_dims].
            chosen: int [..., k], experts.
            parts: All experts that were chosen, each once; reading has begun for the first part, or for all.
            take_turns: Each part takes the slots of the one before it.
        """
        bank, per_token = self._bank, chosen.shape[-1]
        pairs = chosen.reshape(-1)
        tokens = x.reshape(-1, x.shape[-1])
        outputs: list[mx.array] = []
        places: list[Numbers] = []
        for number, part in enumerate(parts):
            if take_turns and number:
                mx.eval(outputs)
                self._outputs.arrays.clear()
                bank.free()
                bank.begin(self._layer, part)
            place = np.flatnonzero(np.isin(pairs, part))
            output = self._with(tokens[mx.array(place // per_token)], pairs[place][:, None], part)
            mx.async_eval(output)
            outputs.append(output[:, 0])
            places.append(place)
        back = mx.array(np.argsort(np.concatenate(places)))
        return mx.concatenate(outputs)[back].reshape(*chosen.shape, -1)


class Preview:
    """Asks the router of the layer ahead what it would choose for this layer's hidden states.

    They are those of one layer before, to which a transformer's layer adds little, so most of the choice
    is the later one. Only the router is computed: the preview ends at the switch layer, and what the model
    has made of shared experts until then is lazy and dropped.
    """

    def __init__(self, experts: BankedExperts, owner: Layer) -> None:
        """Begin.

        Args:
            experts: Of the layer ahead.
            owner: The module around it, which is called with hidden states alone.
        """
        self._experts = experts
        self._owner = owner
        self._compute = type(owner).__call__

    @property
    def layer(self) -> int:
        """Number of the layer ahead among those with experts."""
        return self._experts.layer

    def choice(self, seen: mx.array) -> mx.array | None:
        """Return uint32 [..., k], experts; None if the owner asked for none."""
        return self._experts.choice(seen, self._owner, self._compute)


def see_hidden_states(owner: Layer, experts: BankedExperts) -> None:
    """Let a layer know the hidden states that its owner is called with.

    Python looks ``__call__`` up in the class, so the owner gets a class of its own, derived from its class.
    """
    kind = type(owner)

    class Seeing(kind):  # type: ignore[misc, valid-type]
        """The owner, which shows its hidden states before it computes."""

        def __call__(self, x: mx.array) -> mx.array:
            experts.router.seen = x
            hidden: mx.array = super().__call__(x)
            return hidden

    Seeing.__name__, Seeing.__qualname__, Seeing.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    owner.__class__ = Seeing


def connect_previews(layers: Sequence[BankedExperts], owners: Sequence[Layer | None]) -> None:
    """Let each layer preview the next one, where both are called with hidden states alone.

    Args:
        layers: In their order.
        owners: The module around each; None where there is no such module.
    """
    previews = [
        None if owner is None else Preview(one, owner)
        for one, owner in zip(layers, owners, strict=True)
    ]
    for one, owner, ahead in zip(layers[:-1], owners[:-1], previews[1:], strict=True):
        if owner is not None and ahead is not None:
            one.ahead = ahead
            see_hidden_states(owner, one)
