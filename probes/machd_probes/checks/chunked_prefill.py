"""A prompt may be computed in chunks."""

from __future__ import annotations

from machd.capabilities.evidence import Evidence, Outcome
from machd_probes.finding import Finding
from machd_probes.play import Join
from machd_probes.subject import Subject

__all__ = ["probe"]

_CHUNKS_TOKENS = (1, 3, 16)
_TOLERATED = {"float32": 5e-3}
"""In nats. Chunks change the order of sums; models with state in half precision feel it more."""

_TOLERATED_HALF = 0.5


def probe(subject: Subject) -> Finding:
    """The row alone, its prompt in chunks of one, three and sixteen tokens, against the whole."""
    prompt = max(subject.prompts, key=len)
    row = Join(prompt, subject.extent.tokens)
    differences = {
        chunk_tokens: subject.chunking_difference(row, chunk_tokens)
        for chunk_tokens in _CHUNKS_TOKENS
        if chunk_tokens < len(prompt)
    }
    worst = max(differences, key=lambda chunk_tokens: differences[chunk_tokens])
    evidence = Evidence(
        max_logprob_diff=differences[worst], noise_floor=subject.noise_floor, cases=len(differences)
    )
    allowed = _TOLERATED.get(subject.description.dtype, _TOLERATED_HALF)
    if differences[worst] <= allowed:
        return Finding(Outcome.PASSED, evidence=evidence)
    detail = (
        f"chunks of {worst} tokens change a log-probability by {differences[worst]:.2g} nats: the "
        "model's answer depends on how its prompt is cut"
    )
    return Finding(Outcome.FAILED, detail, evidence)
