"""The memory tier: bytes are as reported, none stay behind, and no damaged block gets in."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import psutil
import pytest
import structlog
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from support.clocks.manual_clock import ManualClock
from support.engines.block_rows import ASKED, BlockRows, FilesInMemory, saved_block
from support.engines.parity import differences
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind, each_kind, tiny_model
from support.every_run import sampled

from machd.engine.assembly import make_engine
from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import CachedRow
from machd.engine.kv.layers.cache_state import copied, is_like, shape_of
from machd.engine.kv.layers.kinds import kind_of
from machd.engine.loading.loader import LoadedModel
from machd.engine.prefix_blocks.arrays import BlockArrays, copy_of_row, fill_caches
from machd.engine.prefix_blocks.conversion import BlockForm, content_of
from machd.engine.prefix_blocks.encoding import BlockContent, PlainArray
from machd.engine.prefix_blocks.memory_tier import MemoryTier
from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    LoadBlock,
    ReusedPrefix,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.engine.protocol.step import DecodeRow, Lane, StepPlan
from machd.engine.step.mlx_engine import MlxEngine
from machd_probes.scripts import random_prompt

from mlx_lm.models.cache import (  # isort: skip - after the engine
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

PROMPT = random_prompt(40, 2)
_KINDS = each_kind()


def _tier(engine: MlxEngine) -> MemoryTier:
    assert isinstance(engine._blocks, MemoryTier)
    return engine._blocks


def _array(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.uniform(shape=shape).astype(dtype)


def _kv(length: int, *, heads: int = 2, widths: tuple[int, int] = (4, 4), rows: int = 1) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*(_array(rows, heads, length, width) for width in widths))
    return cache


def _cached_row(caches: list[Cache], length: int, *, index: int = 0) -> CachedRow:
    return CachedRow(caches, index, length, is_exact=True)


def _columns(cache: KVCache) -> list[mx.array]:
    return [one[:, :, : cache.offset] for one in (cache.keys, cache.values)]


def _same(one: KVCache, other: KVCache) -> bool:
    pairs = zip(_columns(one), _columns(other), strict=True)
    return one.offset == other.offset and all(bool(mx.array_equal(a, b)) for a, b in pairs)


def test_layers_of_one_shape_share_an_array() -> None:
    """Each other shape, and each other dtype, is one more array."""
    caches: list[Cache] = [_kv(9), _kv(9), CacheList(_kv(9), _kv(9, widths=(4, 6)))]

    block = copy_of_row(_cached_row(caches, 9), 2, 7, has_state=False)

    assert [tuple(one.shape) for one in block.stacks] == [(7, 2, 5, 4), (1, 2, 5, 6)]
    assert block.nbytes == 4 * 2 * 5 * (7 * 4 + 6)


def test_layers_without_arrays_or_width_are_copied() -> None:
    """Some models have layers that keep no arrays at all, or values that are 0 wide."""
    silent, narrow = KVCache(), _kv(6, widths=(4, 0))
    blocks = [
        copy_of_row(_cached_row([silent, narrow], 6), *ends, has_state=True)
        for ends in ((0, 4), (4, 6))
    ]
    filled: list[Cache] = [KVCache(), KVCache()]

    fill_caches(filled, blocks, 5)

    assert (filled[0].offset, filled[0].keys) == (5, None)
    assert filled[1].values.shape == (1, 2, 5, 0)
    assert mx.array_equal(filled[1].keys, narrow.keys[:, :, :5])


def test_model_without_caches_has_empty_blocks() -> None:
    """Nothing is kept, and nothing fails."""
    block = copy_of_row(_cached_row([], 4), 0, 4, has_state=True)
    head, tail = block.part(0, 1), block.part(1, 4)

    fill_caches([], [head, tail], 3)

    assert (block.nbytes, head.tokens, tail.tokens) == (0, 1, 3)


@pytest.mark.parametrize("cuts", [(7,), (1, 7), (3, 4, 7)])
@pytest.mark.parametrize("length", [1, 3, 4, 6, 7])
def test_filled_caches_hold_what_was_copied(cuts: tuple[int, ...], length: int) -> None:
    """It does not matter how positions are spread over blocks, or how many of them are wanted."""
    caches: list[Cache] = [_kv(8), _kv(8, widths=(4, 6), heads=3)]
    starts = (0, *cuts[:-1])
    row = _cached_row(caches, 8)
    blocks = [copy_of_row(row, *ends, has_state=False) for ends in zip(starts, cuts, strict=True)]
    needed = blocks[: sum(start < length for start in starts)]
    filled: list[Cache] = [KVCache(), KVCache()]

    fill_caches(filled, needed, length)

    for cache, original in zip(filled, caches, strict=True):
        original.offset = length
        assert _same(cache, original)


def test_block_has_memory_of_its_own() -> None:
    """Dropping the row, or the block that it was cut from, gives all of their memory back."""
    big = 1 << 20
    for heads in (1, 2):
        cache = _kv(4096, heads=heads, widths=(64, 64))
        mx.eval(cache.state)
        row = _cached_row([cache], 4096)
        block = copy_of_row(row, 0, 4096, has_state=False)
        small, (head, tail) = (
            copy_of_row(row, 0, 16, has_state=False),
            (block.part(0, 16), block.part(16, 4096)),
        )
        mx.eval(block.arrays, small.arrays, head.arrays, tail.arrays)
        del cache, row, block
        before = mx.get_active_memory()

        del tail

        assert before - mx.get_active_memory() > big, "the tail is gone, and its array with it"
        held = small.nbytes + head.nbytes
        assert held == 2 * 16 * 64 * 2 * heads * 4
        before = mx.get_active_memory()
        del small, head
        assert held <= before - mx.get_active_memory() < 2 * held + 4096


def test_state_has_memory_of_its_own() -> None:
    """A piece of a large array is copied; a single number and an empty array are kept."""
    large = _array(1, 1 << 20)
    cache = ArraysCache(4)
    cache[0], cache[1], cache[2] = large[:, :4], mx.array(3.0), mx.zeros((1, 0))
    mx.eval(cache.state[0][:3])
    state = copied(cache.state)
    mx.eval(list(_leaves(state)))
    before = mx.get_active_memory()

    cache[0] = None
    del large

    assert before - mx.get_active_memory() >= 4 << 20
    assert [one.shape for one in _leaves(state)] == [(1, 4), (), (1, 0)]


def _leaves(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    return (
        [one for inner in state for one in _leaves(inner)]
        if isinstance(state, list | tuple)
        else []
    )


def test_writing_into_a_cache_does_not_change_its_copy() -> None:
    """Models write into lists and arrays in place."""
    cache = ArraysCache(2)
    cache[0] = mx.zeros((1, 3))
    state = kind_of(cache).row_state(cache, 0)
    filled = ArraysCache(2)
    filled.state = copied(state)

    for one in (cache, filled):
        one[0][:, 1:] = 5.0
        one[1] = mx.ones((1, 2))

    again = ArraysCache(2)
    again.state = copied(state)
    assert again[0].tolist() == [[0.0, 0.0, 0.0]]
    assert again[1] is None


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("length", [1, 7, 16, 17, 60])
@pytest.mark.parametrize("singles", [0, 1, 3, 20])
def test_state_of_a_rotating_cache_is_its_window(keep: int, length: int, singles: int) -> None:
    """It has no more columns than the window, and the cache goes on as the original."""
    original = RotatingKVCache(16, keep=keep)
    original.update_and_fetch(_array(1, 2, length, 4), _array(1, 2, length, 4))
    for _ in range(singles):
        original.update_and_fetch(_array(1, 2, 1, 4), _array(1, 2, 1, 4))

    restored = RotatingKVCache(16, keep=keep)
    restored.state = kind_of(original).row_state(original, 0)

    assert restored.keys.shape[2] == min(length + singles, 16)
    for tokens in (1, 1, 5, 1, 30, 1):
        new = _array(1, 2, tokens, 4), _array(1, 2, tokens, 4)
        masks = [one.make_mask(tokens) for one in (original, restored)]
        seen = [_seen(one.update_and_fetch(*new)[0], mask) for one, mask in
                zip((original, restored), masks, strict=True)]  # fmt: skip
        assert seen[0] == seen[1]


def _seen(keys: mx.array, mask: mx.array | str | None) -> list[list[float]]:
    """List the first number of each column that a token sees, for each token, in order of size."""
    columns: NDArray[np.float32] = np.array(keys)[0, 0, :, 0]
    if not isinstance(mask, mx.array):
        return [sorted(columns.tolist())]
    rows = np.array(mask).reshape(-1, mask.shape[-1])
    return [sorted(columns[row].tolist()) for row in rows]


@_KINDS
def test_stored_blocks_take_the_reported_bytes(kind: TinyKind) -> None:
    """MLX's own count grows by them, and shrinks when the blocks are dropped."""
    rows = BlockRows(make_engine(loaded(kind)))
    rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, 32),)))
    gc.collect()
    before = mx.get_active_memory()

    held = [rows.store(0, 0, 32, has_state=True) for _ in range(50)]
    grown = mx.get_active_memory() - before
    rows.drop(*(one.block_id for one in held))

    said = sum(one.nbytes for one in held)
    assert said <= grown <= said * 1.2 + 50 * 16384
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("lane", list(Lane))
def test_row_opened_from_blocks_takes_the_memory_of_a_computed_row(lane: Lane) -> None:
    """Nothing of the blocks stays beside its caches."""
    prompt = random_prompt(900, 3)
    rows = BlockRows(make_engine(loaded(TinyKind.STANDARD)))
    blocks = rows.prompt_blocks(prompt, (512, 899))
    held_bytes = rows.store(0, 0, 899).nbytes
    rows.release(0)
    grown = []
    for opening in (
        rows.chunk(prompt, 0, 900, lane=lane),
        rows.chunk(prompt, 899, 900, block_ids=blocks, lane=lane),
    ):
        gc.collect()
        before = mx.get_active_memory()
        rows.generate(opening, 3)
        grown.append(mx.get_active_memory() - before)
        rows.release(0)

    # A cache of one row grows in steps, and these begin elsewhere.
    assert abs(grown[0] - grown[1]) < held_bytes / 3


