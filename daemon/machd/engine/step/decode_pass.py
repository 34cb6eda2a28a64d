"""Forward passes over the rows of a lane: each row's span of tokens, from its last one on.

A pass is dispatched, not computed: its logits are lazy until they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import LaneKv
from machd.engine.protocol.step import DraftOutcome
from machd.engine.step.decoder_row import DecoderRow
from machd.engine.step.verification import Draft

Forward = Callable[[mx.array, list[Any]], mx.array]
"""Token ids int32 [rows, n] and the caches of the model to logits [rows, n, vocabulary]."""

PackCaches = Callable[[list[Cache], Sequence[Cache], int], list[Any]]
"""The rows' caches, a prompt's, and its number of tokens, to caches of a pass that computes both."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt, and the caches that hold the tokens before them."""

    token_ids: tuple[int, ...]
    caches: Sequence[Cache]


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A forward pass under way.

    Attributes:
        drafts: Each row's tokens ahead; empty if every span is one token long.
        lengths: Tokens in each row's span: its last one and those ahead.
        token_ids: int32 [rows, longest], shorter spans padded with 0.
        logits: [positions, vocabulary], after each token of each span, row by row.
        outcomes: Drafts that were rejected before this pass took their place.
    """

    rows: list[DecoderRow]
    drafts: list[Draft]
    lengths: list[int]
    token_ids: mx.array
    logits: mx.array
    outcomes: list[DraftOutcome] = field(default_factory=list)


class Passes:
    """The passes of one lane."""

    def __init__(
        self,
        forward: Forward,
        caches: LaneKv,
        *,
        is_eager: bool = False,
        pack: PackCaches | None = None,
    ) -> None:
        """Begin without one.

        Args:
            forward: The model.
            caches: Those of the lane's rows.
            is_eager: Start every pass on the device at once. Otherwise a pass starts early only where
                masks are filled meanwhile.
            pack: Makes the caches of a pass with a chunk beside; None where there is no such pass.
        """
        self._forward = forward
        self._caches = caches
        self._is_eager = is_eager
        self._pack = pack

    def dispatch(
        self,
        rows: Sequence[DecoderRow],
        last_ids: mx.array,
        drafts: Sequence[Draft] = (),
        beside: Chunk | None = None,
    ) -> DecodePass:
        """Dispatch the pass over every row's span.

        Args:
            rows: All rows of the lane.
            last_ids: int32 [rows], their last tokens.
            drafts: Each row's tokens ahead; empty for spans of one token.
            beside: Prompt tokens to compute as well; only beside spans of one token.
        """
        lengths = [1 + len(draft.token_ids) for draft in drafts] or [1] * len(rows)
        longest = max(lengths)
        if drafts:
            self._caches.checkpoint()
        self._caches.open_step(lengths if longest > 1 else None)
        token_ids, layers = last_ids[:, None], self._caches.layers
        if longest > 1:
            padded = [[*one.token_ids, *[0] * (longest - 1 - len(one.token_ids))] for one in drafts]
            token_ids = mx.concatenate([token_ids, mx.array(padded, dtype=mx.int32)], axis=1)
        if beside is not None:
            assert longest == 1, "a chunk rides beside spans of one token"
            assert self._pack is not None, "the model's layers compute both"
            layers = self._pack(layers, beside.caches, len(beside.token_ids))
            chunk = mx.array(beside.token_ids, dtype=mx.int32)[:, None]
            token_ids = mx.concatenate([token_ids, chunk])  # [rows + tokens, 1]
        logits = self._forward(token_ids, layers)[: len(rows)]
        self._caches.close_step()
        logits = _at_spans(logits, lengths)
        for row, length in zip(rows, lengths, strict=True):
            row.passes += 1
            row.length += length
        if self._is_eager or any(row.sampling.matcher is not None for row in rows):
            mx.async_eval(logits)
        return DecodePass(list(rows), list(drafts), lengths, token_ids, logits)

    def compute_again(self, current: DecodePass, kept_tokens: Sequence[int]) -> None:
        """Compute the first ``kept_tokens`` of each span again, on caches that were rolled back."""
        longest = max(kept_tokens)
        self._caches.open_step(kept_tokens if longest > 1 else None)
        self._forward(current.token_ids[:, :longest], self._caches.layers)
        self._caches.close_step()
        mx.eval([cache.state for cache in self._caches.layers])


def _at_spans(logits: mx.array, lengths: Sequence[int]) -> mx.array:
    """Logits [rows, longest, vocabulary] without the padding: [positions, vocabulary]."""
    if min(lengths) < max(lengths):
        places = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
        rows, columns = mx.array(places, dtype=mx.int32).T
        return logits[rows, columns]
    return logits.reshape(-1, logits.shape[-1])
