"""BERT layers as one operation: what plain loops and a reference in float64 give, and nothing of a neighbour's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

native = pytest.importorskip("machd_native", reason="make setup has found no compiler")

_HIDDEN, _GATES, _LAYERS = 192, 320, 2
_EPS = 1e-5
_ROUNDING = 2e-5
"""Of numbers around one, through two layers."""

_LENGTHS = [
    [1],
    [7],
    [48, 1, 49],
    [13, 64, 65, 2],
    [3] * 40,
    [5, 130, 96, 1, 20, 77],
]
"""One text and many, fewer rows than threads share and more, one tile of queries and several."""

_erf = np.vectorize(math.erf)


@dataclass(frozen=True)
class _Layer:
    """A layer's weights in float32, [outputs, inputs]."""

    qkv: np.ndarray
    output: np.ndarray
    up: np.ndarray
    down: np.ndarray
    biases: Sequence[np.ndarray]
    norms: Sequence[tuple[np.ndarray, np.ndarray]]


def _drawn(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    numbers: np.ndarray = _drawn(seed).normal(size=shape).astype(np.float32)
    return numbers


def _norm_weights(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return 1 + 0.3 * _numbers(_HIDDEN, seed=seed), 0.2 * _numbers(_HIDDEN, seed=seed + 1)


def _layer(seed: int) -> _Layer:
    sizes = [(3 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_GATES, _HIDDEN), (_HIDDEN, _GATES)]
    qkv, output, up, down = [0.1 * _numbers(*size, seed=seed + at) for at, size in enumerate(sizes)]
    biases = [0.3 * _numbers(size[0], seed=seed + 10 + at) for at, size in enumerate(sizes)]
    norms = [_norm_weights(seed + 20), _norm_weights(seed + 22)]
    return _Layer(qkv, output, up, down, biases, norms)


_EMBEDDING_NORM = _norm_weights(7)
_STACK = [_layer(100), _layer(200)]


def _panels(weights: np.ndarray, bias: np.ndarray) -> object:
    panels = weights.reshape(-1, 16, weights.shape[1]).swapaxes(1, 2)
    return native.PanelWeights(mx.array(panels), mx.array(bias))


def _norm(weights: tuple[np.ndarray, np.ndarray]) -> object:
    return native.NormWeights(*map(mx.array, weights), _EPS)


def _layers(heads: int) -> object:
    blocks = [
        native.BertBlock(
            qkv=_panels(one.qkv, one.biases[0]),
            output=_panels(one.output, one.biases[1]),
            attention_norm=_norm(one.norms[0]),
            up=_panels(one.up, one.biases[2]),
            down=_panels(one.down, one.biases[3]),
            output_norm=_norm(one.norms[1]),
        )
        for one in _STACK
    ]
    return native.BertLayers(_norm(_EMBEDDING_NORM), blocks, heads=heads)


def _normed(x: np.ndarray, weights: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    factor = np.sqrt((centred**2).mean(-1, keepdims=True) + _EPS)
    normed: np.ndarray = centred / factor * weights[0] + weights[1]
    return normed


def _text_reference(x: np.ndarray, heads: int) -> np.ndarray:
    """Compute the layers of one text's rows, float64 [tokens, hidden]."""
    tokens = len(x)
    h = _normed(x.astype(np.float64), _EMBEDDING_NORM)
    for one in _STACK:
        qkv = (h @ one.qkv.T + one.biases[0]).reshape(tokens, 3, heads, -1)
        queries, keys, values = qkv.transpose(1, 2, 0, 3)
        scores = queries @ keys.swapaxes(1, 2) / math.sqrt(_HIDDEN // heads)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ values
        mixed = mixed.swapaxes(0, 1).reshape(tokens, -1)
        h = _normed(mixed @ one.output.T + one.biases[1] + h, one.norms[0])
        up = h @ one.up.T + one.biases[2]
        gated = up * 0.5 * (1 + _erf(up / math.sqrt(2)))
        h = _normed(gated @ one.down.T + one.biases[3] + h, one.norms[1])
    return h


def _reference(x: np.ndarray, lengths: Sequence[int], heads: int) -> np.ndarray:
    ends = np.cumsum(lengths)[:-1]
    return np.concatenate([_text_reference(text, heads) for text in np.split(x, ends)])


@pytest.mark.parametrize("heads", [12, 6, 3])
@pytest.mark.parametrize("lengths", _LENGTHS, ids=str)
def test_layers_are_those_of_the_reference(
    instruction_sets: list[str], lengths: list[int], heads: int
) -> None:
    """Each text's rows are those of float64 within rounding, and have the same bits on each instruction set."""
    x = _numbers(sum(lengths), _HIDDEN)
    expected = _reference(x, lengths, heads)
    layers, results = _layers(heads), []
    for name in ("plain", *instruction_sets):
        native.use_instruction_set(name)
        results.append(np.array(layers(mx.array(x), lengths)))  # type: ignore[operator]
        assert np.abs(results[-1] - expected).max() < _ROUNDING, name
    assert all(np.array_equal(one, results[1]) for one in results[2:])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lengths", _LENGTHS[2:], ids=str)
def test_text_has_the_bits_it_has_alone(threads: int, lengths: list[int]) -> None:
    """Neighbours, the number of rows and that of threads change no bit of a text."""
    native.set_thread_count(threads)
    x, layers = mx.array(_numbers(sum(lengths), _HIDDEN)), _layers(6)
    together = np.array(layers(x, lengths))  # type: ignore[operator]
    ends = np.cumsum([0, *lengths])
    for begin, end in pairwise(ends):
        alone = np.array(layers(x[begin:end], [end - begin]))  # type: ignore[operator]
        assert np.array_equal(together[begin:end], alone)


def test_nan_of_a_text_stays_there() -> None:
    """Rows before and behind it have the bits that they have without it."""
    lengths, layers = [30, 60, 40], _layers(6)
    x = _numbers(130, _HIDDEN)
    whole = np.array(layers(mx.array(x), lengths))  # type: ignore[operator]
    x[44, 3] = np.nan
    broken = np.array(layers(mx.array(x), lengths))  # type: ignore[operator]
    assert np.isnan(broken[30:90]).all()
    assert np.array_equal(np.delete(broken, slice(30, 90), 0), np.delete(whole, slice(30, 90), 0))


@pytest.mark.parametrize("wrong", [[21, 51, 28], [19, 51, 30], [100]], ids=str)
def test_reference_notices_texts_that_begin_elsewhere(wrong: list[int]) -> None:
    """Offsets that are wrong by one token, and texts that see one another, are far outside rounding."""
    lengths = [20, 50, 30]
    x = _numbers(100, _HIDDEN)
    got = np.array(_layers(6)(mx.array(x), wrong))  # type: ignore[operator]
    assert np.abs(got - _reference(x, lengths, 6)).max() > 100 * _ROUNDING


@pytest.mark.parametrize("lengths", [[1], [3, 1, 200, 17]], ids=str)
@pytest.mark.parametrize("size", [1, 16, 50, 384])
def test_means_are_those_of_each_text_s_rows(
    instruction_sets: list[str], lengths: list[int], size: int
) -> None:
    """Means in float64 within rounding; a text's bits are those that it has alone."""
    rows = _numbers(sum(lengths), size)
    begins = np.cumsum([0, *lengths])[:-1]
    expected = np.add.reduceat(rows.astype(np.float64), begins) / np.array(lengths)[:, None]
    for name in ("plain", *instruction_sets):
        native.use_instruction_set(name)
        got = np.array(native.text_means(mx.array(rows), lengths))
        assert np.abs(got - expected).max() < 1e-6
        last = native.text_means(mx.array(rows[begins[-1] :]), lengths[-1:])
        assert np.array_equal(np.array(last)[0], got[-1])


def test_lengths_that_are_not_of_the_rows_are_refused() -> None:
    """No text is empty, and all together have as many tokens as there are rows."""
    x = mx.array(_numbers(10, _HIDDEN))
    for lengths in ([], [9], [11], [0, 10], [-1, 11], [5, 6]):
        with pytest.raises(ValueError, match=r"token|text"):
            _layers(6)(x, lengths)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"token|text"):
            native.text_means(x, lengths)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    """Nothing is read outside of weights, whatever a caller brings."""
    one = _STACK[0]
    with pytest.raises(ValueError, match="16 outputs"):
        native.PanelWeights(mx.zeros((2, 8, 4)), mx.zeros((8,)))
    with pytest.raises(ValueError, match="bias for each output"):
        native.PanelWeights(mx.zeros((2, 8, 16)), mx.zeros((16,)))
    with pytest.raises(ValueError, match="float32"):
        native.PanelWeights(mx.zeros((2, 8, 16), dtype=mx.float16), mx.zeros((32,)))
    with pytest.raises(ValueError, match="as long as its weight"):
        native.NormWeights(mx.zeros((8,)), mx.zeros((9,)), _EPS)
    with pytest.raises(ValueError, match="multiple of 16"):
        _layers(24)
    with pytest.raises(ValueError, match="there are layers"):
        native.BertLayers(_norm(_EMBEDDING_NORM), [], heads=6)
    with pytest.raises(ValueError, match="rows are float32"):
        _layers(6)(mx.zeros((4, _HIDDEN + 16)), [4])  # type: ignore[operator]
    block = native.BertBlock(
        qkv=_panels(one.output, one.biases[1]),
        output=_panels(one.output, one.biases[1]),
        attention_norm=_norm(one.norms[0]),
        up=_panels(one.up, one.biases[2]),
        down=_panels(one.down, one.biases[3]),
        output_norm=_norm(one.norms[1]),
    )
    with pytest.raises(ValueError, match="as long as the rows"):
        native.BertLayers(_norm(_EMBEDDING_NORM), [block], heads=6)
