"""A row alone in machd says what mlx-lm's own model says: what others are compared with is right."""

from __future__ import annotations

from machd_probes.finding import Finding
from machd_probes.passes import rounding_floor
from machd_probes.play import Join
from machd_probes.subject import Subject

_LENGTHS = (1, 5, 18, 44)


def probe(subject: Subject) -> Finding:
    """Completions in the engine against the plain model's, which says the same tokens."""
    prompts = [prompt for prompt in subject.prompts if len(prompt) in _LENGTHS]
    pairs = [subject.beside_plain(Join(prompt, subject.extent.tokens)) for prompt in prompts]
    wrong = "a row alone says something else than mlx-lm's own model"
    floor = max(subject.noise_floor, rounding_floor(expected for expected, _ in pairs))
    return subject.judged_passes(pairs, wrong, floor)
