"""What an encoder computed, as answers have it: vectors, and scores or probabilities of logits."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Iterator
from math import exp, hypot
from typing import TypeAlias

from machd.engine.protocol.encoder import Activation
from machd.engine.protocol.media import PlainArray

FloatRow: TypeAlias = "memoryview[float] | array[float]"
"""A vector's numbers, or an input's logits, in float32."""


def rows_of(values: PlainArray) -> Iterator[memoryview[float]]:
    """Yield the rows of float32 numbers, [rows, columns], as views of them; the engine has refused NaN and infinity."""
    numbers = values.content.cast("B").cast("f")
    rows, columns = values.shape
    for index in range(rows):
        yield numbers[index * columns : (index + 1) * columns]


def shortened(row: FloatRow, dimensions: int) -> array[float]:
    """Return the first numbers of a vector, divided by their length."""
    return normalised(row[:dimensions])


def normalised(row: FloatRow) -> array[float]:
    """Return a vector divided by its length, in float32; one of zeros stays as it is."""
    length = hypot(*row) or 1.0
    return array("f", [one / length for one in row])


def in_base64(row: FloatRow) -> str:
    """Return little-endian float32 numbers in base64, as OpenAI's packages read them."""
    # Every machine that MLX runs on is little-endian.
    return b64encode(row).decode()


def activated(logits: FloatRow, activation: Activation) -> list[float]:
    """Return a classifier's logits as its probabilities, or as its score."""
    match activation:
        case Activation.SIGMOID:
            return [_sigmoid(one) for one in logits]
        case Activation.SOFTMAX:
            highest = max(logits)
            powers = [exp(one - highest) for one in logits]
            whole = sum(powers)
            return [one / whole for one in powers]
        case Activation.NONE:
            return list(logits)


def _sigmoid(logit: float) -> float:
    # exp overflows for large arguments only.
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))
