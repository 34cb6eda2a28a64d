"""Decoding by several ranks: rank 0 decides as it does alone, and the others do what it did.

Between two points of a step all ranks compute the same passes over the same tokens. The first is the
choice of each row's span, the second what each row keeps of the pass. Rank 0 alone has grammars,
proposers and samplers: two ranks whose logits differ in the last bit would not choose the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from machd.engine.kv.lane_kv import LaneKv
from machd.engine.protocol.step import DecodeRow, RowFault, SampledToken, SettledRow, SpanCost
from machd.engine.step.decode_pass import Chunk, DecodePass, Passes
from machd.engine.step.decoder import Decoder
from machd.engine.step.decoder_row import Decoded
from machd.engine.step.ports import Masks, Ranks
from machd.engine.step.verification import Span
from machd.errors import EngineFaultError


class LeadingDecoder(Decoder):
    """The rows of a lane on rank 0."""

    def __init__(
        self,
        passes: Passes,
        kv: LaneKv,
        vocabulary_tokens: int,
        masks: Masks | None,
        ranks: Ranks,
    ) -> None:
        """Begin without rows; ``ranks`` tells the other ranks what is decided."""
        super().__init__(passes, kv, vocabulary_tokens, masks)
        self._ranks = ranks

    def _choose_ahead(self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost) -> list[Span]:
        spans = super()._choose_ahead(plan_rows, cost)
        self._ranks.spans([span.ahead_ids for span in spans])
        return spans

    def _recompute(self, current: DecodePass) -> DecodePass:
        mx.eval(current.logits)  # the others compute this pass, too, before they hear of another
        self._ranks.settled(None)
        return super()._recompute(current)

    def _keep(self, current: DecodePass, settled: Sequence[SettledRow]) -> None:
        self._ranks.settled(settled)
        super()._keep(current, settled)


class FollowingDecoder(Decoder):
    """The rows of a lane on any other rank."""

    def __init__(self, passes: Passes, kv: LaneKv, vocabulary_tokens: int, ranks: Ranks) -> None:
        """Begin without rows; ``ranks`` tells what rank 0 decided."""
        super().__init__(passes, kv, vocabulary_tokens)
        self._ranks = ranks

    def decode(
        self, plan_rows: Mapping[int, DecodeRow], cost: SpanCost, beside: Sequence[Chunk] = ()
    ) -> Decoded:
        """Compute the passes that rank 0 computes, and keep what it keeps.

        Returns:
            The last token of each row, or a fault, so that the step is the same as on rank 0.

        Raises:
            EngineFaultError: Rank 0 has other rows.
        """
        del plan_rows, cost
        assert not beside, "ranks compute chunks on their own"
        told = self._ranks.spans(())
        rows = self._rows
        _check_rows(len(told) or len(rows), len(rows))
        spans = [
            Span(ahead_ids, (row.sampling,) * (1 + len(ahead_ids)))
            for row, ahead_ids in zip(rows, told or [()] * len(rows), strict=True)
        ]
        current = self._dispatch(spans)
        mx.eval(current.logits)
        while (settled := self._ranks.settled(None)) is None:
            current = self._recompute(current)
            mx.eval(current.logits)
        _check_rows(len(settled), len(current.rows))
        decoded = Decoded(span_tokens=current.longest)
        for row, one in zip(current.rows, settled, strict=True):
            row.sampling.position += one.kept_tokens
            if one.has_failed or one.last_token_id is None:
                fault = EngineFaultError("the row failed on rank 0")
                decoded.faults.append(RowFault(row.slot_index, fault))
            else:
                decoded.tokens.append(SampledToken(row.slot_index, one.last_token_id))
        self._keep(current, settled)
        return decoded


def _check_rows(told: int, there: int) -> None:
    if told != there:
        raise EngineFaultError(f"rank 0 decodes {told} rows and this rank {there}")
