"""Checks and times the products of each BLAS library in short child processes.

A library that crashes, hangs or starts threads does so in a process that ends. Knows neither mlx nor
a model: the caller gives the shape of the product.
"""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from machd.clock import Clock, SystemClock
from machd.settings.problems import shortened

PRODUCT_COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).with_name("blas_product.py")))
"""Checks or times one library. Without the site's modules, which would double the time of its start."""

COMPARISON_LIMIT_S = 1.0
"""For all libraries together: a start is not to take noticeably longer."""

_PRODUCTS_S = 0.06
"""Time that one child process multiplies. It needs about as long to start, to load and to fill its memory."""

CHECK_LIMIT_S = 30.0
"""For one library, which takes 0.3 s on a quiet machine: a library that hangs is not loaded."""

_TURNS = 2
_MAX_ELEMENTS = 1 << 23
_MAX_WIDTH = 1 << 14

_NO_ANSWER = "its process ended without an answer"

_WORTHWHILE = 0.95
"""A library is preferred to an earlier one if it takes at most this share of the earlier one's time."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The matrix that rows are multiplied with.

    Attributes:
        width: Values of one row.
        columns: Values of one row of the product.
    """

    width: int = 2048
    columns: int = 2048

    def bounded(self) -> ProductShape:
        """Return a shape of at most 32 MiB in float32, so that the time of a trial has a bound."""
        width = max(1, min(self.width, _MAX_WIDTH))
        return ProductShape(width, max(1, min(self.columns, _MAX_ELEMENTS // width)))

    def __str__(self) -> str:
        return f"{self.width} x {self.columns}"


@dataclass(frozen=True, slots=True)
class BlasTrial:
    """Times of one library, or the reason why there are none.

    Attributes:
        library: Path of the file.
        one_row_ms: Median time of a float32 product of one row, the lesser of the turns.
        sixteen_rows_ms: The same of 16 rows.
        problem: What went wrong; None for a library that was measured.
        is_broken: Whether the library cannot be used; False also where the time was too short.
        turns: How often it was measured.
    """

    library: str
    one_row_ms: float | None = None
    sixteen_rows_ms: float | None = None
    problem: str | None = None
    is_broken: bool = False
    turns: int = 0

    @property
    def is_lasting(self) -> bool:
        """True if later starts can use it. On a busy machine no time is left for all turns, and it is not kept."""
        return self.is_broken or self.turns == _TURNS

    @property
    def mean_ms(self) -> float | None:
        """Geometric mean of both times: half the time for one row is worth as much as for 16."""
        if self.one_row_ms is None or self.sixteen_rows_ms is None:
            return None
        return math.sqrt(self.one_row_ms * self.sixteen_rows_ms)

    @property
    def figures(self) -> dict[str, str | float]:
        """The times or the problem, as logs and ``machd version --json`` show them."""
        if self.one_row_ms is None or self.sixteen_rows_ms is None:
            return {"library": self.library, "problem": self.problem or ""}
        return {
            "library": self.library,
            "one_row_ms": round(self.one_row_ms, 3),
            "sixteen_rows_ms": round(self.sixteen_rows_ms, 3),
        }


@dataclass(frozen=True, slots=True)
class BlasCheck:
    """The outcome of comparing a library's products with plain sums.

    Attributes:
        problem: What is wrong; None if nothing is.
        is_lasting: Whether a later start would find the same; False where the machine had no time.
    """

    problem: str | None
    is_lasting: bool = True


def fastest(trials: Sequence[BlasTrial]) -> BlasTrial | None:
    """Return the trial with the least geometric mean; None if nothing was measured.

    Of two that differ by less than 5 % it is the first: noise does not decide.
    """
    best: BlasTrial | None = None
    for trial in trials:
        if trial.mean_ms is None:
            continue
        if best is None or best.mean_ms is None or trial.mean_ms <= best.mean_ms * _WORTHWHILE:
            best = trial
    return best


def compare_libraries(
    libraries: Sequence[str],
    shape: ProductShape,
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = PRODUCT_COMMAND,
    limit_s: float = COMPARISON_LIMIT_S,
    clock: Clock | None = None,
) -> tuple[BlasTrial, ...]:
    """Measure libraries in turns, one process each; the better of two measurements counts.

    Args:
        libraries: Paths.
        shape: Of the matrix.
        environ: Of the child processes, with the number of threads that a library takes.
        command: Starts a child; library, width, columns and seconds to multiply are appended.
        limit_s: For all together. A process that is still running then is killed.
        clock: Reads time.
    """
    clock = clock or SystemClock()
    started_s = clock.monotonic_s()
    end_s = started_s + limit_s
    trials = [BlasTrial(library) for library in libraries]
    for turn in range(_TURNS):
        if turn and clock.monotonic_s() - started_s > limit_s / _TURNS:
            break  # a second turn would take about as long as the first
        for index, trial in enumerate(trials):
            if trial.is_broken:
                continue
            # What fast libraries leave of their time goes to the others.
            left_s = (end_s - clock.monotonic_s()) / (len(trials) - index)
            found = _trial(trial.library, shape, environ, command, left_s)
            trials[index] = _better(trial, found)
    return tuple(trials)


def _better(earlier: BlasTrial, later: BlasTrial) -> BlasTrial:
    """Join two measurements of a library: the least of each time, or what went wrong."""
    if later.mean_ms is None:
        return earlier if earlier.mean_ms is not None and not later.is_broken else later
    if earlier.one_row_ms is None or earlier.sixteen_rows_ms is None:
        return later
    assert later.one_row_ms is not None, "it has a mean"
    assert later.sixteen_rows_ms is not None, "it has a mean"
    return replace(
        later,
        one_row_ms=min(earlier.one_row_ms, later.one_row_ms),
        sixteen_rows_ms=min(earlier.sixteen_rows_ms, later.sixteen_rows_ms),
        turns=earlier.turns + later.turns,
    )


def check_products(
    library: str,
    shape: ProductShape,
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = PRODUCT_COMMAND,
    limit_s: float = CHECK_LIMIT_S,
) -> BlasCheck:
    """Compare a library's products with plain sums, in a process of its own.

    Args:
        library: Its path.
        shape: Of the model's largest matrices.
        environ: Of the child process.
        command: Starts a child; the verb, library, width, columns and numpy's folder are appended.
        limit_s: A process that is still running then is killed.
    """
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None, "numpy is a dependency"
    assert numpy.origin is not None, "it is a package of files"
    folder = str(Path(numpy.origin).parents[1])
    arguments = ("check", library, str(shape.width), str(shape.columns), folder)
    answer = _answer((*command, *arguments), environ, limit_s)
    if not isinstance(answer, _Failure):
        return BlasCheck(None if answer is None else str(answer))
    problem = f"its products could not be checked: {answer.problem}"
    return BlasCheck(problem, is_lasting=answer.is_broken)


def _trial(
    library: str,
    shape: ProductShape,
    environ: Mapping[str, str],
    command: Sequence[str],
    limit_s: float,
) -> BlasTrial:
    """Run the child process that times one library."""
    if limit_s <= 0.0:
        return BlasTrial(library, problem="no time was left to measure it")
    arguments = ("time", library, str(shape.width), str(shape.columns), str(_PRODUCTS_S))
    answer = _answer((*command, *arguments), environ, limit_s)
    if isinstance(answer, _Failure):
        return BlasTrial(library, problem=answer.problem, is_broken=answer.is_broken)
    try:
        one_row_ms, sixteen_rows_ms = msgspec.convert(answer, tuple[float, float])
    except msgspec.ValidationError:
        return BlasTrial(library, problem=_NO_ANSWER, is_broken=True)
    return BlasTrial(library, one_row_ms, sixteen_rows_ms, turns=1)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A child process without an answer: the problem, and whether the library caused it."""

    problem: str
    is_broken: bool


def _answer(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> object:
    """Return the JSON value that a child process prints, or how it failed."""
    try:
        done = subprocess.run(  # noqa: S603 - our own program, and files of this machine
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Failure(f"not measured within {limit_s * 1000.0:.0f} ms", is_broken=False)
    except OSError as error:
        return _Failure(f"no process could be started: {error.strerror}", is_broken=False)
    if done.returncode < 0:
        return _Failure(_ended_by(-done.returncode), is_broken=True)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return _Failure(_said(done.stderr), is_broken=True)


def _ended_by(number: int) -> str:
    try:
        return f"its process was ended by {signal.Signals(number).name}"
    except ValueError:  # a real-time signal has no name
        return f"its process was ended by signal {number}"


def _said(stderr: bytes) -> str:
    """Return the last line of what a failed process wrote."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return shortened(lines[-1]) if lines else _NO_ANSWER