def test_row_is_updated_in_place_after_it_was_stored() -> None:
    """Copying blocks leaves nothing behind that would make the slab copy itself in each step."""
    prompt = random_prompt(900, 3)
    rows = BlockRows(make_engine(loaded(TinyKind.STANDARD)))
    rows.generate(rows.chunk(prompt, 0, 900), 3)
    kv_bytes = rows.engine.memory().kv_used_bytes
    held = rows.store(0, 0, 128)
    rows.drop(held.block_id)

    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    rows.run(StepPlan(decode=(DecodeRow(0),)))

    assert mx.get_peak_memory() - before < kv_bytes / 2


@_KINDS
def test_block_of_a_model_is_one_stack_at_most(kind: TinyKind) -> None:
    """On Metal the number of buffers is limited."""
    engine = make_engine(loaded(kind))
    rows = BlockRows(engine)
    (block_id,) = rows.prompt_blocks(PROMPT, (16,))

    assert len(_tier(engine)._blocks[block_id].stacks) <= 1


def _poisoned(token_id: int) -> LoadedModel:
    model = tiny_model(TinyKind.STANDARD)
    model.model.model.embed_tokens.weight[token_id] = mx.nan
    mx.eval(model.model.parameters())
    return model


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["reads", "looks ahead"])
def test_positions_with_nan_are_not_stored(looks_ahead: bool) -> None:  # noqa: FBT001
    """Neither a prompt in prefill nor a row that failed leaves blocks with a NaN.

    Blocks of earlier chunks are kept; in its own chunk a NaN reaches all positions.
    """
    bad = VOCABULARY_TOKENS - 1
    prompt = (*(one % 100 + 1 for one in PROMPT[:20]), bad, *(3, 4, 5))
    rows = BlockRows(make_engine(_poisoned(bad), looks_ahead=looks_ahead))
    for start, stop in ((0, 16), (16, 23)):
        rows.run(StepPlan(prefill=(rows.chunk(prompt, start, stop),)))

    result = rows.change(StoreBlock(1, 0, 0, 16), StoreBlock(2, 0, 16, 23))
    assert [one.block_id for one in result.held_blocks] == [1]
    assert result.lost_blocks == (2,)

    last = replace(rows.chunk(prompt, 23, 24), reserved_tokens=25)
    failed = rows.engine.run(StepPlan(prefill=(last,)))
    assert failed.faults
    assert rows.change(StoreBlock(3, 0, 0, 16)).lost_blocks == (3,)


