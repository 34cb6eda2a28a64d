"""How long a model stays loaded, as clients of Ollama and LM Studio spell it."""

from __future__ import annotations

from math import inf

import pytest
from msgspec import UNSET, Raw

from machd.dialects.wire.idle_time import read_keep_alive, read_ttl
from machd.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("null", None),
        ("0", 0.0),
        ('"0"', 0.0),
        ('"0s"', 0.0),
        ("-1", inf),
        ("-0.5", inf),
        ('"-1"', inf),
        ('"-1m"', inf),
        ("90", 90.0),
        ("1.5", 1.5),
        ('"300"', 300.0),
        ('"5m"', 300.0),
        ('"1h30m"', 5400.0),
        ('"1.5h"', 5400.0),
        ('"300ms"', 0.3),
        ('".5s"', 0.5),
    ],
)
def test_keep_alive_is_read_as_ollama_reads_it(given: str, seconds: float | None) -> None:
    """Numbers are seconds, texts are durations of Go, and what is negative is for ever."""
    assert read_keep_alive(Raw(given.encode())) == pytest.approx(seconds)
    assert read_keep_alive(UNSET) is None


@pytest.mark.parametrize(
    "given",
    ['"soon"', '""', '"5"x', "true", "{}", "[1]", '"5 m"', '"٣m"', "1e999", f'"{"1h" * 99}"'],
)
def test_keep_alive_of_another_form_is_refused(given: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequestError) as refused:
        read_keep_alive(Raw(given.encode()))
    assert refused.value.param == "keep_alive"


def test_ttl_is_a_number_of_seconds() -> None:
    """Above 0; the error names the field."""
    assert read_ttl(Raw(b"300")) == 300.0
    assert read_ttl(Raw(b"null")) is None
    assert read_ttl(UNSET) is None
    for given in (b"0", b"-1", b'"5m"', b"false", b"1e999"):
        with pytest.raises(InvalidRequestError) as refused:
            read_ttl(Raw(given))
        assert refused.value.param == "ttl"
