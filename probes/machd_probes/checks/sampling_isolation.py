"""A row's sampling is its own: parameters, seed and penalties reach no neighbour."""

from __future__ import annotations

from dataclasses import replace

from machd.request.generation import SamplingParams
from machd_probes.finding import Finding
from machd_probes.play import Join
from machd_probes.scripts import MIXED, Script
from machd_probes.subject import Subject

_COUNTING = (
    SamplingParams(temperature=0.0, frequency_penalty=-2.0),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0),
)
"""As strong as they may be, and opposite: a history that is another row's shows at once."""

_FINEST_FLOOR = 1e-3
"""In nats. With coarser rounding a draw may fall on the other side of an edge."""


def probe(subject: Subject) -> Finding:
    """Rows as different as parameters can be choose, together, what they choose alone.

    Some follow others in their slots, and count other tokens.
    """
    pairs = list(zip(subject.prompts, MIXED, strict=True))
    if subject.noise_floor > _FINEST_FLOOR:
        pairs = [pair for pair in pairs if pair[1].temperature == 0]
    rows = [Join(prompt, subject.extent.tokens, sampling) for prompt, sampling in pairs]
    counting = [
        Join(
            prompt,
            subject.extent.tokens,
            _COUNTING[number % 2],
            leaves_after=None if number % 3 else 3,
        )
        for number, prompt in enumerate(subject.prompts)
    ]
    return subject.found(
        {
            "slots taken again": Script(tuple(counting), slots=3),
            "joining in turn": Script(
                tuple(replace(row, at_step=number) for number, row in enumerate(rows))
            ),
        },
        is_forced=False,
    )