@_KINDS
@pytest.mark.parametrize(
    ("lane", "tokens"),
    sampled(
        [(lane, tokens) for lane in Lane for tokens in (1, 2, 9)],
        # Each lane, with the first token and with a later one that the row looked ahead for.
        [(Lane.BATCH, 1), (Lane.SERIAL, 9)],
    ),
)
def test_row_that_left_by_itself_leaves_blocks(kind: TinyKind, lane: Lane, tokens: int) -> None:
    """Looking ahead, a row leaves with its last token; its state is then that of its end."""
    rows = BlockRows(make_engine(loaded(kind), looks_ahead=True))
    opening = rows.chunk(PROMPT, 0, len(PROMPT), lane=lane)
    said = rows.generate(replace(opening, reserved_tokens=len(PROMPT) + tokens), tokens)
    text = (*PROMPT, *(token.token_id for token in said))
    stop = len(text) - 1
    assert rows.engine.memory().kv_used_bytes > 0

    assert rows.change(StoreBlock(901, 0, 0, stop + 1)).lost_blocks == (901,)
    held = rows.store(0, 0, stop, has_state=True)
    rows.release(0)

    assert held.has_state
    assert rows.engine.memory().kv_used_bytes == 0
    following = (*text, 5, 6, 7)
    reused = rows.reusing(following, stop, (held.block_id,), 5)
    assert differences(rows.alone(following, 5), reused, ASKED) == []
    assert rows.change(StoreBlock(902, 0, 0, 4)).lost_blocks == (902,)


