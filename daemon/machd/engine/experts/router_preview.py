"""A look at what the next layer's router will choose, so that its experts are read ahead.

A transformer's layer adds little to its hidden states, so a router that is called with the hidden states of the
layer before chooses mostly what it will choose for its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import mlx.core as mx

from machd.engine.backend.untyped import Layer

Compute = Callable[[Layer, mx.array], mx.array]
"""The block's own ``__call__``: (block, hidden states) to hidden states."""


class RoutedError(Exception):
    """Ends a preview: the router has chosen experts, uint32 [..., k]."""

    def __init__(self, indices: mx.array) -> None:
        super().__init__()
        self.indices = indices


class BlockInput:
    """The hidden states [..., dim] that a mixture-of-experts block was called with; None before.

    A holder of its own, because an array that is an attribute of a module counts as a weight.
    """

    def __init__(self) -> None:
        self.hidden: mx.array | None = None


class RouterPreview:
    """Computes a layer's router for other hidden states.

    The block is called, and the switch layer in it raises :class:`RoutedError`. What the block computed until
    then besides the router (shared experts, in some models) is lazy and never evaluated.
    """

    def __init__(self, layer: int, block: Layer, experts: Layer) -> None:
        """Preview the router of ``block``, which takes hidden states alone and holds the switch layer ``experts``."""
        self.layer = layer
        self._block = block
        self._experts = experts
        self._compute: Compute = type(block).__call__

    def choice(self, hidden: mx.array) -> mx.array | None:
        """Return uint32 [..., k], lazy, of hidden states [..., dim]; None if the block chose no experts."""
        self._experts.is_previewed = True
        try:
            self._compute(self._block, hidden)
        except RoutedError as routed:
            return routed.indices
        finally:
            self._experts.is_previewed = False
        return None


def takes_hidden_states_alone(block: Layer) -> bool:
    """Return True for a module whose ``__call__`` has one parameter."""
    return len(inspect.signature(type(block).__call__).parameters) == len(("self", "x"))


def record_input(block: Layer, block_input: BlockInput) -> None:
    """Let a block record the hidden states of each call.

    Python looks ``__call__`` up in the class, so the block gets a subclass of its class.
    """
    kind = type(block)

    class Recording(kind):  # type: ignore[misc, valid-type]
        """The block, which records its input before it computes."""

        def __call__(self, x: mx.array) -> mx.array:
            block_input.hidden = x
            output: mx.array = super().__call__(x)
            return output

    Recording.__name__, Recording.__qualname__ = kind.__name__, kind.__qualname__
    Recording.__module__ = kind.__module__
    block.__class__ = Recording
