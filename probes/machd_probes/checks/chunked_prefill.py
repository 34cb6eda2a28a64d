"""A prompt may be computed in chunks."""

from __future__ import annotations

from machd.capabilities.evidence import Evidence, Outcome
from machd_probes.finding import Finding
from machd_probes.play import Join
from machd_probes.subject import Subject

_CUTS = ((7, 1), (18, 4), (44, 16))
"""Tokens of a prompt, and of its chunks."""

_TOLERATED = {"float32": 5e-3}
"""In nats. Chunks change the order of sums; models with state in half precision feel it more."""

_TOLERATED_HALF = 0.5


def probe(subject: Subject) -> Finding:
    """The row alone, its prompt in chunks of one, four and sixteen tokens, against the whole."""
    rows = {len(prompt): Join(prompt, subject.extent.tokens) for prompt in subject.prompts}
    differences = {
        chunk_tokens: subject.chunking_difference(rows[length], chunk_tokens)
        for length, chunk_tokens in _CUTS
    }
    worst = max(differences, key=lambda chunk_tokens: differences[chunk_tokens])
    evidence = Evidence(
        token_mismatches=0,
        max_logprob_diff=differences[worst],
        noise_floor=subject.noise_floor,
        cases=len(differences),
    )
    allowed = _TOLERATED.get(subject.description.dtype, _TOLERATED_HALF)
    if differences[worst] <= allowed:
        return Finding(Outcome.PASSED, evidence=evidence)
    detail = (
        f"chunks of {worst} tokens change a log-probability by {differences[worst]:.2g} nats: the "
        "model's answer depends on how its prompt is cut"
    )
    return Finding(Outcome.FAILED, detail, evidence)