def test_row_that_left_is_not_copied_when_the_prefix_cache_is_off() -> None:
    """No memory is held for it, and no block can be made of it."""
    engine = make_engine(loaded(TinyKind.STANDARD), looks_ahead=True, leaves_blocks=False)
    rows = BlockRows(engine)
    opening = rows.chunk(PROMPT, 0, len(PROMPT))
    rows.generate(replace(opening, reserved_tokens=len(PROMPT) + 3), 3)

    assert engine.memory().kv_used_bytes == 0
    assert rows.change(StoreBlock(1, 0, 0, 16)).lost_blocks == (1,)


def test_warm_up_leaves_no_blocks() -> None:
    """It leaves no row and no file, either; the disk tier is closed with the engine."""
    files = FilesInMemory()
    engine = make_engine(loaded(TinyKind.HYBRID), disk_tier=files)

    assert _tier(engine).nbytes == 0
    assert engine.memory().kv_used_bytes == 0
    assert engine.memory().available_bytes
    assert files.contents == {}
    engine.close()
    assert files.closed_within_s is not None


def test_close_drops_all_blocks() -> None:
    """Their memory is given back."""
    engine = make_engine(loaded(TinyKind.STANDARD))
    BlockRows(engine).prompt_blocks(PROMPT, (16, 32))
    assert _tier(engine).nbytes > 0

    engine.close()

    assert _tier(engine).nbytes == 0


def _content(kind: TinyKind) -> tuple[BlockForm, BlockContent, BlockArrays]:
    engine = make_engine(loaded(kind), disk_tier=FilesInMemory())
    (block_id,) = BlockRows(engine).prompt_blocks(PROMPT, (16,))
    assert _tier(engine)._form is not None
    block = _tier(engine)._blocks[block_id]
    form = _tier(engine)._form
    assert form is not None
    return form, content_of(block), block


