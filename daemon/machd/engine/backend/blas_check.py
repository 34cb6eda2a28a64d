"""Checks the products of a BLAS library in a short child process, before this process loads it.

A library that crashes or hangs does so in a process that ends. Knows neither mlx nor a model.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machd.settings.problems import shortened

PRODUCT_COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).with_name("blas_product.py")))
"""Checks one library. Without the site's modules, which would double the time of its start."""

CHECK_LIMIT_S = 30.0
"""For one library, which takes 0.3 s on a quiet machine: a library that hangs is not loaded."""


@dataclass(frozen=True, slots=True)
class BlasCheck:
    """The outcome of comparing a library's products with plain sums.

    Attributes:
        problem: What is wrong; None if nothing is.
        is_lasting: Whether a later start would find the same; False where the machine had no time.
    """

    problem: str | None
    is_lasting: bool = True


def check_products(
    library: str,
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = PRODUCT_COMMAND,
    limit_s: float = CHECK_LIMIT_S,
) -> BlasCheck:
    """Compare a library's products with plain sums, in a process of its own, which is killed after ``limit_s``."""
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None, "numpy is a dependency"
    assert numpy.origin is not None, "it is a package of files"
    folder = str(Path(numpy.origin).parents[1])
    try:
        done = subprocess.run(  # noqa: S603 - our own program, and files of this machine
            (*command, library, folder),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _unchecked(f"it took longer than {limit_s:g} s", is_lasting=False)
    except OSError as error:
        return _unchecked(f"no process could be started: {error.strerror}", is_lasting=False)
    if done.returncode < 0:
        return _unchecked(f"its process was ended by {_signal_name(-done.returncode)}")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return _unchecked(_last_line(done.stderr) or "its process ended without an answer")
    return BlasCheck(None if answer is None else str(answer))


def _unchecked(problem: str, *, is_lasting: bool = True) -> BlasCheck:
    return BlasCheck(f"its products could not be checked: {problem}", is_lasting)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return shortened(lines[-1]) if lines else ""
