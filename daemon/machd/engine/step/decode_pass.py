"""Forward passes over the rows of a lane: each row's span of tokens, from its last one on.

Shapes of a pass:

- plain: one token of each row, ``[rows, 1]``;
- padded: spans of unequal length, ``[rows, longest]``. Short ones end in zeros, which
  :meth:`~machd.engine.kv.lane_kv.LaneKv.begin_pass` keeps out of attention and of recurrent state;
- packed: a mixed batch of flattened tokens, ``[rows + chunk tokens, 1]``: one token of each row, then those of
  prompts' chunks. ``kernels/packed.py`` attends each to its own caches. Only with llama layers that ``kernels/`` fuses,
  which it does on the CPU in one process, and without look-ahead.

A pass is dispatched, not computed: its logits are lazy until they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import LaneKv
from machd.engine.protocol.step import DraftOutcome
from machd.engine.step.row import DecoderRow
from machd.engine.step.verification import Span
from machd.request.adapter import Adapter

Forward = Callable[[mx.array, list[Any], Mapping[str, mx.array]], mx.array]
"""Token ids int32 [rows, n], the caches of the model and further features to logits [rows, n, vocabulary].

Features are embeddings in place of token ids, and positions [3, rows, n] for models that are told them.

Of a packed pass the rows are those of the lane and then the chunks' tokens; n is 1.
"""

ForwardPacked = Callable[[mx.array, list[Any], int], mx.array]
"""A packed pass's token ids, its caches and the lane's rows to the logits of these, [rows, 1, vocabulary]."""

ChooseAdapters = Callable[[Sequence[tuple[Adapter, ...]]], AbstractContextManager[None]]
"""See :meth:`machd.engine.step.ports.RowAdapters.chosen`."""

NO_FEATURES: Mapping[str, mx.array] = MappingProxyType({})

PackCaches = Callable[[list[Cache], Sequence[tuple[Sequence[Cache], int]]], list[Any]]
"""The rows' caches, none where no row decodes, and each prompt's with the number of its tokens, to the caches
of a packed pass."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt, the caches that hold the tokens before them, and the row's adapters."""

    token_ids: tuple[int, ...]
    caches: Sequence[Cache]
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class Packing:
    """Functions of packed passes.

    Attributes:
        pack: Makes the caches of a packed pass.
        forward: The model in such a pass.
        is_possible: False where the model's layers cannot compute one; and under look-ahead, because the rows' pass
            is dispatched before the plan that has the chunks.
    """

    pack: PackCaches
    forward: ForwardPacked
    is_possible: bool = True

    def inputs(
        self, row_caches: list[Cache], chunks: Sequence[Chunk]
    ) -> tuple[mx.array, list[Any]]:
        """Return the token ids int32 [tokens, 1] of chunks, and the caches of the pass that computes them.

        Args:
            row_caches: The decoding rows' caches; none where no row decodes.
            chunks: At least one; one of each prompt at the most, since its caches' offset is where its tokens begin.
        """
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        caches = self.pack(row_caches, [(chunk.caches, len(chunk.token_ids)) for chunk in chunks])
        return mx.array(token_ids, dtype=mx.int32)[:, None], caches


def _not_packed(*_: object) -> NoReturn:
    raise AssertionError("the model's layers compute no packed pass")


