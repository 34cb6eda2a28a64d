"""The notes of the scenario formats tell which format is faster, and from which width on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.clients.measured_rows import Unseen
from support.clocks.virtual_time import LoopClock

from machd.errors import StartupError
from machd_bench.answer import Answer
from machd_bench.bench import Bench, Plan
from machd_bench.scenarios import weight_formats
from machd_bench.scenarios.weight_formats import WEIGHT_FORMATS, _crossovers, _Format, overtakes
from machd_bench.server import Server

_WIDTHS = (1, 4, 16)
_NO_SERVER = Server.__new__(Server)  # notes are made of answers alone


def _format(name: str, step_ms: list[float]) -> _Format:
    """Three equal rounds of answers with these steps, one for each width."""
    rounds = {}
    for width, one_ms in zip(_WIDTHS, step_ms, strict=True):
        times_s = tuple(number * one_ms / 1000 for number in range(5))
        rounds[width] = [[Answer(0.0, 9.0, times_s)] * width] * 3
    return _Format(name, server=_NO_SERVER, perplexity=20.0, rounds=rounds)


@pytest.mark.parametrize(
    ("faster", "slower", "index"),
    [
        ([[2, 2, 2]] * 3, [[1, 1, 1]] * 3, 0),
        ([[1, 1, 1], [3, 3, 1], [3, 3, 3]], [[2, 2, 2]] * 3, 1),
        ([[3, 3, 3], [1, 1, 1], [3, 3, 3]], [[2, 2, 2]] * 3, 2),
        ([[3, 3, 3], [3, 3, 3], [1, 1, 1]], [[2, 2, 2]] * 3, None),
        ([[2, 2, 2]] * 3, [[2, 2, 2]] * 3, None),
    ],
)
def test_overtaking_holds_at_every_width_from_there_on(
    faster: list[list[float]], slower: list[list[float]], index: int | None
) -> None:
    """A format overtakes at the first width after the last one at which its median round is not faster."""
    assert overtakes(faster, slower) == index


def test_notes_begin_with_the_pair_of_the_claim() -> None:
    """nvfp4 against affine2 is the first sentence, and every other pair follows, grouped by width."""
    formats = [
        _format("f32", [50, 55, 60]),
        _format("affine2", [30, 60, 200]),
        _format("nvfp4", [40, 50, 150]),
    ]
    assert _crossovers(formats, _WIDTHS) == [
        "nvfp4 is faster than affine2 from width 4 on",
        "f32: from width 4 on, faster than affine2",
        "f32: from width 16 on, faster than nvfp4",
        "nvfp4: from width 4 on, faster than affine2",
    ]


def test_claim_that_never_holds_is_said_to() -> None:
    """The first sentence says "at no width" when nvfp4 is never faster than affine2."""
    formats = [_format("affine2", [30, 60, 90]), _format("nvfp4", [40, 70, 100])]
    assert _crossovers(formats, _WIDTHS)[0] == "nvfp4 is faster than affine2 at no width here"


async def test_a_format_that_is_left_out_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without texts shows it as well: a row of its own, and a note for the terminal."""
    plan = Plan(weight_formats=("bf16", "nvfp4"), widths=())
    bench = Bench(plan, LoopClock(), Unseen())

    @asynccontextmanager
    async def serve(_bench: Bench, *args: str) -> AsyncIterator[Server]:
        if "nvfp4" in args:
            raise StartupError("mlx does not compute nvfp4 on gpu")
        yield _NO_SERVER

    async def perplexity(_server: Server) -> float:
        return 20.0

    monkeypatch.setattr(Bench, "serve", serve)
    monkeypatch.setattr(Bench, "has_room", lambda *_: True)
    monkeypatch.setattr(weight_formats, "_perplexity", perplexity)
    rows = [row async for row in WEIGHT_FORMATS.run(bench)]
    assert [(row.case, row.figures["verdict"]) for row in rows] == [("nvfp4, left out", "left out")]
    assert bench.notes[0] == "nvfp4 left out: mlx does not compute nvfp4 on gpu"
