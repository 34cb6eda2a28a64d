"""The rules' word on speculation holds for the caches of every architecture."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest
from support.engines.architectures import each_architecture
from support.engines.drafted_rows import LANES, DraftedRows, PlainTexts, Text, make_caches
from support.engines.probing import without_compilation

from machd.capabilities.batching_rules import batched_specdec
from machd.capabilities.facts import CacheFacts
from machd.capabilities.rules import speculation
from machd.capabilities.verdict import Support
from machd.engine.backend.untyped import LanguageModel
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.kv.row_caches import make_row_caches
from machd.engine.kv.serial_lane import SerialLaneKv
from machd_probes.prober import tiny_loaded

_NOISE = 5e-3
"""As for chunks: the order of sums differs, and models with state in half precision feel it."""


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with without_compilation():
        yield
    gc.collect()
    mx.clear_cache()


@each_architecture()
def test_verdicts_are_what_the_caches_do(variant: str) -> None:
    """A row alone takes drafts, and is right with them, unless the rule blocks it; so do batches."""
    loaded = tiny_loaded(variant)
    facts = loaded.description.cache
    model = loaded.model

    single = SerialLaneKv()
    single.join(PrefilledRow(make_row_caches(model), 0, 9, 1))
    assert single.can_roll_back is (speculation(facts).support is not Support.BLOCKED)
    if single.can_roll_back:
        for lane in LANES:
            assert _worst(PlainTexts(model), lane) < _NOISE

    if _is_mergeable(facts):
        is_blocked = batched_specdec(facts).support is Support.BLOCKED
        assert _two_rows(model).can_roll_back is not is_blocked


def _worst(plain: PlainTexts, lane: str) -> float:
    rows = DraftedRows(plain, make_caches(lane))
    rows.join(Text(1, 9, tokens=32, vocabulary_tokens=256))
    for right, wrong in ((0, 3), (2, 1), (1, 9)):
        rows.draft([right], [wrong])
        rows.steps(1)
    rows.draft_in_vain([4])
    rows.steps(8)
    return rows.worst


def _two_rows(model: LanguageModel) -> BatchLaneKv:
    caches = BatchLaneKv(2)
    for _ in range(2):
        caches.join(PrefilledRow(make_row_caches(model), 0, 9, 1))
    return caches


def _is_mergeable(facts: CacheFacts) -> bool:
    return facts.mergeable and not facts.private_classes
