"""What a person, a program and a plot make of a report."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from unit.bench.bench_reports import made_prefix, made_report

from machd.bench.ceiling import CeilingAnswer
from machd.bench.figures import CeilingFigures, ceilings_of
from machd.bench.plot import write_plot
from machd.bench.report import BenchReport
from machd.bench.table import ReportPrinter


def printed(report: BenchReport, width: int) -> list[str]:
    """The lines that a pipe gets."""
    stream = io.StringIO()
    ReportPrinter(Console(file=stream, width=width)).finish(report)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("slowness", [0.001, 1.0, 500.0])
def test_the_tables_fit_80_columns(slowness: float) -> None:
    """Each level is one unbroken line of each table, with milliseconds or minutes in it."""
    lines = printed(made_report(slowness=slowness), 80)

    assert max(len(line) for line in lines) <= 80
    for mode in ("single", "static", "continuous"):
        rows = [line for line in lines if line.startswith(mode)]
        assert [row.split()[1] for row in rows[:6]] == ["1", "4", "16"] * 2
        assert all(len(row.split()) == 11 for row in rows[:3])
    heads = [line.split() for line in lines if line.startswith("mode")]
    assert heads[0][:2] == ["mode", "clients"]
    assert "first token, s" in lines[lines.index("") + 1]
    assert "token gaps, ms" in lines[lines.index("") + 1]


def test_every_scenario_has_a_table_with_its_goal() -> None:
    """The ratio that the project has a goal for stands beside the goal."""
    lines = printed(made_report(), 80)
    text = "\n".join(lines)

    assert "4 requests, one every 250 ms (goal: the first token 6 x sooner than static's)" in text
    assert any(line.startswith("continuous") and line.endswith("7.00 x") for line in lines)
    assert "joins 2 streams (goal: gaps at most 2.5 x)" in text
    assert "3 identical requests at once (goal: at most 1.1 x one alone)" in text
    assert any("1.05 x" in line and line.endswith("2 of 3") for line in lines)
    assert "2 of them held to JSON schemas (goal: at least 0.85 x as fast)" in text
    assert any("0.80 x" in line and line.endswith("0 of 2") for line in lines)


def test_a_report_without_a_sweep_has_no_empty_tables() -> None:
    """Scenarios that did not run leave nothing behind."""
    report = msgspec.structs.replace(made_report(), levels=[], staggered=[], long_prompt=[])
    lines = printed(report, 80)

    assert not any("clients" in line for line in lines)
    assert not any("one every" in line or "joins" in line for line in lines)
    assert any("identical" in line for line in lines)


def test_a_server_that_does_not_batch_is_noted() -> None:
    """A mode that the server fell back from is told with the server's reason."""
    report = made_report()
    fallen = [
        msgspec.structs.replace(server, decode_mode="single", decode_mode_reason="it is rotating")
        for server in report.servers
    ]

    def notes(report: BenchReport) -> str:
        return " ".join(printed(report, 200))

    assert "decodes in mode single: it is rotating" in notes(
        msgspec.structs.replace(report, servers=fallen)
    )
    assert "decodes in mode" not in notes(report)


def test_answers_that_ended_early_are_noted() -> None:
    """A server that ignores ignore_eos in silence shows by its count of tokens."""
    report = made_report()
    levels = [msgspec.structs.replace(level, completion_tokens=1) for level in report.levels]

    (structured,) = report.structured
    short = msgspec.structs.replace(structured, completion_tokens=87)

    # 63 answers of levels and 8 of the sets, of 11 tokens each.
    for changed, noted in (
        (msgspec.structs.replace(report, levels=levels), "ended early: 97 tokens of 781"),
        (msgspec.structs.replace(report, structured=[short]), "ended early: 780 tokens of 781"),
    ):
        assert noted in " ".join(printed(changed, 200))
    assert "ended early: " not in " ".join(printed(report, 200))


def test_a_pipe_gets_text_alone() -> None:
    """Off a terminal there is no escape sequence and no end of line lost."""
    text = "\n".join(printed(made_report(), 80))

    assert "\x1b" not in text
    assert "p50" in text
    assert "…" not in text


def test_a_remote_server_has_no_ceiling_columns() -> None:
    """Without a bare loop the table shows no empty columns and says what was measured."""
    lines = printed(made_report(url="http://127.0.0.1:1"), 80)

    assert not any("bare" in line for line in lines)
    assert lines[0] == "http://127.0.0.1:1"
    assert any("ignore_eos" in line for line in lines)


def test_a_machine_that_drifts_gets_a_note() -> None:
    """Bare steps that differ by more than the target's 5 % make the fractions doubtful, aloud."""
    report = made_report()
    steady, drifting = (
        ceilings_of([CeilingAnswer(1, 9, 0.1, [0.1]), CeilingAnswer(1, 9, 0.1, [s])])
        for s in (0.102, 0.11)
    )

    def is_noted(ceilings: list[CeilingFigures]) -> bool:
        lines = printed(msgspec.structs.replace(report, ceilings=ceilings), 80)
        return any("not steady" in line for line in lines)

    assert is_noted(drifting)
    assert not is_noted(steady)


def test_the_json_has_the_documented_shape() -> None:
    """Every name in the drawing of the module's docstring is in the JSON, and no other."""
    from machd.bench import report as module  # noqa: PLC0415 - its docstring is what is tested

    assert module.__doc__ is not None
    drawing = module.__doc__.split("::")[1].split("The classes")[0]
    documented = set(drawing.split('"')[1::2])

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*(names(item) for item in value.values()))
        return set().union(*(names(item) for item in value)) if isinstance(value, list) else set()

    assert names(json.loads(msgspec.json.encode(made_report()))) == documented


def test_the_json_reads_back() -> None:
    """A report survives the file unrounded."""
    report = made_report()

    assert msgspec.json.decode(msgspec.json.encode(report), type=BenchReport) == report


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    """Three modes, or a single level of a remote server, come out as a PNG of some size."""
    pytest.importorskip("matplotlib")
    remote = made_report(url="http://127.0.0.1:1")
    lonely = msgspec.structs.replace(remote, levels=remote.levels[:1])

    for number, report in enumerate((made_report(), lonely)):
        path = tmp_path / f"{number}.png"
        write_plot(report, path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width > height > 300


def test_a_growing_report_is_written_part_by_part() -> None:
    """What is shown while it grows is, in the end, what a whole report prints at once."""
    whole = msgspec.structs.replace(made_report(), levels=[], prefix=[made_prefix()])
    first = msgspec.structs.replace(
        whole, prefix=[msgspec.structs.replace(made_prefix(), full_cache=None, kv_formats=[])]
    )
    first.prefix[0].skipped.clear()
    stream = io.StringIO()
    printer = ReportPrinter(Console(file=stream, width=80))

    printer.show(first)
    shown = stream.getvalue()
    printer.show(first)
    assert stream.getvalue() == shown
    assert "Sharing takes" in shown
    assert "full cache" not in shown
    printer.finish(whole)

    assert stream.getvalue().splitlines() == printed(whole, 80)