NO_PACKING = Packing(_not_packed, _not_packed, is_possible=False)


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A forward pass under way.

    Attributes:
        spans: Each row's span.
        token_ids: int32 [rows, longest], shorter spans padded with 0.
        logits: [positions, vocabulary], after each token of each span, row by row.
        longest: Tokens of the longest span.
        outcomes: Drafts that were rejected before this pass took their place.
        features: Further inputs of the model.
    """

    rows: list[DecoderRow]
    spans: list[Span]
    token_ids: mx.array
    logits: mx.array
    longest: int
    outcomes: tuple[DraftOutcome, ...] = ()
    features: Mapping[str, mx.array] = field(default_factory=dict)


class Passes:
    """The passes of one lane."""

    def __init__(
        self,
        forward: Forward,
        kv: LaneKv,
        *,
        looks_ahead: bool = False,
        packing: Packing = NO_PACKING,
        has_positions: bool = False,
        choose_adapters: ChooseAdapters,
    ) -> None:
        """Begin without one.

        Args:
            forward: The model.
            kv: Caches of the lane's rows.
            looks_ahead: Look ahead: start every pass on the device at once. Otherwise a pass starts early only
                where masks are filled meanwhile.
            packing: Functions of packed passes.
            has_positions: The model is told the positions of rows.
            choose_adapters: Chooses the rows' adapters while a pass is built.
        """
        self._forward = forward
        self._kv = kv
        self.looks_ahead = looks_ahead
        self._packing = packing
        self._has_positions = has_positions
        self._choose_adapters = choose_adapters

    def dispatch(
        self,
        rows: Sequence[DecoderRow],
        last_ids: mx.array,
        spans: Sequence[Span] = (),
        chunks: Sequence[Chunk] = (),
    ) -> DecodePass:
        """Dispatch the pass over every row's span, and add each span to its row's length.

        Args:
            rows: All rows of the lane, at least one.
            last_ids: int32 [rows], their last tokens.
            spans: Each row's span; plain ones unless given.
            chunks: Chunks of prompts to compute as well; only with plain spans.
        """
        spans = spans or [Span()] * len(rows)
        lengths = [span.length for span in spans]
        longest = max(lengths)
        token_ids = last_ids[:, None]
        if longest > 1:
            self._kv.checkpoint()
            padded = [[*span.ahead_ids, *[0] * (longest - span.length)] for span in spans]
            token_ids = mx.concatenate([token_ids, mx.array(padded, dtype=mx.int32)], axis=1)
        self._kv.begin_pass(lengths if longest > 1 else None)
        caches, features = self._kv.caches, NO_FEATURES
        if chunks:
            assert longest == 1, "a packed pass has plain spans"
            packed_ids, caches = self._packing.inputs(caches, chunks)
            token_ids = mx.concatenate([token_ids, packed_ids])  # [rows + tokens, 1]
            with self._choose_adapters([*_adapters_of(rows), *token_adapters(chunks)]):
                logits = self._packing.forward(token_ids, caches, len(rows))
        else:
            if self._has_positions:
                features = {"position_ids": _positions(rows, longest)}
            with self._choose_adapters(_adapters_of(rows)):
                logits = self._forward(token_ids, caches, features)
        logits = _at_spans(logits, lengths)
        self._kv.end_pass()
        for row, length in zip(rows, lengths, strict=True):
            row.length += length
        if self.looks_ahead or any(row.sampling.matcher is not None for row in rows):
            mx.async_eval(logits)
        return DecodePass(list(rows), list(spans), token_ids, logits, longest, features=features)

    def compute_again(self, current: DecodePass, kept_tokens: Sequence[int]) -> None:
        """Compute the first ``kept_tokens`` of each span again, on caches that were rolled back."""
        longest = max(kept_tokens)
        self._kv.begin_pass(kept_tokens if longest > 1 else None)
        features = {name: one[..., :longest] for name, one in current.features.items()}
        with self._choose_adapters(_adapters_of(current.rows)):
            self._forward(current.token_ids[:, :longest], self._kv.caches, features)
        self._kv.end_pass()
        mx.eval([cache.state for cache in self._kv.caches])


def token_adapters(chunks: Sequence[Chunk]) -> list[tuple[Adapter, ...]]:
    """Return the adapters of each token of chunks that lie behind one another."""
    return [chunk.adapters for chunk in chunks for _ in chunk.token_ids]


def _adapters_of(rows: Sequence[DecoderRow]) -> list[tuple[Adapter, ...]]:
    return [row.sampling.params.adapters for row in rows]


def _positions(rows: Sequence[DecoderRow], tokens: int) -> mx.array:
    """Return the positions int32 [3, rows, tokens] of spans: images move what lies behind them."""
    starts = mx.array([row.length + row.position_shift for row in rows], dtype=mx.int32)
    positions = starts[:, None] + mx.arange(tokens, dtype=mx.int32)
    return mx.broadcast_to(positions, (3, len(rows), tokens))


def _at_spans(logits: mx.array, lengths: Sequence[int]) -> mx.array:
    """Logits [rows, longest, vocabulary] without the padding: [positions, vocabulary]."""
    if min(lengths) < max(lengths):
        places = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
        rows, columns = mx.array(places, dtype=mx.int32).T
        return logits[rows, columns]
    return logits.reshape(-1, logits.shape[-1])
