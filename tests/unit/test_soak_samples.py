"""A soak's verdict names what grew, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.daemon.soak_samples import Sample, problems, report_table, rss_growth, write_report

_MB = 1_000_000
_LEVEL = Sample(
    at_s=0.0,
    rss_bytes=300 * _MB,
    heap_used_bytes=100 * _MB,
    heap_free_bytes=50 * _MB,
    mlx_bytes=20 * _MB,
    prefix_bytes=10 * _MB,
    stored_response_bytes=_MB,
    descriptors=9,
    threads=16,
    tasks=10,
    is_idle=False,
)


def _soak(change: Callable[[int, Sample], Sample] = lambda _number, sample: sample) -> list[Sample]:
    """Ninety samples, every third of an idle daemon, each of them changed."""
    level = [replace(_LEVEL, at_s=5.0 * n, is_idle=n % 3 == 0) for n in range(91)]
    return [change(number, sample) for number, sample in enumerate(level)]


def test_level_daemon_has_no_problems() -> None:
    """Nothing is found where nothing grows."""
    assert problems(_soak()) == []


def test_warm_up_is_no_problem() -> None:
    """Growth in the first third is left out."""
    assert problems(_soak(lambda n, one: replace(one, rss_bytes=min(n, 30) * 10 * _MB))) == []


def test_rss_that_grows_by_more_than_three_percent_is_a_problem() -> None:
    """A slow leak is found by the medians of two thirds, 150 s apart."""
    grown = _soak(lambda n, one: replace(one, rss_bytes=(300 * 1000 + 250 * n) * 1000))
    assert rss_growth(grown) == pytest.approx(0.024, abs=0.001)
    assert problems(grown) == []
    leaking = _soak(lambda n, one: replace(one, rss_bytes=(300 * 1000 + 360 * n) * 1000))
    assert [one.split(" by ")[0] for one in problems(leaking)] == ["RSS grew"]


def _with_count(sample: Sample, name: str, count: int) -> Sample:
    match name:
        case "descriptors":
            return replace(sample, descriptors=count)
        case "threads":
            return replace(sample, threads=count)
        case _:
            return replace(sample, tasks=count)


@pytest.mark.parametrize("name", ["descriptors", "threads", "tasks"])
def test_counts_that_grow_while_idle_are_a_problem(name: str) -> None:
    """One more every ten samples is found for descriptors, threads and tasks."""
    soak = _soak(lambda n, one: _with_count(one, name, 9 + n // 10))
    assert [one.split()[0] for one in problems(soak)] == [name]


def test_counts_of_a_busy_daemon_are_no_problem() -> None:
    """Only idle points count: under load there are as many descriptors as clients."""
    soak = _soak(lambda n, one: one if one.is_idle else replace(one, descriptors=9 + n))
    assert problems(soak) == []


def test_too_few_samples_are_a_problem() -> None:
    """A soak that hardly looked proves nothing."""
    assert "too few" in problems(_soak()[:7])[0]
    assert "too few" in problems([one for one in _soak() if not one.is_idle])[0]


def test_report_holds_every_sample_and_a_picture(tmp_path: Path) -> None:
    """The JSON file has all samples, the table fits a screen, and the plot is a PNG file."""
    soak = _soak()
    write_report(soak, {"answered": 7}, tmp_path / "reports" / "soak")
    report = json.loads((tmp_path / "reports" / "soak.json").read_text(encoding="utf-8"))
    assert report["answered"] == 7
    assert len(report["samples"]) == len(soak)
    assert (tmp_path / "reports" / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert len(report_table(soak * 10).splitlines()) < 100
