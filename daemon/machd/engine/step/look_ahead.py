"""Look-ahead: the next pass is dispatched before the last one's tokens are read.

On Metal and CUDA the device then computes while the program reads tokens, fills masks and plans. On the CPU a
dispatch waits for most of the work itself, so it would only make every token a step late. A pass that is
dispatched ahead has plain spans: tokens ahead follow tokens that have to be read first. The verbs are
those of :class:`~machd.engine.step.decoder.Decoder`; only their order differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from machd.engine.kv.lane_kv import CachedRow, LaneKv
from machd.engine.protocol.step import DecodeRow, SpanCost
from machd.engine.step.decider import Decider
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.decoder import Decoder, Sampled
from machd.engine.step.decoder_row import Decoded, DecoderRow
from machd.engine.step.ports import Masks
from machd.engine.step.tokens_ahead import Offer, worthwhile_tokens

OnFinished = Callable[[int, CachedRow], None]
"""Called with the slot and the caches of a row that has its last token, before it leaves."""


class LookAheadDecoder(Decoder):
    """A lane whose next pass is under way while the last one's tokens are read."""

    def __init__(
        self,
        passes: Passes,
        kv: LaneKv,
        vocabulary_tokens: int,
        masks: Masks,
        decider: Decider,
        on_finished: OnFinished | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            passes: Forward passes over the lane's rows, which start at once.
            kv: Keys, values and states of the rows.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar.
            decider: Decides each row's span, and what it keeps of a pass.
            on_finished: Copies a finished row, so that blocks can still be made of it.
        """
        super().__init__(passes, kv, vocabulary_tokens, masks, decider)
        self._on_finished = on_finished
        self._under_way: DecodePass | None = None

    def cached_row(self, slot_index: int) -> CachedRow | None:
        """Locate a slot's row, without the pass under way: its logits may not be finite."""
        row, under_way = super().cached_row(slot_index), self._under_way
        if row is None or under_way is None or self._rows[row.index] not in under_way.rows:
            return row
        return replace(row, length=row.length - 1, is_exact=False)

    def decode(
        self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost, beside: Sequence[Chunk] = ()
    ) -> Decoded:
        """Sample the pass under way, dispatch the next one, then read the tokens.

        A row that joined while a pass was under way has neither a token nor a fault yet. Where tokens
        ahead are expected, the next pass is not dispatched: they follow tokens that have to be read.
        """
        assert not beside, "the pass is under way before its chunk is known"
        current, self._under_way = self._under_way, None
        if current is None:
            current = self._dispatch(self._spans(plan_rows, cost))
        current = _of_present_rows(current)
        while (sampled := self._sample(current)) is None:
            current = self._recompute(current)
        if current.longest == 1:
            self._remove([row for row, _ in sampled.failed])
            self._remove_finished()
            if self._rows and not self._expects_tokens_ahead(plan_rows, cost):
                self._under_way = self._passes.dispatch(self._rows, self._next_ids(sampled))
        if (decoded := self._settle(sampled)) is None:
            return self._finish(self._recompute(current))
        return self._keep(current, decoded)

    def _remove(self, rows: Collection[DecoderRow]) -> None:
        """Remove rows; a pass under way without any other row is dropped."""
        super()._remove(rows)
        if self._under_way is not None and all(row.is_gone for row in self._under_way.rows):
            self._under_way = None  # a row that joins now need not wait for it

    def _remove_finished(self) -> None:
        """Remove rows whose last token is sampled, though not read, so that the next pass skips them."""
        finished = [row for row in self._rows if row.tokens_left < 1]
        for row in finished:
            cached_row = self.cached_row(row.slot_index)
            if cached_row is not None and self._on_finished is not None:
                self._on_finished(row.slot_index, cached_row)
        self._remove(finished)

    def _expects_tokens_ahead(self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost) -> bool:
        """True if tokens ahead of the sampled ones, not read yet, are likely to be worth a longer pass."""
        if not self._kv.can_roll_back:
            return False
        offers = []
        for row in self._rows:
            one = plan_rows.get(row.slot_index, DecodeRow(row.slot_index))
            proposals, drafts = row.proposals, 0
            if proposals is not None and one.max_draft_tokens:
                # A lookup that finds nothing after the read tokens seldom does after the next one.
                is_likely = proposals.propose(1) if proposals.is_lookup else proposals.is_open
                drafts = one.max_draft_tokens if is_likely else 0
            # The sampled token is the first of the forced ones.
            forced = row.forced_tokens - 1 if self._kv.takes_ragged_spans else 0
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
    """Drop rows that left while the pass was under way; its spans are plain."""
    stays = [place for place, row in enumerate(current.rows) if not row.is_gone]
    if len(stays) == len(current.rows):
        return current
    rows = [current.rows[place] for place in stays]
    spans = [current.spans[place] for place in stays]
    logits = current.logits[mx.array(stays, dtype=mx.int32)]
    return replace(current, rows=rows, spans=spans, logits=logits)