@_KINDS
def test_block_comes_back_from_plain_arrays(kind: TinyKind) -> None:
    """It is the same to the bit, state included, and no memory is shared with mlx."""
    form, content, block = _content(kind)

    again = form.block_of(content, 16)

    assert again is not None
    assert all(type(one) is np.ndarray and one.flags.owndata for one in content.arrays.values())
    assert again.state is not None
    assert block.state is not None
    assert tree_flatten(shape_of(again.state)) == tree_flatten(shape_of(block.state))
    assert len(again.arrays) == len(block.arrays) == len(content.arrays)
    pairs = zip(again.arrays, block.arrays, strict=True)
    assert all(bool(mx.array_equal(one, other)) for one, other in pairs)
    assert again.nbytes == block.nbytes == content.nbytes


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.uint8])
def test_every_dtype_comes_back(dtype: mx.Dtype) -> None:
    """It comes back even where numpy lacks it, as bfloat16."""
    cache = KVCache()
    arrays = [(100 * _array(1, 2, 5, 4)).astype(dtype) for _ in range(2)]
    cache.keys, cache.values, cache.offset = *arrays, 5
    state = ArraysCache(1)
    state[0] = (100 * _array(1, 3)).astype(dtype)
    block = copy_of_row(_cached_row([cache, state], 5), 0, 5, has_state=True)

    again = BlockForm.of(block).block_of(content_of(block), 5)

    assert again is not None
    for one, other in zip(again.arrays, block.arrays, strict=True):
        assert one.dtype == other.dtype == dtype
        assert mx.array_equal(one, other)


Damage = Callable[[dict[str, PlainArray], dict[str, str]], None]


def _rename(arrays: dict[str, PlainArray], _: dict[str, str]) -> None:
    arrays["other"] = arrays.pop("stack.0")


def _shorten(arrays: dict[str, PlainArray], _: dict[str, str]) -> None:
    arrays["stack.0"] = arrays["stack.0"][:, :, :-1]


def _retype(arrays: dict[str, PlainArray], _: dict[str, str]) -> None:
    arrays["stack.0"] = arrays["stack.0"].astype(np.float16)


def _widen(arrays: dict[str, PlainArray], _: dict[str, str]) -> None:
    arrays["stack.0"] = np.repeat(arrays["stack.0"], 2, axis=3)


