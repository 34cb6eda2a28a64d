"""Rows whose windows are full, and rows whose are not, do not disturb one another."""

from __future__ import annotations

from dataclasses import replace

from machd_probes.finding import Finding, no_data, unsupported
from machd_probes.play import Join
from machd_probes.scripts import Script
from machd_probes.subject import Subject

WIDEST_WINDOW_TOKENS = 256
"""A window that a probe may fill in the time it has."""


def probe(subject: Subject) -> Finding:
    """Prompts below, at and far beyond the window; completions that run over its edge."""
    window = subject.window_tokens
    if window is None:
        return unsupported("no cache has a window")
    if window > WIDEST_WINDOW_TOKENS:
        return no_data(f"the window of {window} tokens is more than a probe fills")
    tokens = subject.extent.tokens
    lengths = (window // 2, window - 1, window, window + 1, 3 * window + 2)
    rows = [
        Join(subject.prompt(max(length, 1), number), tokens)
        for number, length in enumerate(lengths)
    ]
    over_the_edge = [Join(subject.prompt(2, 7), window + tokens), rows[-1], rows[1]]
    return subject.found(
        {
            "inside and beyond": Script(tuple(rows)),
            "joining later": Script(
                tuple(replace(row, at_step=3 * number) for number, row in enumerate(rows[::-1]))
            ),
            "over the edge": Script(tuple(over_the_edge)),
            "in chunks": Script(tuple(replace(row, chunk_tokens=5) for row in rows)),
        }
    )
