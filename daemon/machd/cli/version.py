"""``machd version``: what is installed, what computes, and how well it takes a batch."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

import click

import machd
from machd.engine.backend.blas import BlasChoice, BlasReport, measure_blas
from machd.engine.open import choose_checked_blas
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--blas",
    default="auto",
    envvar="LME_BLAS",
    metavar="auto|off|PATH",
    show_default=True,
    help="The CPU's matrix library, as serve would choose it.",
)
def version(*, as_json: bool, blas: str) -> None:
    """Print versions, and what multiplies matrices.

    Where machd's own kernels do not compute, it measures the matrix library: one row and sixteen rows
    times a 2048 x 2048 float32 matrix. Where sixteen cost about as much as one, batching pays.
    """
    environ = process_environ()
    choice = choose_checked_blas(
        blas,
        cache_directory=user_cache_directory(environ),
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
    )
    report = measure_blas(choice)
    facts: dict[str, object] = {
        "machd": machd.__version__,
        "mlx": _version_of("mlx"),
        "mlx_lm": _version_of("mlx-lm"),
        "python": platform.python_version(),
        "backend": report.backend,
        "blas": _blas_facts(report, choice),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name in ("machd", "mlx", "mlx_lm", "python", "backend"):
        click.echo(f"{name.replace('_', '-'):8} {facts[name]}")
    if report.name is not None:
        click.echo(f"{'BLAS':8} {_blas_line(report)}")
        for refused in choice.refused:
            click.echo(f"{'':8} {refused}")
    if report.advice is not None:
        click.echo(f"advice   {report.advice}")


def _version_of(distribution: str) -> str:
    try:
        return distribution_version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _blas_facts(report: BlasReport, choice: BlasChoice) -> dict[str, object] | None:
    if report.name is None:
        return None
    return {
        "name": report.name,
        "one_row_ms": report.one_row_ms,
        "sixteen_rows_ms": report.sixteen_rows_ms,
        "ratio": report.ratio,
        "is_reference": report.is_reference,
        "advice": report.advice,
        "reason": choice.reason,
        "refused": [str(one) for one in choice.refused],
    }


def _blas_line(report: BlasReport) -> str:
    if report.one_row_ms is None or report.sixteen_rows_ms is None or report.ratio is None:
        return str(report.name)
    return (
        f"{report.name} (1 row {report.one_row_ms:.1f} ms, 16 rows {report.sixteen_rows_ms:.1f} "
        f"ms: {report.ratio:.1f} times)"
    )
