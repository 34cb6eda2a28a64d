"""Forward passes over the rows of a lane: each row's last token, and tokens that may follow it.

A pass is dispatched, not computed: its logits are lazy until somebody samples from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kernels.mixed import mixed_caches
from machd.engine.kv.row_caches import RowCaches
from machd.engine.step.decoder_row import DecoderRow
from machd.engine.step.verification import Draft

Forward = Callable[[mx.array, list[Any]], mx.array]
"""Token ids int32 [rows, n] and the caches of the model to logits [rows, n, vocabulary]."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some of a prompt's tokens, and the caches that hold those before them."""

    token_ids: tuple[int, ...]
    caches: Sequence[Cache]


@dataclass(frozen=True, slots=True)
class DecodePass:
    """A forward pass under way.

    Attributes:
        lengths: Tokens that it takes of each row.
        token_ids: int32 [rows, longest], those of shorter rows padded.
        logits: [rows, vocabulary], after each row's last token that was not guessed; or [positions,
            vocabulary], row by row after that one and each guess.
    """

    rows: list[DecoderRow]
    lengths: list[int]
    token_ids: mx.array
    logits: mx.array


class Passes:
    """The passes of one lane."""

    def __init__(self, forward: Forward, caches: RowCaches, *, is_eager: bool) -> None:
        """Begin without one.

        Args:
            forward: The model.
            caches: Of the lane's rows.
            is_eager: Whether the device always begins at once, and not only where somebody has
                something else to do meanwhile.
        """
        self._forward = forward
        self._caches = caches
        self._is_eager = is_eager

    def dispatch(
        self, rows: Sequence[DecoderRow], last_ids: mx.array, beside: Chunk | None = None
    ) -> DecodePass:
        """A pass that is sampled after the last token of each row.

        Args:
            rows: All of the lane.
            last_ids: int32 [rows], their last tokens; forced ones follow them.
            beside: A prompt's tokens to compute as well.
        """
        token_ids, lengths = self._open([row.forced for row in rows], last_ids)
        layers, longest = self._caches.layers, max(lengths)
        if beside is not None:
            assert longest == 1, "a pass with a chunk is of one token each"
            layers = mixed_caches(layers, beside.caches, len(beside.token_ids))
            chunk = mx.array(beside.token_ids, dtype=mx.int32)[:, None]
            token_ids = mx.concatenate([token_ids, chunk])
        logits = self._forward(token_ids, layers)[: len(lengths)]
        self._caches.close_step()
        if longest > 1:
            last = mx.array(lengths, dtype=mx.int32) - 1
            logits = logits[mx.arange(len(lengths)), last]
        else:
            logits = logits[:, -1, :]
        return self._dispatched(rows, lengths, token_ids, logits)

    def dispatch_drafted(
        self, rows: Sequence[DecoderRow], last_ids: mx.array, drafts: Sequence[Draft]
    ) -> DecodePass:
        """A pass that is sampled after each row's last token and after each of its guesses."""
        pairs = list(zip(rows, drafts, strict=True))
        self._caches.mark()
        known = [row.forced + draft.token_ids for row, draft in pairs]
        token_ids, lengths = self._open(known, last_ids)
        logits = self._forward(token_ids, self._caches.layers)
        self._caches.close_step()
        places = [
            (index, len(row.forced) + place)
            for index, (row, draft) in enumerate(pairs)
            for place in range(len(draft.samplings))
        ]
        if len(places) == token_ids.size:
            logits = logits.reshape(-1, logits.shape[-1])
        else:
            index, columns = mx.array(places, dtype=mx.int32).T
            logits = logits[index, columns]
        return self._dispatched(rows, lengths, token_ids, logits)

    def compute_again(self, current: DecodePass, kept_tokens: Sequence[int]) -> None:
        """Compute what the rows keep of a pass whose caches were put back to before it."""
        longest = max(kept_tokens)
        self._caches.open_step(kept_tokens if longest > 1 else None)
        self._forward(current.token_ids[:, :longest], self._caches.layers)
        self._caches.close_step()
        mx.eval([cache.state for cache in self._caches.layers])

    def _open(
        self, known: Sequence[tuple[int, ...]], last_ids: mx.array
    ) -> tuple[mx.array, list[int]]:
        """The tokens of a pass [rows, longest]: each row's last one and those known to follow it.

        Returns:
            The tokens, and how many each row has of them.
        """
        assert known, "a pass has rows"
        lengths = [1 + len(tokens) for tokens in known]
        longest = max(lengths)
        self._caches.open_step(lengths if longest > 1 else None)
        token_ids = last_ids[:, None]
        if longest > 1:
            padded = [[*tokens, *[0] * (longest - 1 - len(tokens))] for tokens in known]
            token_ids = mx.concatenate([token_ids, mx.array(padded, dtype=mx.int32)], axis=1)
        return token_ids, lengths

    def _dispatched(
        self,
        rows: Sequence[DecoderRow],
        lengths: list[int],
        token_ids: mx.array,
        logits: mx.array,
    ) -> DecodePass:
        for row, length in zip(rows, lengths, strict=True):
            row.steps += 1
            row.length += length
            row.forced = ()
        if self._is_eager or any(row.sampling.matcher is not None for row in rows):
            mx.async_eval(logits)
        return DecodePass(list(rows), lengths, token_ids, logits)
