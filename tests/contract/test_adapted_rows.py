"""Rows with different adapters, and none, in one batch say what each says with its adapter's weights merged, alone.

At the end faults are planted where rows could get a wrong adapter, and the comparison has to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.engines.adapted_rows import NARROW, WIDE, AdaptedRows, mixed_rows, without_adapters
from support.engines.adapters import TinyBase, adapted_engine
from support.engines.block_rows import ASKED, BlockRows
from support.engines.parity import NOISE, differences
from support.every_run import sampled

from machd.engine.adapters.adapted_model import AdaptedModel
from machd.engine.adapters.low_rank import LowRank
from machd.engine.kernels.pass_adapters import AdapterKey, PassAdapters
from machd.engine.protocol.step import Lane, PrefillChunk, ScoredPrompt, StepPlan
from machd.engine.speculation.ngram import NgramProposer
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import AdapterError
from machd.request.adapter import Adapter
from machd.request.generation import SamplingParams
from machd_probes.play import play
from machd_probes.scripts import random_prompt

_LLAMA = TinyBase("llama")
_MERGED = AdaptedRows(_LLAMA)
_MLX = AdaptedRows(TinyBase("llama", is_native=False))
_IN_ONE = AdaptedRows(TinyBase("qwen3"))
_KINDS = [
    pytest.param(_MERGED, id="merged layers"),
    pytest.param(AdaptedRows(TinyBase("llama", is_quantised=True)), id="quantised"),
    pytest.param(_MLX, id="mlx's layers"),
    pytest.param(AdaptedRows(_LLAMA, looks_ahead=True), id="looking ahead"),
    pytest.param(AdaptedRows(_LLAMA, has_magnitudes=True), id="magnitudes"),
    pytest.param(_IN_ONE, id="layers in one"),
    pytest.param(AdaptedRows(TinyBase("gemma3_text")), id="windows", marks=pytest.mark.long),
    pytest.param(AdaptedRows(TinyBase("qwen3_next")), id="states and experts"),
    pytest.param(AdaptedRows(TinyBase("falcon_h1")), id="nested", marks=pytest.mark.long),
    pytest.param(
        AdaptedRows(TinyBase("qwen3"), has_magnitudes=True), id="layers in one with magnitudes"
    ),
    pytest.param(
        AdaptedRows(TinyBase("llama", is_native=False), has_magnitudes=True),
        id="mlx's layers with magnitudes",
    ),
    pytest.param(AdaptedRows(TinyBase("qwen2"), has_magnitudes=True), id="biases with magnitudes"),
]
_EACH_KIND = pytest.mark.parametrize("kind", _KINDS)


@_EACH_KIND
@pytest.mark.parametrize(
    "chunk_tokens", sampled([1 << 20, 7], ["chunks"], ["whole prompts", "chunks"])
)
def test_rows_with_adapters_say_what_merged_weights_say_alone(
    kind: AdaptedRows, chunk_tokens: int
) -> None:
    """Whatever adapters the other rows have, and however prompts are cut; rows of the base keep their bits."""
    engine, rows = kind.engine(), mixed_rows(chunk_tokens)

    assert kind.all_faults(engine, rows) == ([], [])


def test_rows_of_the_serial_lane_have_adapters() -> None:
    """Each has a pass of its own."""
    rows = [replace(row, lane=Lane.SERIAL) for row in mixed_rows()[:4]]

    assert _MERGED.faults(_MERGED.engine(), rows) == []


def test_scored_prompts_are_scored_with_their_adapters() -> None:
    """Log-probabilities of a prompt's tokens are those of the merged weights, beside a row of another adapter."""
    kind = _MERGED
    prompt, sampling = random_prompt(40, 3), SamplingParams(temperature=0.0, prompt_logprobs=1)
    merged, _ = adapted_engine(_LLAMA.loaded((NARROW, kind.weights[NARROW])))
    adapted = replace(sampling, adapters=(NARROW,))

    expected = _scores(merged, _whole(0, prompt, sampling))
    its = _scores(kind.engine(), _whole(0, prompt, adapted), _whole(1, prompt, _asked(WIDE)))

    assert len(its) == len(prompt) - 1
    assert its == pytest.approx(expected, abs=NOISE)


