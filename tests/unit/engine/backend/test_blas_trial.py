"""BLAS libraries are timed in child processes, which may crash or hang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

from machd.clock import SystemClock
from machd.engine.backend.blas_candidates import installed_libraries
from machd.engine.backend.blas_trial import (
    COMPARISON_LIMIT_S,
    BlasTrial,
    ProductShape,
    compare_libraries,
    fastest,
)

_PROGRAM = """
import os, signal, sys, time
verb, library, width, columns, limit_s = sys.argv[1:]
with open(os.environ["RUNS"], "a") as runs:
    runs.write(f"{library} {width} {columns}\\n")
if library == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if library == "hang":
    time.sleep(float(os.environ["FOREVER_S"]))
if library == "refuse":
    sys.exit("first line\\nno such symbol")
if library == "chatty":
    print("hello")
print("[%s]" % library)
"""
"""A child process that does what its library is called, or prints it as its times."""

_COMMAND = (sys.executable, "-I", "-S", "-c", _PROGRAM)
_SHAPE = ProductShape(576, 1536)


def _environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "RUNS": str(tmp_path / "runs"), "FOREVER_S": str(2 * CEILING_S)}


def _compared(tmp_path: Path, *libraries: str, limit_s: float = CEILING_S) -> tuple[BlasTrial, ...]:
    return compare_libraries(
        libraries, _SHAPE, _environ(tmp_path), command=_COMMAND, limit_s=limit_s
    )


def test_libraries_take_turns(tmp_path: Path) -> None:
    """Each is measured twice and never twice in a row, so that a machine that slows down slows both."""
    trials = _compared(tmp_path, "2.0, 8.0", "1.0, 3.0")
    assert [(one.one_row_ms, one.sixteen_rows_ms) for one in trials] == [(2.0, 8.0), (1.0, 3.0)]
    assert all(one.is_lasting for one in trials)
    runs = (tmp_path / "runs").read_text("utf-8").splitlines()
    assert runs == ["2.0, 8.0 576 1536", "1.0, 3.0 576 1536"] * 2


@pytest.mark.parametrize(
    ("library", "problem"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("refuse", "no such symbol"),
        ("chatty", "its process ended without an answer"),
    ],
)
def test_a_broken_library_is_skipped_with_its_reason(
    tmp_path: Path, library: str, problem: str
) -> None:
    """The others are measured, and the broken one is not started again."""
    broken, other = _compared(tmp_path, library, "1.0, 2.0")
    assert (broken.is_broken, broken.problem, broken.mean_ms) == (True, problem, None)
    assert fastest([broken, other]) == other
    assert (tmp_path / "runs").read_text("utf-8").count(library) == 1


def test_a_library_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    """The bound holds for all libraries together, and what ran out of time is not called broken."""
    started_s = SystemClock().monotonic_s()
    (hanging,) = _compared(tmp_path, "hang", limit_s=COMPARISON_LIMIT_S)
    assert SystemClock().monotonic_s() - started_s < CEILING_S
    assert "not measured within" in (hanging.problem or "")
    assert not hanging.is_broken
    assert not hanging.is_lasting


def test_no_process_is_started_once_the_time_is_up(tmp_path: Path) -> None:
    """Libraries that come too late have a reason instead of times."""
    trials = _compared(tmp_path, "1.0, 2.0", "1.0, 2.0", limit_s=0.0)
    assert {one.problem for one in trials} == {"no time was left to measure it"}
    assert not (tmp_path / "runs").exists()


def test_the_fastest_has_the_least_geometric_mean() -> None:
    """Half the time for one row is worth as much as half the time for sixteen."""
    even = BlasTrial("even", 2.0, 2.0)
    assert fastest([even, BlasTrial("one row", 0.5, 4.0)]) == BlasTrial("one row", 0.5, 4.0)
    assert fastest([even, BlasTrial("sixteen", 4.0, 0.5)]) == BlasTrial("sixteen", 4.0, 0.5)
    assert fastest([even, BlasTrial("slow", 1.0, 5.0)]) == even


def test_noise_does_not_decide_between_libraries() -> None:
    """A library that is faster by less than 5 % does not replace one that is preferred."""
    first = BlasTrial("first", 1.0, 1.0)
    assert fastest([first, BlasTrial("second", 0.96, 0.96)]) == first
    assert fastest([first, BlasTrial("second", 0.94, 0.94)]) != first
    assert fastest([BlasTrial("none", problem="crashed")]) is None


@pytest.mark.parametrize(
    ("shape", "bounded"),
    [
        (ProductShape(576, 1536), ProductShape(576, 1536)),
        (ProductShape(4096, 1 << 20), ProductShape(4096, 2048)),
        (ProductShape(1 << 20, 1 << 20), ProductShape(1 << 14, 512)),
        (ProductShape(0, 0), ProductShape(1, 1)),
    ],
)
def test_a_shape_is_bounded(shape: ProductShape, bounded: ProductShape) -> None:
    """No model makes a trial long: a matrix has at most 32 MiB."""
    assert shape.bounded() == bounded


@pytest.mark.skipif(sys.platform != "linux", reason="chosen on Linux only")
def test_an_installed_library_is_measured() -> None:
    """The child process multiplies with the real library, and without a library it says what is missing."""
    libraries = installed_libraries(os.environ)
    if not libraries:
        pytest.skip("no optimised BLAS on this machine")
    real, missing = compare_libraries(
        [libraries[0], "/nowhere/libblas.so"], _SHAPE, os.environ, limit_s=CEILING_S
    )
    assert real.mean_ms is not None, real.problem
    assert real.mean_ms > 0.0
    assert missing.is_broken
    assert "/nowhere/libblas.so" in (missing.problem or "")
