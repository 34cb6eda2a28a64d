"""Each row of a batch counts its own positions."""

from __future__ import annotations

from dataclasses import replace

from machd_probes.comparison import largest_difference, tolerated
from machd_probes.finding import Finding, no_data
from machd_probes.play import Join
from machd_probes.scripts import Script
from machd_probes.subject import Subject

_LENGTHS = (3, 9, 26, 90)


def probe(subject: Subject) -> Finding:
    """Ends of one text, so that the same tokens come at other positions of each row.

    Nothing follows where a model says the same whatever came before them.
    """
    tokens = min(subject.extent.tokens, 6)
    text = subject.prompt(max(_LENGTHS), 5)
    rows = [Join(text[-length:], tokens) for length in _LENGTHS]
    alone = [subject.alone(row) for row in rows]
    differs = max(largest_difference(alone[0][:1], other[:1]) for other in alone[1:])
    if differs <= tolerated(subject.noise_floor):
        return no_data("the model says the same whatever came before")
    return subject.found(
        {
            "together": Script(tuple(rows)),
            "one after the other": Script(
                tuple(replace(row, at_step=2 * number) for number, row in enumerate(rows[::-1]))
            ),
        }
    )
