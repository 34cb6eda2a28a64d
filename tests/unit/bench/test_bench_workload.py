"""Prompts, modes and addresses."""

from __future__ import annotations

import pytest

from machd.bench.connection import ServerAddress
from machd.bench.modes import MODES, modes_named
from machd.bench.workload import Workload


def test_no_two_prompts_of_a_run_begin_alike() -> None:
    """Eight words in, every prompt is its own, so that no prefix cache can answer for it."""
    workload = Workload(requests=8, prompt_tokens=32, max_tokens=8, seed=1)
    beginnings = {
        " ".join(workload.prompt(level, index).split()[:8])
        for level in range(5)
        for index in range(16)
    }

    assert len(beginnings) == 5 * 16


def test_modes_get_the_same_prompts_and_runs_do_not() -> None:
    """A prompt is a function of seed, level and index alone."""
    one, again = (Workload(8, 16, 8, seed=1) for _ in range(2))
    other = Workload(8, 16, 8, seed=2)

    assert one.prompt(0, 3) == again.prompt(0, 3)
    assert one.prompt(0, 3) != other.prompt(0, 3)
    assert len(one.prompt(0, 3).split()) == 16


def test_a_level_keeps_every_client_busy_once() -> None:
    """Fewer requests than clients would not be that concurrency."""
    workload = Workload(requests=8, prompt_tokens=1, max_tokens=1, seed=1)

    assert [workload.request_count(clients) for clients in (1, 8, 16)] == [8, 8, 16]


def test_an_unknown_mode_names_those_there_are() -> None:
    """Asking for a mode of another version says what this one has."""
    with pytest.raises(ValueError, match="'static' is no mode of this machd; it has: single"):
        modes_named(["single", "static"])
    assert modes_named(["single", "single"]) == MODES[:1]


def test_single_decodes_one_row_at_any_concurrency() -> None:
    """Its bare loop is the one of width 1, however many clients wait."""
    assert [MODES[0].batch_width(clients) for clients in (1, 4, 16)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", ServerAddress("127.0.0.1", 8080, is_tls=False)),
        ("http://127.0.0.1:8080/v1/", ServerAddress("127.0.0.1", 8080, is_tls=False)),
        (
            "https://example.org/llm/v1",
            ServerAddress("example.org", 443, is_tls=True, prefix="/llm"),
        ),
        ("http://[::1]:80", ServerAddress("::1", 80, is_tls=False)),
    ],
)
def test_an_address_takes_base_urls_of_either_kind(url: str, expected: ServerAddress) -> None:
    """With or without the /v1 that clients are given, the same server is meant."""
    assert ServerAddress.of(url) == expected


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080", "ftp://example.org", "http://", "http://h:99999"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """A mistyped URL is told as one, not as a server that is down."""
    with pytest.raises(ValueError, match=r"."):
        ServerAddress.of(url)
