"""A row alone in machd says what mlx-lm's own model says: what others are compared with is right."""

from __future__ import annotations

import numpy as np

from machd.engine.protocol.step import SampledToken
from machd_probes.finding import Finding
from machd_probes.passes import Logprobs, rounding_floor
from machd_probes.play import Join
from machd_probes.subject import Subject

_LENGTHS = (1, 5, 18, 44)


def probe(subject: Subject) -> Finding:
    """Completions in the engine against the plain model's, which says the same tokens."""
    passes = subject.passes(subject.plain)
    pairs = []
    for prompt in (one for one in subject.prompts if len(one) in _LENGTHS):
        said = subject.alone(Join(prompt, subject.extent.tokens))
        caches = passes.new_caches()
        if len(prompt) > 1:
            passes.feed(prompt[:-1], caches)
        fed = (prompt[-1], *(token.token_id for token in said[:-1]))
        expected = passes.continued(fed, caches)
        pairs.append((expected, _heard(said, expected)))
    wrong = "a row alone says something else than mlx-lm's own model"
    floor = max(subject.noise_floor, rounding_floor(expected for expected, _ in pairs))
    return subject.judged_passes(pairs, wrong, floor)


def _heard(said: list[SampledToken], expected: Logprobs) -> Logprobs:
    """Take the row's log-probabilities of its likeliest tokens, and the expected ones of all others."""
    heard = expected.copy()
    for position, token in enumerate(said):
        for top in token.top_logprobs:
            heard[position, top.token_id] = top.logprob
    return np.asarray(heard)
