"""Tests wait under one ceiling: no number of seconds of their own decides whether they fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
_WAITS = {"communicate", "join", "result", "settimeout", "wait"}
_KEYWORDS = {"timeout", "within_s"}
_PACING_BELOW_S = 1.0
"""Shorter waits pace a load or look at something again; they are in loops that go on."""


def _literal_waits(tree: ast.AST) -> Iterator[ast.Constant]:
    """Numbers in calls that wait."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        values = [one.value for one in call.keywords if one.arg in _KEYWORDS]
        values += call.args if name in _WAITS and len(call.args) == 1 else []
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield value


def _long_waits(text: str) -> list[int]:
    """The lines of waits that are a verdict."""
    return [
        one.lineno
        for one in _literal_waits(ast.parse(text))
        if not isinstance(one.value, bool)
        and isinstance(one.value, int | float)
        and one.value >= _PACING_BELOW_S
    ]


@pytest.mark.parametrize(
    "call",
    [
        "httpx.get(url, timeout=5)",
        "thread.join(2.0)",
        "event.wait(30)",
        "future.result(20)",
        "connection.settimeout(10)",
    ],
)
def test_a_literal_wait_is_found(call: str) -> None:
    """The check below sees each way of waiting for a number of seconds."""
    assert _long_waits(call) == [1]


def test_no_test_names_seconds_to_wait() -> None:
    """Every wait of a second or more uses the one ceiling."""
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in _long_waits(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)
