"""The parity comparison notices faults: each is planted where batching could go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from support.engines.faults_in_rows import a_chunk_beside_rows_begins_anew
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind

from machd.engine.assembly import make_engine
from machd.engine.kernels import packed
from machd.engine.kv.layers.batched_cache import PositionedKv
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.layers.state import StateKv
from machd.engine.kv.layers.window import WindowKv
from machd.engine.kv.row_positions import RowPositions
from machd.engine.sampling import gumbel_noise, sampler
from machd.engine.sampling.filters import filters_of
from machd.engine.step.decoder import Decoder, Sampled
from machd.engine.step.row import Decoded
from machd.request.generation import SamplingParams
from machd_probes.scripts import LENGTHS, MIXED, random_prompt, scripts

from mlx_lm.models.cache import ArraysCache  # isort: skip - after the engine

PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, 12)

Plant = Callable[[pytest.MonkeyPatch], None]


def every_column_is_visible(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows see what lies behind their ends and, in shorter rows, what others left."""
    _decoding_rows_see(patch, mx.ones_like)


def one_column_too_many(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows see one position behind their ends."""
    _decoding_rows_see(
        patch, lambda mask: mask | mx.concatenate([mask[..., :1], mask[..., :-1]], axis=-1)
    )


def the_oldest_column_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows do not see their first position."""
    _decoding_rows_see(patch, lambda mask: mask & (mx.arange(mask.shape[-1]) > 0))


def _decoding_rows_see(patch: pytest.MonkeyPatch, wrong: Callable[[mx.array], mx.array]) -> None:
    right = RowPositions.mask

    def mask(self: RowPositions, window_tokens: int | None) -> mx.array:
        seen = right(self, window_tokens)
        return wrong(seen) if self.tokens == 1 else seen

    patch.setattr(RowPositions, "mask", mask)


def positions_are_the_longest_rows(patch: pytest.MonkeyPatch) -> None:
    """Every row is rotated as if it were as long as the longest."""
    own: property = vars(PositionedKv)["offset"]

    def offset(cache: SlabKv) -> mx.array:
        offsets: mx.array = own.__get__(cache)
        return mx.broadcast_to(mx.max(offsets), offsets.shape)

    patch.setattr(SlabKv, "offset", property(offset))


def rows_lose_their_keys_when_they_move(patch: pytest.MonkeyPatch) -> None:
    """A row that moves into a gap finds nothing there."""
    patch.setattr(SlabKv, "_moving", lambda *_: {})


def the_window_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows see columns of their windows that hold no position of theirs."""
    patch.setattr(WindowKv, "make_mask", lambda *_args, **_kwargs: None)


def states_do_not_follow_their_rows(patch: pytest.MonkeyPatch) -> None:
    """When a row leaves, the others get the states of the first places."""
    right = StateKv.select
    patch.setattr(StateKv, "select", lambda self, order: right(self, range(len(order))))


def newcomers_go_first(patch: pytest.MonkeyPatch) -> None:
    """The state of a row that joins lands before those of the others."""

    def extend(self: ArraysCache, other: ArraysCache) -> None:
        pairs = zip(self.cache, other.cache, strict=True)
        self.cache = [
            old
            if new is None
            else mx.concatenate([new, mx.zeros_like(new) if old is None else old])
            for old, new in pairs
        ]

    patch.setattr(ArraysCache, "extend", extend)


def a_neighbours_temperature(patch: pytest.MonkeyPatch) -> None:
    """Temperatures and filters are those of the row in the first place."""
    right = filters_of
    patch.setattr(sampler, "filters_of", lambda params: right([params[0]] * len(params)))


def a_neighbours_bias(patch: pytest.MonkeyPatch) -> None:
    """Biases go to the row behind the one that asked."""
    right = sampler._bias_matrix

    def rolled(rows: Sequence[SamplingParams], vocabulary_tokens: int) -> mx.array | None:
        matrix = right(rows, vocabulary_tokens)
        return None if matrix is None else matrix[mx.array([-1, *range(len(rows) - 1)])]

    patch.setattr(sampler, "_bias_matrix", rolled)


def the_batchs_step_for_a_position(patch: pytest.MonkeyPatch) -> None:
    """A row's draw depends on how many draws the whole batch has made."""
    count = [0]

    def draw(seed: int, _position: int) -> tuple[int, int]:
        count[0] += 1
        return right(seed, count[0])

    right = gumbel_noise.draw_key
    patch.setattr(gumbel_noise, "draw_key", draw)


def penalties_count_the_neighbours_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each row is counted with the token of the first row."""
    right = Decoder.settle

    def settle(this: Decoder, sampled: Sampled) -> Decoded | None:
        before = {row: row.sampling.counts for row in sampled.rows}
        decoded = right(this, sampled)
        first = sampled.parts[0][1].token_ids[:1]
        for row, counts in before.items():
            if counts is not None:
                row.sampling = replace(row.sampling, counts=counts.at[first].add(1.0))
        return decoded

    patch.setattr(Decoder, "settle", settle)


def a_chunk_beside_rows_is_seen_by_none(patch: pytest.MonkeyPatch) -> None:
    """Prompt tokens in a step of others are left as zeros in their cache."""
    right = packed._as_tokens
    patch.setattr(packed, "_as_tokens", lambda rows: right(rows) * 0)


_FAULTS: list[tuple[Plant, TinyKind, str]] = [
    (every_column_is_visible, TinyKind.STANDARD, "seven"),
    (every_column_is_visible, TinyKind.NESTED, "three"),
    (one_column_too_many, TinyKind.STANDARD, "seven"),
    (the_oldest_column_is_lost, TinyKind.STANDARD, "two"),
    (positions_are_the_longest_rows, TinyKind.STANDARD, "four"),
    (positions_are_the_longest_rows, TinyKind.HYBRID_GDN, "staggered"),
    (rows_lose_their_keys_when_they_move, TinyKind.STANDARD, "early leaves"),
    (rows_lose_their_keys_when_they_move, TinyKind.HYBRID, "down to one and up again"),
    (the_window_is_forgotten, TinyKind.ROTATING, "mixed parameters"),
    (the_window_is_forgotten, TinyKind.NESTED_ROTATING, "staggered"),
    (states_do_not_follow_their_rows, TinyKind.HYBRID_GDN, "early leaves"),
    (states_do_not_follow_their_rows, TinyKind.HYBRID, "slots taken again"),
    (states_do_not_follow_their_rows, TinyKind.NESTED, "down to one and up again"),
    (newcomers_go_first, TinyKind.HYBRID_GDN, "four"),
    (newcomers_go_first, TinyKind.NESTED_ROTATING, "two"),
    (a_neighbours_temperature, TinyKind.STANDARD, "mixed parameters"),
    (a_neighbours_temperature, TinyKind.STANDARD, "mixed parameters, one greedy row"),
    (a_neighbours_bias, TinyKind.STANDARD, "mixed parameters"),
    (the_batchs_step_for_a_position, TinyKind.STANDARD, "mixed parameters"),
    (a_chunk_beside_rows_begins_anew, TinyKind.STANDARD, "chunked prefill"),
    (a_chunk_beside_rows_is_seen_by_none, TinyKind.STANDARD, "chunked prefill"),
    (penalties_count_the_neighbours_tokens, TinyKind.STANDARD, "mixed parameters"),
]


@pytest.mark.parametrize(
    ("plant", "kind", "name"),
    _FAULTS,
    ids=[f"{plant.__name__}-{kind}-{name}" for plant, kind, name in _FAULTS],
)
def test_a_planted_fault_is_noticed(
    plant: Plant, kind: TinyKind, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison passes without the fault and reports differences with it."""
    assert _differences_without_a_fault(kind, name) == []

    plant(monkeypatch)

    assert _differences(kind, name) != []


def _differences(kind: TinyKind, name: str) -> list[str]:
    script = SCRIPTS[name]
    return alone(kind).differences(script, script.play(make_engine(loaded(kind))))


_differences_without_a_fault = cache(_differences)


def test_the_parameters_differ_in_what_they_choose() -> None:
    """On one prompt no two sets of parameters give the same completion, so none can stand in."""
    script = scripts([PROMPTS[4]] * len(MIXED), 12)["mixed parameters"]

    rows = [
        [token.token_id for token in alone(TinyKind.STANDARD).tokens(row)] for row in script.joins
    ]

    assert len({tuple(row) for row in rows}) == len(MIXED)
