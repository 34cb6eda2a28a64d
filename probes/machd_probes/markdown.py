"""The matrix as a page of the reference: ``docs/reference/architectures.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import UnsetType

from machd.capabilities.evidence import Evidence, Outcome
from machd_probes.report import MLX_LM_PROBE, MatrixReport, MatrixRow, ProbeRow
from machd_probes.table import (
    NONE,
    bitwise_names,
    by_kind,
    by_reason,
    mark,
    measured_on,
    prefix_mark,
)

_RAISES = "raises"

_HEADINGS = (
    "architecture",
    "KV cache",
    "continuous batching",
    "tokens wrong",
    "rows",
    "off by, nats",
    "noise, nats",
    "mlx-lm's batch",
    "prefix cache",
    "speculation",
    "batched specdec",
    "quantised KV",
    "chunked prefill",
    "experts on disk",
    "adapters",
)

_LEGEND = """\
Measured with `machd check --all-archs` on tiny models of every architecture that the installed
mlx-lm has: a few layers with random weights, each kind of layer that the architecture knows.

- **yes**, **no**, **?**: supported, blocked, unknown. What is unknown is served as if it were
  blocked. The reasons stand below.
- **tokens wrong**, **rows**, **off by**: rows of a batch compared with the same prompts alone; tokens
  that differ by more than noise, rows compared, and the largest difference of a log-probability.
- **noise**: the largest such difference between two ways of computing a row alone.
- **mlx-lm's batch**: the same comparison through mlx-lm's own batch path, which machd does not use:
  *right*, *wrong* or *raises*.
- **prefix cache**: *full*, any beginning of an earlier prompt is used again; *snapshot*, only one
  that was copied on the way.
- **batched specdec**: rows of a batch verify drafts together, whoever makes them: n-grams, a draft model or a
  DFlash draft. *no* leaves speculation to rows that run alone.
- **experts on disk**: with its experts on disk a model gives the tokens that it gives from memory; *no* for a model
  without experts.
- **adapters**: rows with different adapters on all linear layers, and with none, say in one batch what each says alone with its
  adapter merged into the weights. Experts stay as they are. Where it is unknown, rows with adapters are computed one at a time.
- **-**: not measured.
"""

_WORDS = {
    Outcome.PASSED: "right",
    Outcome.FAILED: "wrong",
    Outcome.ERRORED: _RAISES,
    Outcome.UNSUPPORTED: NONE,
    Outcome.NO_DATA: "?",
}

_Cells: TypeAlias = tuple[str, ...]


def matrix_markdown(matrix: MatrixReport) -> str:
    """The page, its title left out."""
    summary = matrix.summary
    counts = (
        f"{len(matrix.architectures)} architectures: {summary.supported} can be batched, "
        f"{summary.blocked} cannot, {summary.unknown} unknown."
    )
    parts = [
        f"Measured on {measured_on(matrix.versions)}; `make matrix` measures again.",
        counts,
        _LEGEND.rstrip(),
    ]
    for kind, rows in by_kind(matrix.architectures):
        parts += [
            f"## {kind.capitalize()}",
            markdown_table(_HEADINGS, (_cells(row) for row in rows)),
        ]
    parts += _bitwise(matrix)
    parts += _reasons(matrix)
    parts += _adapters(matrix)
    parts += _wrong_in_mlx_lm(matrix)
    parts += _errors(matrix)
    return "\n\n".join(parts) + "\n"


def _cells(row: MatrixRow) -> _Cells:
    return (
        f"`{row.architecture}`",
        f"`{row.kv_cache_kind}`" if row.kv_cache_kind else NONE,
        mark(row.continuous_batching),
        *_figures(row),
        _mlx_lm(row),
        prefix_mark(row.prefix_cache),
        mark(row.speculation),
        mark(row.batched_specdec),
        mark(row.kv_quantization),
        mark(row.chunked_prefill),
        mark(row.expert_streaming),
        mark(row.batched_adapters),
    )


def _figures(row: MatrixRow) -> _Cells:
    verdict = row.continuous_batching
    if verdict is None or isinstance(verdict.evidence, UnsetType):
        return NONE, NONE, NONE, NONE
    evidence: Evidence = verdict.evidence
    return (
        str(evidence.token_mismatches),
        str(evidence.cases),
        f"{evidence.max_logprob_diff:.2g}",
        f"{evidence.noise_floor:.2g}",
    )


def _bitwise(matrix: MatrixReport) -> Iterator[str]:
    names = bitwise_names(matrix)
    if names:
        yield "## The same bits alone and in a batch"
        yield (
            "A row of these has the same bits alone, in a batch, in chunks, behind a cached prefix and with drafts "
            "(`bitwise`): every comparison found a difference of 0 nats."
        )
        yield ", ".join(f"`{name}`" for name in names)


def _reasons(matrix: MatrixReport) -> Iterator[str]:
    rows = [
        (verdict, ", ".join(f"`{name}`" for name in names), escaped(reason))
        for verdict, reason, names in by_reason(matrix.architectures)
    ]
    if rows:
        yield "## What is not batched, and why"
        yield markdown_table(("verdict", "architectures", "reason"), rows)


def _adapters(matrix: MatrixReport) -> Iterator[str]:
    rows = [
        (verdict, ", ".join(f"`{name}`" for name in names), escaped(reason))
        for verdict, reason, names in by_reason(matrix.architectures, "batched_adapters")
    ]
    if rows:
        yield "## What adapters are not known to be right for, and why"
        yield markdown_table(("verdict", "architectures", "reason"), rows)


def _wrong_in_mlx_lm(matrix: MatrixReport) -> Iterator[str]:
    rows = []
    for row in matrix.architectures:
        probe = _mlx_lm_probe(row)
        if probe is not None and probe.outcome in {Outcome.FAILED, Outcome.ERRORED}:
            verdict = mark(row.continuous_batching)
            rows.append((f"`{row.architecture}`", _mlx_lm(row), verdict, _detail(probe)))
    if rows:
        yield "## Where mlx-lm's own batch path is wrong or raises"
        yield markdown_table(
            ("architecture", "mlx-lm's batch", "machd's batch", "what was seen"), rows
        )


def _errors(matrix: MatrixReport) -> Iterator[str]:
    rows = [
        (f"`{row.architecture}`", f"`{probe.probe}`", _detail(probe))
        for row in matrix.architectures
        for probe in row.errors
    ]
    if rows:
        yield "## Probes that ended in an error"
        yield markdown_table(("architecture", "probe", "what was seen"), rows)


def _mlx_lm(row: MatrixRow) -> str:
    probe = _mlx_lm_probe(row)
    if probe is None:
        return NONE
    # What failed before there was a row to compare, raised.
    is_raised = probe.outcome is Outcome.FAILED and isinstance(probe.evidence, UnsetType)
    return _RAISES if is_raised else _WORDS[probe.outcome]


def _mlx_lm_probe(row: MatrixRow) -> ProbeRow | None:
    return next((one for one in row.probes if one.probe == MLX_LM_PROBE), None)


def _detail(probe: ProbeRow) -> str:
    return NONE if isinstance(probe.detail, UnsetType) else escaped(probe.detail)


def markdown_table(headings: _Cells, rows: Iterable[_Cells]) -> str:
    """Return a table of cells that are Markdown."""
    lines = [_line(headings), f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(cells: _Cells) -> str:
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Text of an error may hold anything: nothing of it is markup, and it stays in its cell."""
    for character in "\\|`*_<>[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
