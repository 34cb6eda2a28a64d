"""A report that is shared holds figures, and nothing that tells whose machine it was."""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator, Callable
from html.parser import HTMLParser

import msgspec
import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock, in_virtual_time

from machd.errors import ModelNotFoundError
from machd.settings.model import Settings
from machd_bench.bench import Bench, Mode
from machd_bench.report import Figure, Row
from machd_bench.report_page import report_page
from machd_bench.report_run import PLANS, ReportRun, empty_report
from machd_bench.scenario import Scenario
from machd_bench.scenarios import SCENARIOS
from machd_bench.shared_report import LOCAL_MODEL, Outcome, SharedReport, shared_model

SECRET = "secret-name"
SECRETS = [
    f"/home/{SECRET}/models",
    f"https://{SECRET}.example/v1",
    f"{SECRET}: no such file, or directory",
    f"C:\\{SECRET}",
]


def made_report(*rows: Row) -> SharedReport:
    """A report of these rows."""
    report = empty_report("quick", list(SCENARIOS.values()), PLAN)
    report.add(rows)
    return report


def as_text(report: SharedReport) -> str:
    """Both files of a report."""
    page = report_page(report, list(SCENARIOS.values()))
    return msgspec.json.encode(report).decode() + page


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("name", ["decode_mode_reason", "reason", "verdict", "probe_alone"])
def test_texts_that_are_not_machds_own_words_are_left_out(name: str, secret: str) -> None:
    """A reason is left out whatever it says, and a verdict that is no word as well."""
    row = Row(scenario="parity", mode="settings", case="llama", figures={name: secret, "passed": 3})

    report = made_report(row)

    assert report.rows[0].figures == {name: None, "passed": 3}
    assert SECRET not in as_text(report)


def test_words_of_machds_own_stay() -> None:
    """A verdict, a format and the outcome of a probe are what a report is for."""
    figures: dict[str, Figure] = {
        "verdict": "PREFIX_HIT",
        "format": "affine4",
        "probe_trim": "no_data",
        "batching": "supported",
    }

    report = made_report(Row(scenario="parity", mode="settings", case="llama", figures=figures))

    assert report.rows[0].figures == figures


def test_the_name_of_a_model_on_disk_is_left_out_and_its_size_is_not() -> None:
    """A hub's name stays: it says which model was measured."""
    facts: dict[str, Figure] = {"id": SECRET, "parameters": 7}

    assert shared_model(facts, is_local=True) == {"id": LOCAL_MODEL, "parameters": 7}
    assert shared_model(facts, is_local=False) == facts


def test_the_machine_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the network, nor that of a user or of a kernel's build."""
    named = platform.uname()._replace(node=SECRET, release=f"6.1.2-{SECRET}")
    monkeypatch.setattr(platform, "uname", lambda: named)
    monkeypatch.setenv("USER", SECRET)
    monkeypatch.setenv("HOME", f"/home/{SECRET}")

    report = made_report()

    assert SECRET not in as_text(report)
    if platform.system() == "Linux":
        assert report.machine["platform"] == f"Linux 6.1.2 {platform.machine()}"


class _Addresses(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag}: {value}" for name, value in attrs if name in {"src", "href"} and value
        ]


def test_the_page_loads_nothing_and_shows_every_part() -> None:
    """Its picture is inside of it, and no address is anywhere in it."""
    pytest.importorskip("matplotlib")
    rows = [
        Row(
            scenario="memory",
            mode="batched",
            case="1 stream",
            figures={"active_bytes": 5_000_000, "rss_bytes": 7_000_000, "wired_bytes": None},
        ),
        Row(scenario="parity", mode="settings", case="llama <b>", figures={"passed": 9}),
    ]
    report = made_report(*rows)
    report.parts[0].outcome, report.parts[0].error = Outcome.FAILED, "RuntimeError"

    page = report_page(report, list(SCENARIOS.values()))

    addresses = _Addresses()
    addresses.feed(page)
    assert [one[:26] for one in addresses.found] == ["img: data:image/png;base64,"[:26]]
    assert "://" not in page
    assert "<b>" not in page
    assert "RuntimeError" in page
    assert all(f"<td>{one.scenario}</td>" in page for one in report.parts)


def test_a_picture_that_cannot_be_drawn_leaves_the_tables() -> None:
    """A part that failed half way may have measured one width of a format and not the next."""
    pytest.importorskip("matplotlib")
    rows = [
        Row(scenario="formats", case=case, figures={"format": name, "width": width, "tps": 1.5})
        for case, name, width in (("a", "bf16", 1), ("b", "bf16", 4), ("c", "affine4", 1))
    ]

    page = report_page(made_report(*rows), list(SCENARIOS.values()))

    assert "while drawing" in page
    assert page.count("<td>1.50</td>") == 3


def scenario(name: str, run: Callable[[Bench], AsyncGenerator[Row]]) -> Scenario:
    """A scenario that needs no server."""
    modes = frozenset({Mode.BATCHED})
    return Scenario(
        name=name, about="", run=run, modes=modes, columns=("tps",), starts_servers=True
    )


@in_virtual_time
async def test_a_part_that_fails_is_told_by_its_class_and_the_next_one_runs() -> None:
    """Its rows so far are kept, and nothing of the error's text gets into either file."""
    nothing: list[Row] = []

    async def breaks(_bench: Bench) -> AsyncGenerator[Row]:
        yield Row(case="before", figures={"tps": 1.0})
        raise RuntimeError(SECRET)

    async def is_missing(_bench: Bench) -> AsyncGenerator[Row]:
        for row in nothing:
            yield row
        raise ModelNotFoundError(SECRET)

    async def cannot(bench: Bench) -> AsyncGenerator[Row]:
        bench.notes.append(SECRET)
        for row in nothing:
            yield row

    async def runs(_bench: Bench) -> AsyncGenerator[Row]:
        yield Row(case="after", figures={"tps": 2.0})

    scenarios = [scenario(one.__name__, one) for one in (breaks, is_missing, cannot, runs)]
    report, told = empty_report("quick", scenarios, PLAN), list[tuple[str, str]]()
    run = ReportRun(report, PLAN, LoopClock(), Unseen(), lambda _scenario, _rows: None)

    await run.measure(
        scenarios,
        Settings(),
        (),
        is_local=True,
        on_part=lambda part, _notes, fault: told.append((part.scenario, repr(fault))),
    )

    assert [(one.scenario, one.outcome, one.error, one.error_code) for one in report.parts] == [
        ("breaks", Outcome.FAILED, "RuntimeError", None),
        ("is_missing", Outcome.FAILED, "ModelNotFoundError", ModelNotFoundError.code),
        ("cannot", Outcome.LEFT_OUT, None, None),
        ("runs", Outcome.MEASURED, None, None),
    ]
    assert [(row.scenario, row.case) for row in report.rows] == [
        ("breaks", "before"),
        ("runs", "after"),
    ]
    assert SECRET in told[0][1]
    text = msgspec.json.encode(report).decode() + report_page(report, scenarios)
    assert SECRET not in text


def test_loads_of_each_size_are_fixed_and_quick_is_the_smaller() -> None:
    """Reports of one size can be compared."""
    usual, quick = PLANS["usual"], PLANS["quick"]

    assert quick.requests < usual.requests
    assert set(quick.concurrencies) < set(usual.concurrencies)
    assert set(quick.weight_formats) < set(usual.weight_formats)
    assert quick.architectures
