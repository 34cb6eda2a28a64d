"""The prefix cache's figures as a person sees them."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from unit.bench.bench_reports import made_prefix, made_report

from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.plot import write_prefix_plot
from machd.bench.prefix.table import prefix_tables


def printed(figures: PrefixFigures, width: int = 80) -> list[str]:
    """The lines that a pipe gets."""
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for table in prefix_tables(figures):
        console.print(table)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("slowness", [0.001, 1.0, 500.0])
def test_the_tables_fit_80_columns(slowness: float) -> None:
    """Nothing is cut off and no row is broken, with milliseconds or minutes in it."""
    lines = printed(made_prefix(slowness))

    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    heads = [line.split() for line in lines if line.startswith("Step")]
    assert heads == [["Step", "Description", "Expected", "Actual", "TTFT", "Status"]]
    assert [line.split()[-1] for line in lines if line.startswith(("1a ", "4a ", "4b "))] == [
        *("PASS", "PASS", "MISSED")
    ]
    formats = [line for line in lines if line.startswith(("none ", "affine8 ", "turboquant "))]
    assert all("batched" in line for line in formats[1:])


def test_every_goal_is_reached_or_missed() -> None:
    """What is wanted of a figure stands by it, with whether it is so."""
    text = "\n".join(printed(made_prefix()))
    words = " ".join(text.split())

    assert "4b: 17 of 1000 tokens from the cache, at least 900 expected" in text
    assert "warm: the same again 200 ms 0.050 x 0.10 x reached" in words
    assert "after a restart 2.00 s 0.500 x 0.25 x missed" in words
    assert "Sharing takes 84.0% less: reached" in text
    assert "The server says: 200 MB saved, 200 shared blocks" in text
    assert "costs +5.0%, median of 24 pairs: missed" in text
    assert "Half of the pairs lie between +4.0% and +11.0%" in text
    assert "144 blocks were driven out; within its limit whenever it was asked" in text
    assert "0.91 x" in next(line for line in printed(made_prefix()) if "affine8  " in line)
    assert "not measured: affine4: the model has no such caches" in text


def test_goals_change_sides_with_their_figures() -> None:
    """A figure on the other side of its goal is told as that."""
    figures = made_prefix()
    assert figures.sharing is not None
    assert figures.full_cache is not None
    first, _, affine8 = figures.kv_formats
    changed = msgspec.structs.replace(
        figures,
        latency=msgspec.structs.replace(figures.latency, warm_ratio=0.11, restarted_ratio=0.25),
        sharing=msgspec.structs.replace(figures.sharing, saved_share=0.79, evictions=3),
        full_cache=msgspec.structs.replace(
            figures.full_cache,
            cost_share=0.01,
            cost_quartiles=(-0.02, 0.03),
            highest_bytes=92_000_001,
        ),
        kv_formats=[first, msgspec.structs.replace(affine8, rows_ratio=1.7)],
    )
    text = " ".join(" ".join(printed(changed)).split())

    assert "0.110 x 0.10 x missed" in text
    assert "0.250 x 0.25 x reached" in text
    assert "79.0% less: missed" in text
    assert "note: 3 blocks were driven out meanwhile" in text
    assert "+1.0%, median of 24 pairs: reached" in text
    assert "OVER ITS LIMIT" in text
    assert "1.70 x missed" in text


def test_pairs_on_both_sides_of_the_goal_decide_nothing() -> None:
    """A median that reaches the goal is worth as little then as one that misses it."""
    figures = made_prefix()
    assert figures.full_cache is not None
    for cost_share in (0.02, 0.05):
        full_cache = msgspec.structs.replace(
            figures.full_cache, cost_share=cost_share, cost_quartiles=(0.0, 0.06)
        )
        text = "\n".join(printed(msgspec.structs.replace(figures, full_cache=full_cache)))
        assert f"{cost_share:+.1%}, median of 24 pairs: not known" in text


def test_goals_that_cannot_apply_are_not_judged() -> None:
    """Short prompts, too few users and a cache with room say nothing of the goals, either way."""
    figures = made_prefix()
    assert figures.sharing is not None
    assert figures.full_cache is not None
    first, _, affine8 = figures.kv_formats
    changed = msgspec.structs.replace(
        figures,
        latency=msgspec.structs.replace(figures.latency, prompt_tokens=499),
        sharing=msgspec.structs.replace(figures.sharing, users=2, saved_share=0.46),
        full_cache=msgspec.structs.replace(figures.full_cache, prompt_tokens=60),
        kv_formats=[first, msgspec.structs.replace(affine8, rows_ratio=None)],
    )
    lines = printed(changed)
    text = " ".join(" ".join(lines).split())

    assert max(len(line) for line in lines) <= 80
    assert "0.050 x 0.10 x not judged" in text
    assert "0.500 x 0.25 x not judged" in text
    assert "The goals are for 500 tokens and more" in text
    assert "46.0% less: not judged These prompts could take 47.4% less at best" in text
    assert "median of 24 pairs: not judged" in text
    assert text.count("not known") == 1
    assert not any(line.endswith(("reached", "missed")) for line in lines)
    full_cache = msgspec.structs.replace(figures.full_cache, evictions=0)
    assert not full_cache.is_judged


def test_what_was_not_measured_leaves_nothing_behind() -> None:
    """A server at a URL has neither a full cache nor other formats."""
    figures = msgspec.structs.replace(
        made_prefix(),
        sharing=None,
        full_cache=None,
        kv_formats=[],
        latency=msgspec.structs.replace(
            made_prefix().latency, restarted=None, restarted_ratio=None
        ),
    )
    text = "\n".join(printed(figures))

    assert not any(word in text for word in ("users", "full cache", "streams", "after a restart"))


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    """Two modes, or one without a restart, come out as a PNG of some size."""
    pytest.importorskip("matplotlib")
    figures = made_prefix()
    single = msgspec.structs.replace(figures, mode="single")
    lonely = msgspec.structs.replace(
        figures,
        latency=msgspec.structs.replace(figures.latency, restarted=None, restarted_ratio=None),
    )

    for number, prefix in enumerate(([figures, single], [lonely])):
        path = tmp_path / f"{number}.png"
        write_prefix_plot(msgspec.structs.replace(made_report(), prefix=prefix), path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width > height > 300
