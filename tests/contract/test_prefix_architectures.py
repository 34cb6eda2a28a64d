"""Rows of every architecture can begin with blocks: computed, loaded, or left by a row that decoded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise

import mlx.core as mx
import pytest
from support.engines.architectures import each_architecture
from support.engines.block_rows import ASKED, BlockRows, FilesInMemory, saved_block
from support.engines.parity import differences
from support.engines.probing import without_compilation

from machd.capabilities.facts import KvCacheKind
from machd.capabilities.rules import PrefixExtent, prefix_cache
from machd.engine.assembly import make_engine
from machd.engine.protocol.blocks import DropBlocks, LoadBlock, SaveBlock
from machd.engine.protocol.step import DecodeRow, Lane, SampledToken, StepPlan
from machd_probes.prober import tiny_loaded
from machd_probes.scripts import random_prompt

_PROMPT = random_prompt(41, 5, 256)
_BEHIND = random_prompt(4, 8, 256)
_ENDS = (0, 16, 32, 41)
_TOKENS = 6


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with without_compilation():
        yield
    gc.collect()
    mx.clear_cache()


def _computed(rows: BlockRows) -> list[SampledToken]:
    """Generate from the prompt without blocks, in the chunks that its blocks are made of."""
    tokens: list[SampledToken] = []
    for start, stop in pairwise(_ENDS):
        chunk = rows.chunk(_PROMPT, start, stop)
        tokens += rows.run(StepPlan(prefill=(chunk,))).tokens
    while len(tokens) < _TOKENS:
        tokens += rows.run(StepPlan(decode=(DecodeRow(0),))).tokens
    rows.release(0)
    return tokens


@each_architecture()
def test_row_opened_from_blocks_gives_the_same_tokens(variant: str) -> None:
    """In both lanes, with loaded blocks, and with the blocks of a completion."""
    loaded = tiny_loaded(variant)
    if prefix_cache(loaded.description.cache).extent is PrefixExtent.NONE:
        assert loaded.description.cache.kind in {KvCacheKind.CHUNKED, KvCacheKind.COMPRESSED}
        return
    rows = BlockRows(make_engine(loaded, disk_tier=FilesInMemory()))
    expected = _computed(rows)

    saved, blocks = [], []
    for start, stop in pairwise(_ENDS[:3]):
        rows.run(StepPlan(prefill=(rows.chunk(_PROMPT, start, stop),)))
        held = rows.store(0, start, stop, has_state=True)
        assert held.has_state
        blocks.append(held.block_id)
        saved.append(saved_block(held, _PROMPT[start:stop], start))
        rows.change(SaveBlock(held.block_id, saved[-1]))
    rows.release(0)
    for lane in Lane:
        said = rows.reusing(_PROMPT, _ENDS[2], blocks, _TOKENS, lane=lane)
        assert differences(expected, said, ASKED) == []

    loads = (LoadBlock(*pair) for pair in zip(blocks, saved, strict=True))
    result = rows.change(DropBlocks(tuple(blocks)), *loads)
    assert [one.nbytes for one in result.held_blocks] == [one.nbytes for one in saved]
    said = rows.reusing(_PROMPT, _ENDS[2], blocks, _TOKENS)
    assert differences(expected, said, ASKED) == []

    completion = rows.generate(rows.chunk(_PROMPT, 0, len(_PROMPT)), _TOKENS)
    text = (*_PROMPT, *(token.token_id for token in completion))
    held = rows.store(0, 0, len(text) - 1, has_state=True)
    rows.release(0)
    following = (*text, *_BEHIND)
    said = rows.reusing(following, len(text) - 1, (held.block_id,), _TOKENS)
    assert differences(rows.alone(following, _TOKENS), said, ASKED) == []
