"""The page of architectures was measured on what is installed, and misses nothing."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import UnsetType

import machd
from machd.capabilities.verdict import Support
from machd_probes.catalogue import CHECK_NAMES, architecture_names
from machd_probes.encoder_matrix.markdown import encoders_markdown
from machd_probes.encoder_matrix.matrix_file import (
    ENCODERS_PATH,
    encode_encoders_file,
    kept_encoders,
)
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS
from machd_probes.markdown import matrix_markdown
from machd_probes.matrix_file import MATRIX_PATH, encode_matrix_file, kept_matrix
from machd_probes.report import MatrixReport, matrix_of
from machd_probes.sources import encoder_sources_digest, sources_digest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
MEASURE = "run `make matrix`"
MEASURE_ENCODERS = "run `make matrix-encoders`"


@pytest.fixture(name="matrix", scope="module")
def _matrix() -> MatrixReport:
    """The figures that the page is made from."""
    kept = kept_matrix()
    assert kept is not None
    return matrix_of(kept.reports.values(), kept.basis)


def test_it_was_measured_on_the_installed_versions(matrix: MatrixReport) -> None:
    """Another machd, mlx or mlx-lm makes figures of yesterday: they are measured again."""
    measured = (matrix.versions.machd, matrix.versions.mlx, matrix.versions.mlx_lm)

    assert measured == (machd.__version__, version("mlx"), version("mlx-lm")), MEASURE


def test_every_installed_architecture_has_a_row(matrix: MatrixReport) -> None:
    """Whatever mlx-lm can load is in the matrix, and nothing that it cannot."""
    assert [row.architecture for row in matrix.architectures] == sorted(
        architecture_names(), key=lambda name: (name.lower(), name)
    ), MEASURE


def test_every_check_has_a_result(matrix: MatrixReport) -> None:
    """A row that was probed says how each check of the catalogue ended."""
    missing = {
        row.architecture: set(CHECK_NAMES) - {one.probe for one in row.probes}
        for row in matrix.architectures
        if isinstance(row.problem, UnsetType)
    }

    assert {name: names for name, names in missing.items() if names} == {}, MEASURE


def test_no_run_broke_off(matrix: MatrixReport) -> None:
    """Figures that are kept were measured to their end, of every architecture."""
    assert matrix.complete
    errors = [(row.architecture, one) for row in matrix.architectures for one in row.errors]
    assert errors == []


def test_the_summary_counts_the_rows(matrix: MatrixReport) -> None:
    """Three counts, and every row is in one of them."""
    verdicts = [
        row.continuous_batching.support
        for row in matrix.architectures
        if row.continuous_batching is not None
    ]
    summary = matrix.summary

    assert len(verdicts) == len(matrix.architectures)
    assert [summary.supported, summary.blocked, summary.unknown] == [
        verdicts.count(one) for one in Support
    ]


def test_the_file_is_as_it_is_written() -> None:
    """A file that is read and written again is the same to the byte: no figure is edited."""
    kept = kept_matrix()
    assert kept is not None
    assert encode_matrix_file(kept) == MATRIX_PATH.read_bytes()


def test_it_was_measured_with_this_code() -> None:
    """Other code of machd's makes figures of yesterday, too: a start would not believe them."""
    kept = kept_matrix()
    assert kept is not None
    assert kept.basis.sources == sources_digest(), MEASURE


def test_the_page_is_made_from_the_figures(matrix: MatrixReport) -> None:
    """The page ends with what the file says now."""
    page = (REFERENCE / "architectures.md").read_text("utf-8")

    assert page.endswith(f"{matrix_markdown(matrix)}\n{encoders_markdown(kept_encoders().matrix)}")


def test_encoders_of_every_family_were_measured_with_this_code_and_are_right() -> None:
    """No encoder is missing, no verdict is another than supported, and the file is as it is written."""
    kept = kept_encoders()
    assert kept.basis.sources == encoder_sources_digest(), MEASURE_ENCODERS
    assert kept.reports.keys() == TINY_ENCODERS.keys(), MEASURE_ENCODERS
    assert encode_encoders_file(kept) == ENCODERS_PATH.read_bytes()
    for row in kept.matrix.rows:
        verdicts = dict(row.verdicts)
        assert "pooling" in verdicts or row.task == "classify"
        assert {one.support for one in verdicts.values()} == {Support.SUPPORTED}, row.encoder


def test_at_least_122_were_measured_and_two_are_blocked(matrix: MatrixReport) -> None:
    """All but those that need Metal have evidence; only caches that cannot be merged block."""
    measured = [
        row.architecture
        for row in matrix.architectures
        for one in row.probes
        if one.probe == "batch_parity" and one.outcome in {"passed", "failed"}
    ]
    blocked = {
        row.architecture
        for row in matrix.architectures
        if row.continuous_batching is not None
        and row.continuous_batching.support is Support.BLOCKED
    }

    assert len(measured) >= 122
    assert blocked == {"deepseek_v41", "llama4"}


def test_only_what_is_mended_alone_differs_from_mlx_lm_alone(matrix: MatrixReport) -> None:
    """A row alone says what mlx-lm's own model says, but where that is wrong or raises (0020)."""
    differ = {
        row.architecture
        for row in matrix.architectures
        for one in row.probes
        if one.probe == "alone" and one.outcome == "failed"
    }

    assert differ == {"olmo", "phi3small", "plamo3"}
