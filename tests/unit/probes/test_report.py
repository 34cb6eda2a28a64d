"""What a person, a program and a page of the reference make of the matrix."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence

import msgspec
from rich.console import Console
from unit.probes.fake_worker import made_report

from machd.capabilities.bitwise import BITWISE_CHECKS
from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import LayerCacheFacts
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.verdict import Support
from machd_probes.markdown import matrix_markdown
from machd_probes.matrix_file import KeptMatrix, encode_matrix_file
from machd_probes.report import (
    MatrixReport,
    encode_matrix,
    matrix_of,
    rounded,
)
from machd_probes.table import print_matrix
from machd_probes.versions import ProbeBasis
from machd_probes.worker_messages import faulted

BASIS = ProbeBasis(
    machd="1.2", mlx="2.3", mlx_lm="3.4", backend="cpu", blas="B 4", dtype="float32", sources="5"
)
LONGEST = "prism_hadamard_qwen35"
REPORTS = (
    made_report("qwen3"),
    made_report(LONGEST, layer=LayerCacheFacts("RotatingKVCache", window_tokens=8)),
    made_report("llama4", layer=LayerCacheFacts("ChunkedKVCache", mergeable=False)),
    made_report("broken", Outcome.FAILED, mlx_lm=Outcome.FAILED),
    faulted("crashed", "it crashed with SIGSEGV"),
    ArchitectureReport("absent", problem="no tiny configuration"),
)


def made_matrix(
    reports: Sequence[ArchitectureReport] = REPORTS, *, complete: bool = True
) -> MatrixReport:
    """A matrix with every verdict, and with rows of which nothing is known."""
    return matrix_of(reports, BASIS, complete=complete)


def printed(matrix: MatrixReport, width: int = 80) -> list[str]:
    """The lines that a pipe gets."""
    stream = io.StringIO()
    print_matrix(matrix, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def head_indices(lines: Sequence[str]) -> list[int]:
    """Return where the second lines of headings are."""
    return [index for index, line in enumerate(lines) if line.startswith("architecture ")]


def page_rows(text: str) -> dict[str, list[str]]:
    """Cells of the page's main tables by architecture."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows if len(row) == 15}


def test_json_has_the_shape_of_the_contract() -> None:
    """Versions, rows and summary stand under the names that programs rely on."""
    answer = json.loads(encode_matrix(made_matrix()))

    assert set(answer) >= {"versions", "architectures", "summary"}
    assert answer["versions"] == {
        "machd": "1.2",
        "mlx": "2.3",
        "mlx_lm": "3.4",
        "backend": "cpu",
        "dtype": "float32",
        "blas": "B 4",
    }
    assert answer["summary"] == {"supported": 1, "blocked": 2, "unknown": 3}
    row = next(one for one in answer["architectures"] if one["architecture"] == "qwen3")
    assert row["kv_cache_kind"] == "standard"
    assert row["layers"] == {"KVCache": 1}
    batching = row["continuous_batching"]
    assert (batching["verdict"], batching["source"]) == ("supported", "measured")
    assert batching["evidence"] == {
        "token_mismatches": 0,
        "max_logprob_diff": 1.2345e-5,
        "noise_floor": 1.1111e-6,
        "cases": 12,
    }
    assert set(row["versions"]) == {"machd", "mlx", "mlx_lm", "backend", "dtype"}
    assert [one["probe"] for one in row["probes"]] == [
        "batch_parity",
        "quantized_kv",
        "mlx_lm_batch",
    ]
    assert "problem" not in row
    assert row["bitwise"]["value"] is False
    assert "machd's own kernels" in row["bitwise"]["reason"]


def test_rows_are_in_one_order() -> None:
    """By name, whatever case it is in and whichever worker was quicker."""
    names = [row.architecture for row in made_matrix(REPORTS[::-1]).architectures]

    assert names == ["absent", "broken", "crashed", "llama4", LONGEST, "qwen3"]
    assert encode_matrix(made_matrix(REPORTS[::-1])) == encode_matrix(made_matrix())


def test_every_row_has_a_verdict_with_a_reason() -> None:
    """An architecture of which nothing is known is unknown, with what went wrong."""
    rows = {row.architecture: row for row in made_matrix().architectures}

    for row in rows.values():
        assert row.continuous_batching is not None
        assert row.continuous_batching.reason
    assert rows["absent"].continuous_batching is not None
    assert rows["absent"].continuous_batching.support is Support.UNKNOWN
    assert rows["crashed"].problem == "it crashed with SIGSEGV"
    assert [one.outcome for one in rows["crashed"].errors] == [Outcome.ERRORED]
    assert list(rows["qwen3"].errors) == []


