"""What a stream tells of its prompt's progress, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from machd.generations.prefill_progress import PrefillProgress
from machd.http.told_progress import ToldProgress

_PROGRESS = PrefillProgress(100, 20, 0, elapsed_s=1.0)


def _told(counts: Iterable[int]) -> list[tuple[int, float]]:
    """Prefilled tokens and seconds of each event, for the counts of one look after the other."""
    said: list[tuple[int, float]] = []

    def tell(progress: PrefillProgress) -> bytes:
        said.append((progress.prefilled_tokens, progress.elapsed_s))
        return b"x"

    told = ToldProgress(tell)
    for count in counts:
        before = len(said)
        frames = told.due(replace(_PROGRESS, prefilled_tokens=count))
        assert len(frames) == len(said) - before, "what is told is sent"
        assert told.is_done == (bool(said) and said[-1][0] == 100)
    return said


def test_progress_begins_with_what_is_cached_and_ends_with_the_whole_prompt() -> None:
    """Nothing is told before the first step; then what was found, each step forward, and the end."""
    assert _told([0, 0, 60, 60, 80, 100]) == [(20, 0.0), (60, 1.0), (80, 1.0), (100, 1.0)]


def test_a_prompt_of_one_step_has_a_beginning_and_an_end() -> None:
    """Its first look finds it whole."""
    assert _told([100]) == [(20, 0.0), (100, 1.0)]


def test_a_prompt_that_is_computed_anew_is_told_of_once_it_is_further_than_before() -> None:
    """After a crash its count begins again, and nothing is told until it has caught up."""
    assert _told([60, 0, 40, 60, 90]) == [(20, 0.0), (60, 1.0), (90, 1.0)]


@given(st.lists(st.integers(0, 100), max_size=30))
def test_progress_never_goes_back(counts: list[int]) -> None:
    """Whatever the counts do, each event tells of more tokens than the one before."""
    said = [tokens for tokens, _ in _told(counts)]
    assert said == sorted(set(said))
