"""A model's vision encoder in stages, so that other rows may move while an image is encoded.

mlx computes nothing until a result is evaluated. So the encoder is called once, which takes no time, and the outputs of its modules are
evaluated one after the other: what is computed between two of them is a stage. Attention over many patches is several stages, each of
some of the queries: its scores grow with the square of the patches, in time and in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.core as mx

from machd.engine.backend.untyped import Layer

_MAX_SCORE_BYTES = 128 << 20
"""Scores of one block of attention; softmax makes a second array of them."""

_recorded: deque[mx.array] | None = None
"""Outputs of recording modules in the order of computation, while an encoder is called; the engine thread's alone."""


def record_outputs(modules: Iterable[Layer]) -> None:
    """Let modules record what they give while :func:`recording` is entered.

    Python looks ``__call__`` up in the class, so each module gets a subclass of its class.
    """
    for module in modules:
        kind: Any = type(module)
        module.__class__ = _recording_class(kind)


@contextmanager
def recording() -> Iterator[deque[mx.array]]:
    """Yield the outputs of all modules that are called inside, and of attention's blocks, lazy, in the order of computation."""
    global _recorded  # noqa: PLW0603 - modules have no other way to it
    _recorded = deque()
    whole = mx.fast.scaled_dot_product_attention
    mx.fast.scaled_dot_product_attention = partial(_attend_in_blocks, whole, _recorded)
    try:
        yield _recorded
    finally:
        _recorded = None
        mx.fast.scaled_dot_product_attention = whole


def _attend_in_blocks(
    attend: Callable[..., mx.array],
    recorded: deque[mx.array],
    queries: mx.array,
    keys: mx.array,
    *others: mx.array,
    mask: mx.array | str | None = None,
    **named: object,
) -> mx.array:
    """Compute attention for some of the queries [rows, heads, tokens, dim] at a time, each recorded block a stage.

    A query's output depends on no other query. A GPU's own attention keeps no scores; there blocks bound the time of a stage.
    """
    rows, heads, tokens, _ = queries.shape
    bytes_per_query = rows * heads * keys.shape[2] * queries.dtype.size
    block = max(1, _MAX_SCORE_BYTES // max(1, bytes_per_query))
    if tokens <= block or isinstance(mask, str):
        return attend(queries, keys, *others, mask=mask, **named)
    outputs: list[mx.array] = []
    for start in range(0, tokens, block):
        stop, own = min(start + block, tokens), mask
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            own = mask[..., start:stop, :]
        outputs.append(attend(queries[:, :, start:stop], keys, *others, mask=own, **named))
    recorded.extend(outputs)
    return mx.concatenate(outputs, axis=2)


@cache
def _recording_class(kind: Any) -> Any:  # noqa: ANN401 - a class of mlx's
    class Recording(kind):  # type: ignore[misc]
        """The module's class, whose output is recorded."""

        def __call__(self, *args: object, **named: object) -> object:
            output: object = super().__call__(*args, **named)
            if _recorded is not None and isinstance(output, mx.array):
                _recorded.append(output)
            return output

    Recording.__name__, Recording.__qualname__ = kind.__name__, kind.__qualname__
    Recording.__module__ = kind.__module__
    return Recording
