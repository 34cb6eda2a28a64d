"""The work behind ``machd check --all-archs --vision``. Imports neither mlx nor mlx-vlm."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import click
from rich.console import Console

from machd.errors import ModelArchitectureError, StartupError
from machd.installed import how_to_install, installed_version
from machd.settings.sources import process_environ
from machd_probes.measurement import measure
from machd_probes.runner import WORKER_COMMAND, Runner, RunnerLimits
from machd_probes.versions import vision_basis
from machd_probes.vision_matrix.catalogue import family_names
from machd_probes.vision_matrix.report import (
    VisionMatrix,
    encode_vision_matrix,
    vision_matrix_of,
)
from machd_probes.vision_matrix.table import print_vision_matrix
from machd_probes.worker import VISION_FLAG
from machd_probes.worker_messages import BLAS_VARIABLE

_HOLDS = 0
_HOLDS_NOT = 1
_INTERRUPTED = 130

_LIMITS = RunnerLimits(architecture_s=900.0, group=4)
"""A family takes some 6 s on two cores, most of it for imports. Each starts a process of its own for its processor."""


def check_families(
    names: tuple[str, ...] | None,
    *,
    as_json: bool,
    use_cache: bool,
    require_batched: bool,
    blas: str | None = None,
    runner: Runner | None = None,
) -> int:
    """Measure vision-language families, print the matrix to standard output, and give the exit code.

    The code is 1 if a family that is served with images answers unlike mlx-vlm: a daemon does not measure that. Ctrl-C
    ends the workers and prints what was measured until then, marked as incomplete.

    Args:
        names: Families as mlx-vlm names them; None for all that machd knows.
        as_json: Whether to print JSON, ``machd_probes.vision_matrix.report`` says which, and no table.
        use_cache: Whether to take results of earlier runs and to keep new ones.
        require_batched: Whether the code is 1 unless every family named, or every one that takes images, is supported
            alone and in a batch.
        blas: ``engine.blas`` for the workers; what the environment says unless given.
        runner: Starts the workers; the real one unless given.

    Raises:
        ModelArchitectureError: machd knows no family of a name.
        StartupError: No worker can start, or mlx-vlm is not installed.
    """
    wanted = _known(names)
    mlx_vlm = installed_version("mlx-vlm")
    if mlx_vlm is None:
        raise StartupError(
            f"images are measured with mlx-vlm, which is missing: {how_to_install('vision')}"
        )
    environ = process_environ()
    if blas is not None:
        environ[BLAS_VARIABLE] = blas
    runner = runner or Runner(environ, command=(*WORKER_COMMAND, VISION_FLAG), limits=_LIMITS)
    computing = runner.what_computes()
    basis = vision_basis(backend=computing.backend, blas=computing.blas)
    found = measure(wanted, basis, runner, environ, use_cache=use_cache)
    matrix = vision_matrix_of(found.reports, basis, mlx_vlm, complete=found.is_complete)
    if as_json:
        click.echo(encode_vision_matrix(matrix), nl=False)
    else:
        print_vision_matrix(matrix, Console())
        if found.cached:
            of_all = f"{found.cached} of {len(found.reports)}"
            click.echo(f"{of_all} were measured earlier; --no-cache measures them again")
    if not found.is_complete:
        done = f"{len(found.reports)} of {found.wanted}"
        click.echo(f"machd: interrupted; {done} families were probed", err=True)
        return _INTERRUPTED
    return _exit_code(matrix, are_named=names is not None, require_batched=require_batched)


def _exit_code(matrix: VisionMatrix, *, are_named: bool, require_batched: bool) -> int:
    if any(row.is_wrong for row in matrix.families):
        return _HOLDS_NOT
    required = [row for row in matrix.families if are_named or row.served]
    is_batched = all(row.is_batched for row in required)
    return _HOLDS_NOT if require_batched and not is_batched else _HOLDS


def _known(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names asked for, each once.

    Raises:
        ModelArchitectureError: machd knows no family of a name.
    """
    known = family_names()
    if names is None:
        return tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
            raise ModelArchitectureError(
                f"machd knows no vision-language family {name!r}; the nearest are {', '.join(near)}"
            )
    return tuple(dict.fromkeys(names))
