"""The table of log events against the sources: names, levels, fields, in both directions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from log_events import LOG_EVENTS, LogEvent
from reference_tables import log_events_markdown

import machd
import machd_probes
from machd.capabilities.evidence import Outcome

SOURCES = [Path(package.__path__[0]) for package in (machd, machd_probes)]
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}
NAME = re.compile(r"[a-z][a-z_]*\.[a-z][a-z_]*")
ENVELOPE = {"event", "level", "logger", "timestamp"}
SPREAD = {"probe.finished": {one.value for one in Outcome}}
"""Fields of events whose call spreads a mapping, which the source does not name."""


@dataclass(frozen=True)
class _Call:
    place: str
    name: str | None
    levels: frozenset[str]
    fields: frozenset[str]


def _calls(tree: ast.Module, path: Path) -> Iterator[_Call]:
    """Every call of a logger's method, also through a name that stands for one of several."""
    say = {
        target.id: _levels(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and _levels(node.value)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        levels = (
            say.get(function.id, set()) if isinstance(function, ast.Name) else _levels(function)
        )
        if levels:
            yield _call(node, frozenset(levels), path)


def _levels(node: ast.expr) -> set[str]:
    """The levels that an expression logs at when it is called; none where it is no logger's."""
    if isinstance(node, ast.IfExp):
        return _levels(node.body) | _levels(node.orelse)
    if isinstance(node, ast.Attribute) and node.attr in LEVELS:
        owner = ast.unparse(node.value)
        if owner in {"log", "self._log"} or owner.startswith("structlog.get_logger("):
            return {LEVELS[node.attr]}
    return set()


def _call(node: ast.Call, levels: frozenset[str], path: Path) -> _Call:
    first = node.args[0] if len(node.args) == 1 else None
    name = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
    fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    if any(keyword.arg is None for keyword in node.keywords):
        fields |= SPREAD.get(name or "", {"**"})
    if "exc_info" in fields or ast.unparse(node.func).endswith(".exception"):
        fields = (fields - {"exc_info"}) | {"exception"}
    return _Call(f"{path.name}:{node.lineno}", name, levels, frozenset(fields))


@pytest.fixture(scope="module")
def calls() -> list[_Call]:
    """Every call in the sources."""
    return [
        call
        for root in SOURCES
        for path in sorted(root.rglob("*.py"))
        for call in _calls(ast.parse(path.read_text("utf-8")), path)
    ]


def test_every_call_names_its_event(calls: list[_Call]) -> None:
    """One literal, dotted name a call, so that the table can be held against it."""
    assert [call for call in calls if call.name is None or not NAME.fullmatch(call.name)] == []
    assert len(calls) > 30


def test_every_logger_is_seen() -> None:
    """Wherever a logger is made, some call of it is found, however it is spelled."""
    for root in SOURCES:
        for path in root.rglob("*.py"):
            text = path.read_text("utf-8")
            if "structlog.get_logger(" in text:
                assert list(_calls(ast.parse(text), path)), path


def test_the_table_is_what_the_sources_log(calls: list[_Call]) -> None:
    """No event is missing and none is left over; each has its levels and its fields."""
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for call in calls:
        levels, fields = found[str(call.name)]
        levels |= call.levels
        fields |= call.fields
    table = {event.name: (set(event.levels), set(event.fields)) for event in LOG_EVENTS}

    assert {name: found[name] for name in found if name not in table} == {}
    assert table == dict(found)


@pytest.mark.parametrize("event", LOG_EVENTS, ids=lambda event: event.name)
def test_an_event_is_well_described(event: LogEvent) -> None:
    """A dotted name, sentences, advice wherever an operator should act, no field of the envelope."""
    assert NAME.fullmatch(event.name)
    assert event.meaning.endswith(".")
    assert not event.advice or event.advice.endswith(".")
    assert not ENVELOPE & set(event.fields)
    assert len(set(event.fields)) == len(event.fields)
    if {"error", "critical"} & set(event.levels):
        assert event.advice


def test_names_are_unique() -> None:
    """One entry an event."""
    assert len({event.name for event in LOG_EVENTS}) == len(LOG_EVENTS)


def test_the_page_has_a_row_for_each() -> None:
    """Five columns, none of them broken by what stands in it."""
    _, _, *rows = log_events_markdown().splitlines()
    assert len(rows) == len(LOG_EVENTS)
    assert {row.count("|") for row in rows} == {6}
