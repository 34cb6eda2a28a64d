"""Look-ahead: the next pass is dispatched before the last one's tokens are read.

On Metal and CUDA the device then computes while the program reads, samples masks and plans. On the CPU a
dispatch waits for most of the work itself, so it would only make every token a step late. The verbs are
those of :class:`~machd.engine.step.decoder.Decoder`; only their order differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import mlx.core as mx

from machd.engine.kv.lane_kv import CachedRow, LaneKv
from machd.engine.protocol.step import DecodeRow, SpanCost
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.decoder import Decoder, Sampled
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.ports import Masks
from machd.engine.step.tokens_ahead import Offer, worthwhile_tokens

SeeLeaving = Callable[[int, CachedRow], None]
"""Called with the slot and the caches of a row that is about to leave by itself."""


class LookAheadDecoder(Decoder):
    """A lane whose next pass is under way while the last one's tokens are read."""

    def __init__(
        self,
        passes: Passes,
        caches: LaneKv,
        vocabulary_tokens: int,
        masks: Masks | None = None,
        see_leaving: SeeLeaving | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            passes: Forward passes over the lane's rows, which start at once.
            caches: Keys, values and states of the rows.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar; None where there are none.
            see_leaving: Sees rows that leave with their last token, before it is read.
        """
        super().__init__(passes, caches, vocabulary_tokens, masks)
        self._see_leaving = see_leaving
        self._under_way: DecodePass | None = None

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row, without the pass under way: its logits may not be finite."""
        row, under_way = super().cached_row(slot_index), self._under_way
        if row is not None and under_way is not None:
            for one, length in zip(under_way.rows, under_way.lengths, strict=True):
                if one is self._rows[row.index]:
                    return replace(row, length=row.length - length, is_exact=False)
        return row

    def leave(self, slot_indices: Collection[int]) -> None:
        """Remove rows; a pass that is under way no longer counts for them."""
        under_way = self._under_way.rows if self._under_way is not None else []
        for row in under_way:
            row.is_gone |= row.slot_index in slot_indices
        if all(row.is_gone for row in under_way):
            self._under_way = None  # a row that joins now need not wait for it
        super().leave(slot_indices)

    def decode(
        self, asked: Mapping[int, DecodeRow], cost: SpanCost, beside: Chunk | None = None
    ) -> Decoded:
        """Sample the pass under way, dispatch the next one, then read the tokens.

        A row that joined while a pass was under way has neither a token nor a fault yet. Where tokens
        ahead are expected, the next pass is not dispatched: they follow tokens that have to be read.
        """
        assert beside is None, "the pass is under way before its chunk is known"
        current, self._under_way = self._under_way, None
        if current is None:
            current = self._dispatch(self._choose_ahead(asked, cost))
        sampled = self._sample(_of_present_rows(current))
        if not sampled.current.drafts:
            self._remove([row for row, _ in sampled.failed])
            self._remove_finished()
            if self._rows and not self._expects_tokens_ahead(asked, cost):
                self._under_way = self._passes.dispatch(self._rows, self._next_ids(sampled))
        return self._settle(sampled)

    def _remove_finished(self) -> None:
        """Remove rows that have all their tokens, so that the next pass does not compute them."""
        finished = [row for row in self._rows if row.tokens_left < 1]
        for row in finished:
            cached_row = self.cached_row(row.slot_index)
            if cached_row is not None and self._see_leaving is not None:
                self._see_leaving(row.slot_index, cached_row)
        self._remove(finished)

    def _expects_tokens_ahead(self, asked: Mapping[int, DecodeRow], cost: SpanCost) -> bool:
        """True if tokens ahead of the sampled, unread ones are likely to be worth a longer pass."""
        if not self._caches.can_roll_back:
            return False
        offers = []
        for row in self._rows:
            one = asked.get(row.slot_index, DecodeRow(row.slot_index))
            proposals, drafts = row.proposals, 0
            if proposals is not None and one.max_draft_tokens:
                # A lookup that finds nothing behind the read tokens seldom does behind the next one.
                is_likely = proposals.propose(1) if proposals.is_lookup else proposals.is_open
                drafts = one.max_draft_tokens if is_likely else 0
            forced = row.forced_tokens - 1 if self._caches.takes_ragged_spans else 0
            offers.append(Offer(max(0, forced), drafts, one.acceptance))
        return worthwhile_tokens(offers, cost) > 0

    def _next_ids(self, sampled: Sampled) -> mx.array:
        """Input of the next pass, int32 [rows]: the sampled tokens, on the device and unread.

        Rows that joined since the pass was dispatched begin with the last token of their prompt.
        """
        ids = [selection.token_ids for _, selection in sampled.parts]
        places = {row: place for place, row in enumerate(sampled.rows)}
        joined = [row for row in self._rows if row not in places]
        places |= {row: len(places) + place for place, row in enumerate(joined)}
        ids.append(mx.array([row.last_token_id for row in joined], dtype=mx.int32))
        order = [places[row] for row in self._rows]
        return mx.concatenate(ids)[mx.array(order, dtype=mx.int32)]


def _of_present_rows(current: DecodePass) -> DecodePass:
    """Drop rows that were released while the pass was under way."""
    stays = [place for place, row in enumerate(current.rows) if not row.is_gone]
    if len(stays) == len(current.rows):
        return current
    rows: list[DecoderRow] = [current.rows[place] for place in stays]
    lengths = [current.lengths[place] for place in stays]
    index = mx.array(stays, dtype=mx.int32)
    return replace(current, rows=rows, lengths=lengths, logits=current.logits[index])
