"""From times to figures."""

from __future__ import annotations

import dataclasses

import pytest
from unit.bench.bench_reports import made_timing

from machd.bench.ceiling import CeilingAnswer
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.level import Level, LevelTimings


def test_the_ceiling_is_the_median_of_every_run() -> None:
    """Runs before, between and after the levels count alike, each width for itself."""
    answers = [
        CeilingAnswer(1, 127, 0.2, [0.05, 0.07]),
        CeilingAnswer(4, 128, 0.8, [0.1]),
        CeilingAnswer(1, 129, 0.4, [0.06, 0.06]),
    ]

    one, four = ceilings_of(answers)

    assert (one.batch_width, one.runs, one.step.p50_s, one.step.count) == (1, 2, 0.06, 4)
    assert one.prompt_tokens == 128.0
    assert one.prefill_s == pytest.approx(0.3)
    assert one.decode_tps == pytest.approx(1 / 0.06)
    assert four.decode_tps == pytest.approx(4 / 0.1)


def test_the_ceiling_is_all_tokens_over_all_of_the_time() -> None:
    """Prefill and every step count, slow steps as they are: nothing is taken out of a run."""
    (one,) = ceilings_of(CeilingAnswer(4, 9, 0.5, [0.1, 0.1, slow_s]) for slow_s in (0.1, 0.3, 9.0))

    assert one.generation_tps == pytest.approx(4 * 4 / (0.5 + 0.1 + 0.1 + 0.3))


def test_a_server_as_fast_as_the_bare_loop_has_all_of_it() -> None:
    """The fraction compares the same work: a request that costs what the bare loop costs is 1."""
    ceilings = ceilings_of([CeilingAnswer(1, 10, 0.5, [0.05] * 10)])
    timings = tuple(
        made_timing(start_s, first_s=0.5, gap_s=0.05, tokens=11) for start_s in (0.0, 1.0, 2.0)
    )

    figures = LevelFigures.of(LevelTimings(Level("single", "level-1", 1, 1), timings), ceilings)

    assert figures.ceiling is not None
    assert figures.ceiling.generation == pytest.approx(1.0)
    assert figures.ceiling.itl_per_step == pytest.approx(1.0)
    assert figures.generation_tps == pytest.approx(11.0)
    assert figures.prompt_tps == pytest.approx(10.0)
    assert figures.tokens_per_event == 1.0


def test_a_level_is_held_against_its_own_width_only() -> None:
    """Without a bare loop at its batch width a level has no fraction, rather than a wrong one."""
    ceilings = ceilings_of([CeilingAnswer(1, 10, 0.5, [0.05])])
    timing = made_timing(0.0, first_s=0.5, gap_s=0.05, tokens=2)

    for width in (4, None):
        level = LevelTimings(Level("continuous", "level-4", 4, width), (timing,))
        assert LevelFigures.of(level, ceilings).ceiling is None


def test_answers_of_one_token_have_no_gaps() -> None:
    """One token leaves nothing between tokens, on either side, and everything else stands."""
    ceilings = ceilings_of([CeilingAnswer(1, 10, 0.5, [])])
    timing = made_timing(0.0, first_s=0.5, gap_s=0.0, tokens=1)

    figures = LevelFigures.of(LevelTimings(Level("single", "level-1", 1, 1), (timing,)), ceilings)

    assert figures.itl is None
    assert ceilings == []
    assert figures.ttft.p50_s == 0.5


def test_a_level_ends_with_its_last_token() -> None:
    """What a server sends after the last token, usage among it, is not counted as generating."""
    timing = dataclasses.replace(
        made_timing(0.0, first_s=0.5, gap_s=0.05, tokens=11), ended_s=100.0
    )

    level = LevelTimings(Level("single", "level-1", 1, 1), (timing,))

    assert level.wall_s == pytest.approx(1.0)
    assert LevelFigures.of(level, []).latency.p50_s == 100.0