def _kept(*reports: ArchitectureReport) -> bytes:
    return encode_matrix_file(KeptMatrix(BASIS, {one.architecture: one for one in reports}))


def test_what_is_kept_is_read_again() -> None:
    """Facts, figures and the code that they are about, in a line for each architecture."""
    kept = _kept(*REPORTS)

    read = msgspec.json.decode(kept, type=KeptMatrix)
    assert list(read.reports.values()) == sorted(REPORTS, key=lambda one: one.architecture)
    assert len(kept.splitlines()) == len(REPORTS) + 3
    assert encode_matrix_file(read) == kept


def test_kept_figures_rarely_differ() -> None:
    """Noise of a rerun and how long it took leave no trace in the file that is kept."""
    again = dataclasses.replace(
        REPORTS[0],
        results=tuple(
            dataclasses.replace(
                one,
                duration_s=one.duration_s + 1.0,
                evidence=msgspec.structs.replace(one.evidence, max_logprob_diff=1.2301e-5),
            )
            for one in REPORTS[0].results[:1]
        )
        + REPORTS[0].results[1:],
    )
    first, second = (_kept(rounded(one)) for one in (REPORTS[0], again))

    assert first == second
    assert b"1.2e-5" in first or b"0.000012" in first
    assert _kept(REPORTS[0]) != _kept(again)


def test_the_tables_fit_80_columns() -> None:
    """Each architecture is one unbroken line, the longest name included, and no heading is cut."""
    lines = printed(made_matrix())

    assert max(len(line) for line in lines) <= 80
    heads = {tuple(lines[index - 1].split()) for index in head_indices(lines)}
    assert heads == {("prefix", "spec-", "batched", "quant", "in")}
    assert all(lines[index].split()[-2:] == ["KV", "chunks"] for index in head_indices(lines))
    rows = {line.split()[0]: line.split() for line in lines if len(line.split()) == 10}
    assert rows["qwen3"][:4] == ["qwen3", "yes", "12", "0"]
    assert rows["broken"][:4] == ["broken", "no", "12", "7"]
    assert rows[LONGEST][1] == "?"
    assert rows["absent"][1:] == ["?", *"--------"]


def test_kinds_are_groups_and_reasons_follow() -> None:
    """A row stands under its kind of cache; what is not batched is followed by why."""
    lines = printed(made_matrix())
    text = " ".join(" ".join(lines).split())

    assert "standard (2)" in lines
    assert "rotating (1)" in lines
    assert lines.index("chunked (1)") < lines.index("not built (2)")
    assert any(line == "blocked: llama4" for line in lines)
    assert "layers attend in chunks (ChunkedKVCache)" in text
    assert "unknown: absent no tiny configuration" in text
    assert "crashed, run: it crashed with SIGSEGV" in text
    assert lines[-2] == "machd 1.2, mlx 2.3, mlx-lm 3.4, cpu, B 4, float32"
    assert lines[-1] == "6 architectures: 1 can be batched, 2 cannot, 3 unknown"


def test_a_matrix_without_trouble_has_no_empty_sections() -> None:
    """Where all is well there are a table and two lines."""
    lines = printed(made_matrix(REPORTS[:1]))

    assert not any(line.startswith(("blocked", "unknown", "ended")) for line in lines)
    assert lines[-1] == "1 architecture: 1 can be batched, 0 cannot, 0 unknown"


def _exact(name: str) -> ArchitectureReport:
    """A row of which no check measured a difference."""
    results = tuple(
        ProbeResult(one, Outcome.PASSED, "", Evidence(0, 0.0, 0.0, cases=2))
        for one in BITWISE_CHECKS
    )
    return dataclasses.replace(made_report(name), results=results)


def _native_matrix(*reports: ArchitectureReport) -> MatrixReport:
    basis = dataclasses.replace(BASIS, blas="machd-native 0.1.0, B 4")
    return matrix_of([*reports, *REPORTS], basis)


def test_architectures_with_equal_bits_are_listed_once() -> None:
    """The table and the page have a list; why another one differs is in the JSON."""
    matrix = _native_matrix(_exact("llama"), _exact("granite"))
    bitwise = {row.architecture: row.bitwise for row in matrix.architectures}
    lines, page = printed(matrix), matrix_markdown(matrix)

    heading = lines.index("a row has the same bits alone and in a batch (2)")
    assert lines[heading + 1].rstrip() == "  granite, llama"
    section = page.partition("## The same bits alone and in a batch")[2]
    assert section.partition("##")[0].rstrip().endswith("`granite`, `llama`")
    assert all(one is not None and one.reason for one in bitwise.values())
    differing, absent = bitwise["qwen3"], bitwise["absent"]
    assert differing is not None
    assert "rows differ by at most 1.2e-05 nats (batch_parity" in differing.reason
    assert absent is not None
    assert (absent.value, absent.reason) == (False, "no tiny configuration")


