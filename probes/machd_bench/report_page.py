"""A shared report as one HTML page: tables, and pictures inside of it. It loads nothing."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from machd_bench.plot import can_plot, write_plot
from machd_bench.report import Report
from machd_bench.scenario import Scenario
from machd_bench.shared_report import Outcome, Part, SharedReport
from machd_bench.table import table_cells

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; }
img { max-width: 100%; }
.failed { color: #b00020; font-weight: 600; }
"""


def report_page(report: SharedReport, scenarios: Sequence[Scenario]) -> str:
    """Return the page, with a picture if matplotlib is installed."""
    title = f"machd bench: {report.model.get('id') or 'no model yet'}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Size {escape(report.size)}, begun {escape(report.started_at)}.</p>",
        "<h2>Machine and model</h2>",
        _facts({**report.machine, **report.model}),
        "<h2>Parts</h2>",
        _parts(report.parts),
        *_goals(report),
        *_picture(report),
        *(line for one in scenarios for line in _scenario(one, report)),
        "<h2>Loads</h2>",
        _facts(report.plan),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head>{head}</head><body>',
            *body,
            "</body></html>",
            "",
        ]
    )


def _facts(facts: Mapping[str, object]) -> str:
    known = {name: value for name, value in facts.items() if value not in {None, ()}}
    return _table(("", ""), ((name, str(value)) for name, value in known.items()))


def _parts(parts: Iterable[Part]) -> str:
    rows = "".join(
        f"<tr{' class=failed' if one.outcome is Outcome.FAILED else ''}><td>{escape(one.scenario)}</td>"
        f"<td>{one.outcome.value}</td><td>{'' if one.wall_s is None else f'{one.wall_s:.0f} s'}</td>"
        f"<td>{escape(one.error or '')}</td></tr>"
        for one in parts
    )
    return f"<table><tr><th>part</th><th></th><th>took</th><th>error</th></tr>{rows}</table>"


def _goals(report: SharedReport) -> Iterator[str]:
    if report.goals:
        yield "<h2>Goals</h2>"
        yield "".join(f"<p>{escape(str(one))}</p>" for one in report.goals)


def _scenario(scenario: Scenario, report: SharedReport) -> Iterator[str]:
    if rows := report.of(scenario.name):
        headings, lines = table_cells(scenario, rows)
        yield f"<h2>{escape(scenario.name)}</h2>"
        yield f"<p>{escape(scenario.about)}</p>"
        yield _table(headings, lines)


def _table(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(one).replace(chr(10), '<br>')}</th>" for one in headings)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in line)}</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _png(report: Report) -> bytes:
    with tempfile.TemporaryDirectory(prefix="machd-report-") as folder:
        path = Path(folder) / "report.png"
        write_plot(report, path)
        return path.read_bytes()


def _picture(report: SharedReport) -> Iterator[str]:
    yield "<h2>Pictures</h2>"
    if not report.rows or not can_plot():
        yield "<p>None: nothing was measured, or the extra machd[plot] is not installed.</p>"
        return
    drawn = Report(
        started_at=report.started_at,
        url=None,
        machine=report.machine,
        model=report.model,
        plan=report.plan,
        rows=report.rows,
        goals=report.goals,
        notes=[],
    )
    try:
        data = base64.b64encode(_png(drawn)).decode("ascii")
    except Exception as error:  # noqa: BLE001 - a part that failed half way may lack what a picture needs
        yield f"<p>None: {type(error).__name__} while drawing.</p>"
        return
    yield f'<img alt="figures of the tables below" src="data:image/png;base64,{data}">'
