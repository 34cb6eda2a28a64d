"""A layer that makes something else of an adapter than its files say is found when the adapter is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.adapters import TinyBase, adapted_engine, adapter_named
from support.every_run import sampled

from machd.engine.adapters import adapted_layer, adapted_model, layer_stack
from machd.engine.adapters.adapted_layer import LayerAdapters, LowRankArrays
from machd.engine.adapters.layer_stack import LayerStack
from machd.engine.adapters.low_rank import AdapterWeights, LowRank
from machd.engine.backend.device import backend_name
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import AdapterError
from machd.request.adapter import Adapter
from machd_probes.merged_adapters import random_adapter

Patch = pytest.MonkeyPatch
NARROW, WIDE = adapter_named("narrow"), adapter_named("wide", scale=0.8)
_MERGED = TinyBase("llama")
"""With merged layers, some with biases; machd's kernels compute it where they are."""
_PLAIN = TinyBase("llama", is_native=False)
_QUANTISED = TinyBase("llama", is_quantised=True)
_BASES = [_MERGED, _PLAIN, _QUANTISED]


_DTYPES = (mx.float32, mx.bfloat16, mx.float16)


@pytest.fixture(name="held_as")
def _held_as(request: pytest.FixtureRequest, monkeypatch: Patch) -> mx.Dtype:
    """What adapters are held in where mlx computes them; on the CPU its products of rows take float32 alone."""
    gather_mm = mx.gather_mm

    def rounded(a: mx.array, b: mx.array, **kwargs: Any) -> mx.array:
        return gather_mm(a.astype(mx.float32), b.astype(mx.float32), **kwargs).astype(a.dtype)

    dtype: mx.Dtype = request.param
    monkeypatch.setattr(adapted_model, "_dtype", lambda _: dtype)
    monkeypatch.setattr(mx, "gather_mm", rounded)
    return dtype


class _Adapted:
    """A model without adapters, and two for it."""

    def __init__(self, base: TinyBase, *, has_magnitudes: bool = False) -> None:
        self.engine: MlxEngine
        self.engine, self.model = adapted_engine(base.loaded())
        its = self.model.base
        self.wide = random_adapter(its, rank=7, seed=2, scale=0.5, has_magnitudes=has_magnitudes)
        self.narrow = random_adapter(its, rank=4, seed=1, scale=1.5, has_magnitudes=has_magnitudes)

    def load(self) -> None:
        """Load the wide one, then the narrow one."""
        self.model.add((WIDE,), [self.wide])
        self.model.add((NARROW,), [self.narrow])


def _named(cases: Iterable[tuple[object, ...]]) -> list[str]:
    return ["-".join(getattr(one, "__name__", str(one)) for one in case) for case in cases]


_RIGHT = list(itertools.product(_BASES, (1, 4, 64), (False, True), _DTYPES))
_RIGHT_OF_EVERY_RUN = [
    case for case in _RIGHT if case[3] == mx.float32 or case[:2] in {(_PLAIN, 64), (_QUANTISED, 1)}
]
"""All in float32; in 16 bits the longest sums and the shortest."""


@pytest.mark.usefixtures("held_as")
@pytest.mark.parametrize(
    ("base", "rank", "has_magnitudes", "held_as"),
    sampled(_RIGHT, _named(_RIGHT_OF_EVERY_RUN), _named(_RIGHT)),
    indirect=["held_as"],
)
def test_right_layers_pass(base: TinyBase, rank: int, *, has_magnitudes: bool) -> None:
    """In whichever dtype a device holds adapters, with any rank and strength, one after another and together."""
    _, model = adapted_engine(base.loaded())
    adapters: dict[Adapter, AdapterWeights] = {}
    for seed, strength in enumerate((1e-3, 1.0, 30.0)):
        weights = random_adapter(
            model.base, rank=rank, seed=seed, scale=0.7, has_magnitudes=has_magnitudes
        )
        adapters[adapter_named(str(seed), scale=1.0 + seed)] = {
            path: replace(one, a=one.a * np.float32(strength)) for path, one in weights.items()
        }
    for adapter, stronger in adapters.items():
        model.add((adapter,), [stronger])
    if not has_magnitudes:
        model.add(tuple(adapters), list(adapters.values()))


def test_adapter_that_adds_nothing_passes() -> None:
    """B is zero before the first step of training."""
    adapted = _Adapted(_MERGED)
    zeros = {path: replace(one, b=np.zeros_like(one.b)) for path, one in adapted.wide.items()}

    adapted.model.add((WIDE,), [zeros])


def test_rows_of_others_are_computed_between_two_layers_of_a_load() -> None:
    """An adapter that some layers have changes no row of another one; a load that is left leaves nothing."""
    adapted = _Adapted(_MERGED)
    adapted.model.add((WIDE,), [adapted.wide])
    expected = _logits(adapted, (WIDE,))
    before_bytes = adapted.model.nbytes
    layers = adapted.model.adding((NARROW,), [adapted.narrow])
    for _ in range(3):
        next(layers)
        assert mx.array_equal(_logits(adapted, (WIDE,)), expected)
    assert adapted.model.nbytes > before_bytes
    with pytest.raises(AssertionError, match="in memory"):
        adapted.model.chosen([(NARROW,)])
    layers.close()
    assert adapted.model.nbytes == before_bytes


def _logits(adapted: _Adapted, key: tuple[Adapter, ...]) -> mx.array:
    with adapted.model.chosen([key]):
        logits: mx.array = adapted.engine.module(mx.array([[3, 1, 4]]))
        mx.eval(logits)
    return logits