def test_blocks_of_an_adapters_row_begin_another_of_its_rows() -> None:
    """A row that begins with blocks says what it says alone, while rows of the base decode."""
    kind, prompt, stops = _MERGED, random_prompt(41, 5), (16, 32, 40)
    rows, sampling = BlockRows(kind.engine()), _asked(NARROW)
    expected = rows.alone(prompt, 12, sampling)
    block_ids, start = list[int](), 0
    for stop in stops:
        rows.run(StepPlan(prefill=(rows.chunk(prompt, start, stop, sampling=sampling),)))
        block_ids.append(rows.store(0, start, stop, has_state=True).block_id)
        start = stop
    rows.release(0)
    base = rows.chunk(random_prompt(9, 1), 0, 9, 1)
    rows.run(StepPlan(prefill=(base,)))

    opening = rows.chunk(prompt, stops[1], len(prompt), block_ids=block_ids[:2], sampling=sampling)

    assert differences(expected, rows.generate(opening, 12, others=(1,)), sampling) == []


@pytest.mark.parametrize("kind", [_KINDS[0], _KINDS[7]])
def test_drafts_are_verified_with_adapters(kind: AdaptedRows) -> None:
    """Prompt lookup changes nothing, also where a pass is computed again because states cannot be rolled back."""
    engine = kind.engine(NgramProposer())
    rows = [
        replace(row, prompt=random_prompt(6, number) * 3, tokens=24)
        for number, row in enumerate(mixed_rows())
    ]

    assert kind.faults(engine, rows, drafts=lambda *_: 3) == []


def test_adapters_together_say_what_their_merged_weights_say() -> None:
    """Two adapters with scales of their own are computed as one."""
    kind = _MERGED
    half, one = replace(NARROW, scale=0.5), WIDE
    weights = [kind.weights[NARROW], kind.weights[WIDE]]
    merged, _ = adapted_engine(_LLAMA.loaded((half, weights[0]), (one, weights[1])))
    together, model = adapted_engine(_LLAMA.loaded())
    model.add((half, one), weights)
    row = mixed_rows()[1]
    combined = replace(row, sampling=replace(row.sampling, adapters=(half, one)))

    (expected,) = play(merged, [without_adapters(row)])
    ((its, _),) = [play(together, [combined, mixed_rows()[0]])]

    assert [one.token_id for one in its] == [one.token_id for one in expected]


def test_adapters_come_and_go_between_steps() -> None:
    """Whichever was first, and with places that move, rows get their own; the last one leaves nothing behind."""
    kind = _MERGED
    engine, model = adapted_engine(_LLAMA.loaded())
    classes = [type(one) for one in engine.module.modules()]
    rows = mixed_rows()

    model.add((WIDE,), [kind.weights[WIDE]])
    model.add((NARROW,), [kind.weights[NARROW]])
    assert kind.faults(engine, rows) == []
    both = model.nbytes
    model.remove((WIDE,))
    narrow = [row for row in rows if row.sampling.adapters != (WIDE,)]
    assert kind.faults(engine, narrow) == []
    assert 0 < model.nbytes < both
    model.add((WIDE,), [kind.weights[WIDE]])
    assert kind.faults(engine, rows) == []
    model.remove((WIDE,))
    model.remove((NARROW,))

    assert model.nbytes == 0
    assert [type(one) for one in engine.module.modules()] == classes
    assert kind.base_faults(engine, [without_adapters(row) for row in rows]) == []


def test_adapters_that_do_not_fit_are_refused_and_leave_nothing() -> None:
    """A layer that is missing, one of another shape, and magnitudes beside another adapter."""
    kind = AdaptedRows(_LLAMA, has_magnitudes=True)
    _, model = adapted_engine(_LLAMA.loaded())
    path, low_rank = next(iter(kind.weights[WIDE].items()))
    turned = LowRank(low_rank.b.T[:, :3], low_rank.b, 1.0)

    for weights in ({"model.layers.7.q_proj": low_rank}, {path: turned}):
        with pytest.raises(AdapterError, match="'wide' does not fit"):
            model.add((WIDE,), [weights])
    with pytest.raises(AdapterError, match="magnitudes"):
        model.add((NARROW, WIDE), [kind.weights[NARROW], kind.weights[WIDE]])
    assert model.nbytes == 0