def _falsify(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes["bfloat16"] = json.dumps(["stack.0"])


def _no_notes(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes.clear()


def _no_json(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes["state"] = "[[["


def _no_list(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes["state"] = "7"


def _too_few(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes["state"] = json.dumps(json.loads(notes["state"])[1:])


def _no_array(_: dict[str, PlainArray], notes: dict[str, str]) -> None:
    notes["state"] = notes["state"].replace("state.", "missing.")


def _reshape_state(arrays: dict[str, PlainArray], _: dict[str, str]) -> None:
    name = next(one for one in arrays if one.startswith("state."))
    arrays[name] = arrays[name][..., :-1]


_DAMAGES: list[Damage] = [
    _rename, _shorten, _retype, _widen, _falsify, _no_notes, _no_json, _no_list, _too_few,
    _no_array, _reshape_state,
]  # fmt: skip


@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", [TinyKind.ROTATING, TinyKind.HYBRID_GDN, TinyKind.NESTED])
def test_content_of_another_form_is_refused(kind: TinyKind, damage: Damage) -> None:
    """The block is lost when it is loaded, without an exception then or later."""
    form, content, _ = _content(kind)
    arrays, notes = dict(content.arrays), dict(content.notes)

    damage(arrays, notes)

    assert form.block_of(BlockContent(arrays, notes), 16) is None


@pytest.mark.parametrize("other", [kind for kind in TinyKind if kind is not TinyKind.STANDARD])
def test_block_of_another_model_is_lost(other: TinyKind) -> None:
    """A difference in the caches is noticed, even where the disk tier has the block."""
    files = FilesInMemory()
    first = BlockRows(make_engine(loaded(other), disk_tier=files))
    first.run(StepPlan(prefill=(first.chunk(PROMPT, 0, 16),)))
    held = first.store(0, 0, 16, has_state=True)
    saved = saved_block(held, PROMPT[:16], 0)
    first.change(SaveBlock(held.block_id, saved))

    alike = {TinyKind.HYBRID_GDN, TinyKind.NESTED}  # of the same shapes throughout
    for kind in set(TinyKind) - (alike if other in alike else {other}):
        rows = BlockRows(make_engine(loaded(kind), disk_tier=files))
        assert rows.change(LoadBlock(1, saved)).lost_blocks == (1,)


def test_block_without_state_is_loaded_without_state() -> None:
    """A row cannot begin at its end."""
    form, _, block = _content(TinyKind.HYBRID)

    again = form.block_of(content_of(replace(block, state=None)), 16)

    assert again is not None
    assert again.state is None
    assert again.nbytes < block.nbytes


def test_form_allows_windows_of_any_fill() -> None:
    """The form comes from a few tokens; windows and histories fill, and states come into being."""
    caches = [RotatingKVCache(8), ArraysCache(2)]
    caches[0].update_and_fetch(_array(1, 2, 3, 4), _array(1, 2, 3, 4))
    pattern = shape_of([kind_of(one).row_state(one, 0) for one in caches])

    caches[0].update_and_fetch(_array(1, 2, 20, 4), _array(1, 2, 20, 4))
    caches[1][0] = _array(1, 6)
    later = [kind_of(one).row_state(one, 0) for one in caches]

    assert is_like(later, pattern)
    assert not is_like(shape_of(later), pattern)
    assert not is_like(later[:1], pattern)


def test_row_is_not_opened_when_a_block_is_missing() -> None:
    """An assertion fails, even if other blocks are there."""
    store = MemoryTier()
    row = _cached_row([_kv(8)], 8)
    store.apply([StoreBlock(1, 0, 0, 4)], lambda _: row)

    with pytest.raises(AssertionError, match="held"):
        store.fill([KVCache()], ReusedPrefix((1, 2), (1, 2)))


class _FailingFiles(FilesInMemory):
    """A disk tier that raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def load(self, _saved: SavedBlock) -> BlockContent | None:
        raise self._error

    def save(self, _saved: SavedBlock, _content: BlockContent) -> None:
        raise self._error


_SAVED = SavedBlock(b"digest", b"", 0, (1, 2), has_state=True, nbytes=10)


def test_failing_change_costs_only_its_block() -> None:
    """The step goes on, and the log has a line at most once a minute."""
    clock = ManualClock()
    store = MemoryTier(_FailingFiles(MemoryError()), clock=clock)
    row = _cached_row([_kv(8)], 8)
    with structlog.testing.capture_logs() as logs:
        for n in range(4):
            clock.advance(25)
            outcome = store.apply(
                [
                    StoreBlock(10 * n, 0, 0, 4),
                    LoadBlock(10 * n + 1, _SAVED),
                    SaveBlock(10 * n, _SAVED),
                    StoreBlock(10 * n + 2, 0, 4, 8),
                ],
                lambda _: row,
            )
            assert {one.block_id for one in outcome.held} == {10 * n, 10 * n + 2}
            assert (outcome.lost, outcome.unsaved) == ((10 * n + 1,), (b"digest",))
    assert [(one["event"], one["count"]) for one in logs] == [
        ("blocks.change_failed", 1),
        ("blocks.change_failed", 7),
    ]


def test_assertion_error_is_raised() -> None:
    """A bug of ours ends the step, as anywhere else."""
    store = MemoryTier(_FailingFiles(AssertionError("a rule")))
    with pytest.raises(AssertionError, match="a rule"):
        store.apply([LoadBlock(1, _SAVED)], lambda _: None)


@pytest.mark.parametrize("failing", [1, 2])
def test_failing_store_costs_only_its_block(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Blocks that fail when they are evaluated together are tried one by one."""
    store = MemoryTier()
    row = _cached_row([_kv(8)], 8)
    calls = 0
    evaluate = mx.eval

    def fail(*arrays: object) -> None:
        nonlocal calls
        calls += 1
        if calls in {1, 1 + failing}:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", fail)
    outcome = store.apply([StoreBlock(1, 0, 0, 4), StoreBlock(2, 0, 4, 8)], lambda _: row)

    assert outcome.lost == (failing,)
    assert {one.block_id for one in outcome.held} == {1, 2} - {failing}


def test_failing_split_loses_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are reported as lost, and their numbers are free again."""
    store = MemoryTier()
    row = _cached_row([_kv(8)], 8)
    store.apply([StoreBlock(1, 0, 0, 8)], lambda _: row)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", _raise)
        outcome = store.apply([SplitBlock(1, 2, 3)], lambda _: row)
    assert sorted(outcome.lost) == [1, 2]
    assert store.nbytes == 0
    changes: list[BlockChange] = [StoreBlock(1, 0, 0, 8), StoreBlock(2, 0, 0, 8)]
    assert store.apply(changes, lambda _: row).lost == ()


def _raise(*_: object) -> None:
    raise RuntimeError("[malloc] Unable to allocate 1 bytes.")


@_KINDS
def test_model_whose_warm_up_gives_nan_loads_blocks(kind: TinyKind) -> None:
    """The form of loaded blocks follows from shapes alone; other prompts may well be sound."""
    broken = tiny_model(kind)
    weight = broken.model.model.embed_tokens.weight
    weight[0] = float("nan")
    mx.eval(weight)
    files = FilesInMemory()
    engine = make_engine(broken, disk_tier=files)
    rows = BlockRows(engine)
    prompt = [1 + token % (VOCABULARY_TOKENS - 1) for token in PROMPT]
    (block_id,) = rows.prompt_blocks(prompt, (16,))
    held = _tier(engine)._blocks[block_id]
    saved = SavedBlock(b"d", b"", 0, tuple(prompt[:16]), has_state=True, nbytes=held.nbytes)

    rows.change(SaveBlock(block_id, saved), DropBlocks((block_id,)))

    assert rows.change(LoadBlock(901, saved)).lost_blocks == ()


@pytest.mark.parametrize("is_running", [False, True])
def test_memory_of_dropped_blocks_is_given_back(*, is_running: bool) -> None:
    """MLX keeps none of it when no row runs, and a bounded part of it while rows run."""
    engine = make_engine(loaded(TinyKind.STANDARD))
    rows = BlockRows(engine)
    _store_blocks(engine, 8, tokens=65536)  # 16 MB each
    if is_running:
        rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, len(PROMPT)),)))
    mx.clear_cache()
    kept = []
    for n in range(8):
        rows.drop(n)
        kept.append(mx.get_cache_memory())
    assert max(kept) < 64_000_000
    assert is_running or max(kept) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="others' C libraries do as they like")
@pytest.mark.parametrize(
    ("is_running", "tokens"),
    sampled(
        [(is_running, tokens) for is_running in (False, True) for tokens in (512, 8192)],
        [(False, 8192), (True, 512)],
    ),
)
def test_process_shrinks_when_blocks_are_dropped(*, is_running: bool, tokens: int) -> None:
    """It does even if every second block goes, and its memory lies between that of the others."""
    engine = make_engine(loaded(TinyKind.STANDARD))
    rows = BlockRows(engine)
    count = (256 << 20) // (256 * tokens)
    _store_blocks(engine, count, tokens=tokens)
    if is_running:
        rows.run(StepPlan(prefill=(rows.chunk(PROMPT, 0, len(PROMPT)),)))
    mx.clear_cache()
    before_bytes = psutil.Process().memory_info().rss
    rows.drop(*range(0, count, 2))
    assert before_bytes - psutil.Process().memory_info().rss > 100 << 20


def _store_blocks(engine: MlxEngine, count: int, *, tokens: int) -> None:
    """Store blocks of 256 bytes a token, numbered from 0 on."""
    row = _cached_row([_kv(tokens, widths=(16, 16))], tokens)
    engine._blocks.apply([StoreBlock(n, 0, 0, tokens) for n in range(count)], lambda _: row)
