"""The form in which a request wants its vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from machd.engine.protocol.encoder import EncoderDescription
from machd.generations.encodings import Encoded
from machd.reading.vectors import FloatRow, normalised, rows_of, shortened

VectorForm: TypeAlias = Callable[["memoryview[float]"], FloatRow]
"""Makes an answer's vector of one that the model has made."""


def vector_form(
    encoder: EncoderDescription, *, dimensions: int | None, normalises: bool
) -> VectorForm:
    """Return what cuts and normalises vectors as a request asks for."""
    if dimensions is not None and dimensions < encoder.dimensions:
        return lambda row: shortened(row, dimensions)
    if normalises and not encoder.is_normalised:
        return normalised
    return lambda row: row


def vectors_of(encoded: Encoded, in_form: VectorForm) -> Iterator[FloatRow]:
    """Yield the vector of each input, in its form, made as it is asked for."""
    rows = list(rows_of(encoded.values))
    return (in_form(rows[place]) for place in encoded.places)
