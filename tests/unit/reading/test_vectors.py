"""Vectors and logits as answers have them."""

from __future__ import annotations

import base64
from array import array
from math import exp, hypot

import numpy as np
import pytest

from machd.engine.protocol.encoder import Activation
from machd.engine.protocol.media import PlainArray
from machd.reading.vectors import activated, in_base64, normalised, rows_of, shortened


def _row(*numbers: float) -> array[float]:
    return array("f", numbers)


def test_rows_are_those_of_the_array() -> None:
    """Each row has its own numbers, in their order."""
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    values = PlainArray((3, 2), "float32", memoryview(numbers.tobytes()))
    assert [one.tolist() for one in rows_of(values)] == numbers.tolist()


def test_shorter_vectors_are_the_first_numbers_with_length_1() -> None:
    """A cut vector points where the first numbers do, and its length is 1 again."""
    short = shortened(_row(3.0, 4.0, 12.0), 2)
    assert short.tolist() == pytest.approx([0.6, 0.8])
    assert hypot(*shortened(_row(1e-30, 2e-30, 5.0), 2)) == pytest.approx(1.0, abs=1e-6)


def test_a_vector_of_zeros_stays_one() -> None:
    """There is no division by 0."""
    assert normalised(_row(0.0, 0.0)).tolist() == [0.0, 0.0]


def test_base64_is_little_endian_float32() -> None:
    """What OpenAI's package reads are, bit for bit the numbers of the other form."""
    row = _row(0.1, -2.5, 3e-8)
    decoded = np.frombuffer(base64.b64decode(in_base64(row)), dtype="<f4")
    assert decoded.tolist() == row.tolist()
    assert in_base64(memoryview(row.tobytes()).cast("f")) == in_base64(row)


def test_softmax_is_a_distribution_for_logits_of_any_size() -> None:
    """Probabilities add up to 1, and large logits do not overflow."""
    probabilities = activated(_row(1000.0, 999.0, -1000.0), Activation.SOFTMAX)
    assert sum(probabilities) == pytest.approx(1.0)
    assert probabilities[0] == pytest.approx(1 / (1 + exp(-1.0)))
    assert probabilities[2] == 0.0


@pytest.mark.parametrize(("logit", "score"), [(0.0, 0.5), (1e4, 1.0), (-1e4, 0.0)])
def test_sigmoid_takes_logits_of_any_size(logit: float, score: float) -> None:
    """Neither end overflows."""
    assert activated(_row(logit), Activation.SIGMOID) == [score]


def test_logits_stay_as_they_are_without_an_activation() -> None:
    """Nothing is done to them."""
    assert activated(_row(-3.0, 7.5), Activation.NONE) == [-3.0, 7.5]