def test_no_list_where_no_architecture_has_equal_bits() -> None:
    """Without machd's own kernels there is none, whatever was measured."""
    matrix = made_matrix([*REPORTS, _exact("llama")])

    assert not any("same bits" in line for line in printed(matrix))
    assert "same bits" not in matrix_markdown(matrix)


def test_an_interrupted_matrix_says_so() -> None:
    """A partial report cannot be taken for a whole one, as a table or as JSON."""
    matrix = made_matrix(complete=False)

    assert printed(matrix)[-1].startswith("incomplete")
    assert json.loads(encode_matrix(matrix))["complete"] is False
    assert not printed(made_matrix())[-1].startswith("incomplete")
    assert json.loads(encode_matrix(made_matrix()))["complete"] is True


def test_a_pipe_gets_text_alone() -> None:
    """Off a terminal there is no escape sequence, and names are no markup."""
    text = "\n".join(printed(made_matrix([faulted("[red]x", "[bold]y")])))

    assert "\x1b" not in text
    assert "[red]x" in text
    assert "[bold]y" in text


def test_mlx_lms_own_batch_is_told_on_the_page() -> None:
    """The page says where mlx-lm is wrong or raises, and what machd makes of the same."""
    raises = ProbeResult("mlx_lm_batch", Outcome.FAILED, "raises ValueError: [a|b]")
    mended = made_report("mended", mlx_lm=Outcome.FAILED)
    raising = dataclasses.replace(made_report("raising"), results=(raises,))
    text = matrix_markdown(made_matrix([*REPORTS, mended, raising]))
    rows = page_rows(text)
    section = text.partition("## Where mlx-lm's own batch path is wrong or raises")[2]

    assert [rows[name][7] for name in ("qwen3", "mended", "raising", "absent")] == [
        "right",
        "wrong",
        "raises",
        "-",
    ]
    assert "| `mended` | wrong | yes | - |" in section
    assert r"raises ValueError: \[a\|b\]" in section
    assert "`qwen3`" not in section
    assert "## Where mlx-lm" not in matrix_markdown(made_matrix(REPORTS[:3]))


def test_adapters_are_told_where_they_are_right_and_why_not_elsewhere() -> None:
    """The page has a column and a table of reasons, the terminal the names under each reason."""
    outcomes = {
        "right": (Outcome.PASSED, "adapters leave these layers as they are: experts"),
        "wrong": (Outcome.FAILED, "rows with adapters say something else"),
        "without": (Outcome.UNSUPPORTED, "no layer is a linear one"),
    }
    reports = [
        dataclasses.replace(one, results=(*one.results, ProbeResult("adapters", *outcomes[name])))
        for name in outcomes
        for one in [made_report(name)]
    ]
    matrix = made_matrix([*reports, made_report("unmeasured")])
    text = matrix_markdown(matrix)
    lines = "\n".join(line.rstrip() for line in printed(matrix, width=300))
    rows = page_rows(text)

    marks = {name: row[-1].rstrip(" |") for name, row in rows.items()}
    assert marks == {"right": "yes", "wrong": "no", "without": "no", "unmeasured": "?"}
    reasons = text.partition("## What adapters are not known to be right for, and why")[2]
    assert "| blocked | `without` | no layer is a linear one |" in reasons
    assert "rows with adapters say something else; serve it without adapters" in reasons
    assert "`right`" not in reasons
    assert "adapters (1)\n  right\n" in lines
    assert "adapters blocked: without\n  no layer is a linear one\n" in lines
    assert "adapters unknown: unmeasured\n" in lines


def test_the_page_has_a_row_for_every_architecture() -> None:
    """Grouped by kind, with versions, figures and the reasons of all that is not supported."""
    matrix = made_matrix()
    text = matrix_markdown(matrix)
    rows = page_rows(text)

    assert set(rows) == {row.architecture for row in matrix.architectures}
    assert rows["qwen3"][1:8] == ["`standard`", "yes", "0", "12", "1.2e-05", "1.1e-06", "right"]
    assert "machd 1.2, mlx 2.3, mlx-lm 3.4, cpu, B 4, float32" in text
    assert text.index("## Standard") < text.index("## Not built")
    reasons = text.partition("## What is not batched, and why")[2].partition("\n## ")[0]
    assert "`llama4`" in reasons
    assert "no tiny configuration" in reasons
    assert "`qwen3`" not in reasons
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| ")} == {
        2,
        3,
        14,
    }