def _asked(*adapters: Adapter) -> SamplingParams:
    return replace(ASKED, adapters=adapters)


def _whole(slot_index: int, prompt: tuple[int, ...], sampling: SamplingParams) -> PrefillChunk:
    return PrefillChunk(
        slot_index,
        prompt,
        0,
        is_last=True,
        sampling=sampling,
        reserved_tokens=len(prompt) + 4,
        lane=Lane.BATCH,
    )


def _scores(engine: MlxEngine, *chunks: PrefillChunk) -> list[float]:
    """Return the log-probabilities of the one scored prompt's tokens."""
    outputs = engine.run(StepPlan(prefill=chunks)).outputs
    (scored,) = [one for one in outputs if isinstance(one, ScoredPrompt)]
    return [one.logprob for one in scored.logprobs]


def a_neighbours_adapter(patch: pytest.MonkeyPatch) -> None:
    """Rows get the adapter that is behind their own."""
    index, token_index = PassAdapters.index, PassAdapters.token_index

    def of_stack(self: PassAdapters, places: tuple[int, ...]) -> mx.array:
        return index(self, places[1:] + places[:1])

    def of_tokens(self: PassAdapters, chosen: tuple[AdapterKey, ...], tokens: int) -> mx.array:
        right = token_index(self, chosen, tokens)
        return mx.where(right > 0, right % len(chosen) + 1, right).astype(mx.int32)

    patch.setattr(PassAdapters, "index", of_stack)
    patch.setattr(PassAdapters, "token_index", of_tokens)


def the_adapters_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """The index of rows is off by one."""
    right = PassAdapters.__init__

    def begin(self: PassAdapters, keys: list[AdapterKey], *others: Any) -> None:
        right(self, [*keys[-1:], *keys[:-1]], *others)

    patch.setattr(PassAdapters, "__init__", begin)


def a_scale_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What the files say an adapter counts for is left out."""
    _in_memory_as(patch, lambda one, _: replace(one, scale=1.0))


def a_for_b(patch: pytest.MonkeyPatch) -> None:
    """Layers with as many outputs as inputs have their two matrices for one another, transposed."""

    def swapped(one: LowRank, _: Adapter) -> LowRank:
        is_square = one.a.shape[1] == one.b.shape[0]
        return replace(one, a=one.b.T, b=one.a.T) if is_square else one

    _in_memory_as(patch, swapped)


def the_scale_of_a_request_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Every adapter counts as it was trained."""
    _in_memory_as(patch, lambda one, adapter: replace(one, scale=one.scale / adapter.scale))


def _in_memory_as(patch: pytest.MonkeyPatch, wrong: Callable[[LowRank, Adapter], LowRank]) -> None:
    right = AdaptedModel.add

    def add(self: AdaptedModel, key: AdapterKey, weights: list[dict[str, LowRank]]) -> None:
        changed = [
            {path: wrong(one, adapter) for path, one in own.items()}
            for adapter, own in zip(key, weights, strict=True)
        ]
        right(self, key, changed)

    patch.setattr(AdaptedModel, "add", add)


_PLANTS = (
    a_neighbours_adapter, the_adapters_of_the_row_before, a_scale_forgotten, the_scale_of_a_request_forgotten, a_for_b,
)  # fmt: skip
_PLACES = {"merged layers": _MERGED, "mlx's layers": _MLX, "layers in one": _IN_ONE}
_PLANTED = [(plant, place) for plant in _PLANTS for place in _PLACES]


@pytest.mark.parametrize(
    ("plant", "place"),
    # Every fault, and every place once at least.
    sampled(_PLANTED, [(plant, [*_PLACES][at % 3]) for at, plant in enumerate(_PLANTS)]),
)
def test_comparison_notices(
    plant: Callable[[pytest.MonkeyPatch], None], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault lets a row say something else than the merged weights, which are merged without it."""
    kind, rows = _PLACES[place], mixed_rows()
    assert kind.faults(kind.engine(), rows) == []
    plant(monkeypatch)

    assert kind.faults(kind.engine(), rows)
