"""Orders of rank 0 as bytes."""

from __future__ import annotations

import pytest

from machd.engine.protocol.blocks import DropBlocks, ReusedPrefix, SplitBlock, StoreBlock
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.engine.ranks.orders import Close, Order, Report, Reset, Run, decoded, encoded
from machd.request.generation import SamplingParams

_CHUNK = PrefillChunk(
    slot_index=3,
    token_ids=(5, 6, 7),
    start=2,
    is_last=True,
    sampling=SamplingParams(temperature=0.7, seed=9, prompt_logprobs=2),
    reserved_tokens=40,
    lane=Lane.SERIAL,
    reused=ReusedPrefix((1, 2), (8,)),
)


def test_a_plan_arrives_with_all_that_a_follower_acts_on() -> None:
    """Everything but what only rank 0 decides with: sampling, costs and draft lengths."""
    blocks = (StoreBlock(1, 0, 0, 16, has_state=True), SplitBlock(1, 2, 4), DropBlocks((1, 2)))
    plan = StepPlan((1,), (_CHUNK,), (DecodeRow(0, max_draft_tokens=4),), blocks)

    order = decoded(encoded(Run.of(plan, number=7, row_checksum=11)))

    assert isinstance(order, Run)
    assert (order.number, order.row_checksum) == (7, 11)
    told = order.plan
    assert (told.release, told.blocks) == (plan.release, blocks)
    assert told.decode == (DecodeRow(0),)
    assert told.prefill[0].sampling == SamplingParams(prompt_logprobs=2)
    assert [getattr(told.prefill[0], one) for one in _KEPT] == [
        getattr(_CHUNK, one) for one in _KEPT
    ]


_KEPT = ("slot_index", "token_ids", "start", "is_last", "reserved_tokens", "lane", "reused")


@pytest.mark.parametrize("order", [Reset(1, None), Reset(2, 16), Report(3), Close(4)])
def test_other_orders_arrive_as_they_are(order: Order) -> None:
    """Each kind is told apart from the others."""
    assert decoded(encoded(order)) == order