def _joined_as(patch: Patch, wrong: Callable[[LowRank], LowRank]) -> None:
    right = adapted_model._joined

    def joined(own: Sequence[tuple[Adapter, LowRank]]) -> LowRankArrays:
        return right([(adapter, wrong(one)) for adapter, one in own])

    patch.setattr(adapted_model, "_joined", joined)


def a_for_b_transposed(patch: Patch) -> None:
    """A square layer gets its two matrices for one another."""

    def swapped(one: LowRank) -> LowRank:
        is_square = one.a.shape[1] == one.b.shape[0]
        return replace(one, a=one.b.T, b=one.a.T) if is_square else one

    _joined_as(patch, swapped)


def a_read_by_columns(patch: Patch) -> None:
    """A's numbers in the order of its transpose, in its own shape."""
    _joined_as(patch, lambda one: replace(one, a=one.a.T.reshape(one.a.shape)))


def ranks_in_another_order(patch: Patch) -> None:
    """A's rows are reversed, and B's columns are not."""
    _joined_as(patch, lambda one: replace(one, a=one.a[::-1]))


def the_scale_of_the_files_forgotten(patch: Patch) -> None:
    """B counts once."""
    _joined_as(patch, lambda one: replace(one, scale=1.0))


def the_scale_of_a_request_forgotten(patch: Patch) -> None:
    """Every adapter counts as it was trained."""
    right = adapted_model._joined
    patch.setattr(
        adapted_model,
        "_joined",
        lambda own: right([(replace(adapter, scale=1.0), one) for adapter, one in own]),
    )


def a_merged_neighbours(patch: Patch) -> None:
    """Keys get what is for values, and gates what is for the layer beside them."""
    right = LayerAdapters.add

    def add(self: LayerAdapters, key: Any, arrays: list[LowRankArrays | None]) -> None:
        right(self, key, [*arrays[:-2], *arrays[:-3:-1]])

    patch.setattr(LayerAdapters, "add", add)


def padding_before_the_ranks(patch: Patch) -> None:
    """A is padded in front, and B behind."""
    right = layer_stack._to_rank

    def to_rank(array: mx.array, rank: int, axis: int) -> mx.array:
        padded = right(array, rank, axis)
        return mx.roll(padded, rank - array.shape[1], 1) if axis == 1 else padded

    patch.setattr(layer_stack, "_to_rank", to_rank)


def the_place_before(patch: Patch) -> None:
    """A row gets the adapter that was loaded before its own."""
    right = LayerStack.place
    patch.setattr(LayerStack, "place", lambda self, key: max(0, right(self, key) - 1))


def other_lengths(patch: Patch) -> None:
    """Magnitudes are divided by lengths that are a tenth too large."""
    right = mx.linalg.norm

    def norm(weights: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return right(weights, *args, **kwargs) * 1.1

    patch.setattr(mx.linalg, "norm", norm)


def the_bias_scaled_too(patch: Patch) -> None:
    """Magnitudes change the bias, in stacks and in machd's kernels."""
    patch.setattr(adapted_layer, "bias_offset", lambda *_: None)
    right = LayerStack._append_ratio

    def append(self: LayerStack, ratio: mx.array | None) -> None:
        right(self, ratio)
        self.offsets = None if self.offsets is None else mx.zeros_like(self.offsets)

    patch.setattr(LayerStack, "_append_ratio", append)


_JOINED = [
    a_for_b_transposed,
    a_read_by_columns,
    ranks_in_another_order,
    the_scale_of_the_files_forgotten,
    the_scale_of_a_request_forgotten,
]
_STACKED = [padding_before_the_ranks, the_place_before]


_FAULTS = [
    *((plant, base, False) for plant in _JOINED for base in _BASES),
    *((plant, _MERGED, True) for plant in _JOINED),
    *((plant, _PLAIN, False) for plant in _STACKED),
    *((plant, _PLAIN, True) for plant in _STACKED),
    (a_merged_neighbours, _MERGED, False),
    (other_lengths, _MERGED, True),
    *((the_bias_scaled_too, base, True) for base in (_MERGED, _PLAIN)),
]
_CASES = [(*fault, dtype) for fault in _FAULTS for dtype in _DTYPES]
_CASES_OF_EVERY_RUN = [
    case
    for case in _CASES
    if case[3] == mx.float32 or case[:3] == (ranks_in_another_order, _PLAIN, False)
]
"""Each fault in float32, where the check is narrowest; one in 16 bits."""


@pytest.mark.usefixtures("held_as")
@pytest.mark.parametrize(
    ("plant", "base", "has_magnitudes", "held_as"),
    sampled(_CASES, _named(_CASES_OF_EVERY_RUN), _named(_CASES)),
    indirect=["held_as"],
)
def test_fault_is_found_at_the_load(
    plant: Callable[[Patch], None],
    base: TinyBase,
    monkeypatch: Patch,
    *,
    has_magnitudes: bool,
) -> None:
    """The error names the adapter and the layer, and nothing of the adapter stays in memory."""
    if plant is a_merged_neighbours and backend_name() != "cpu":
        pytest.skip("layers are merged on the CPU alone")
    adapted = _Adapted(base, has_magnitudes=has_magnitudes)
    classes = [type(one) for one in adapted.engine.module.modules()]
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(
            AdapterError, match=r"adapter '(wide|narrow)' (model\.layers\.|lm_head )"
        ):
            adapted.load()
    if (WIDE,) in adapted.model._keys:
        adapted.model.remove((WIDE,))

    assert adapted.model.nbytes == 0
    assert [type(one) for one in adapted.engine.module.modules()] == classes
