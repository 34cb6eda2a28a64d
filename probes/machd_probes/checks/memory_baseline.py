"""Rows that have left hold no memory."""

from __future__ import annotations

import gc

from machd.capabilities.evidence import Evidence, Outcome
from machd_probes.finding import Finding
from machd_probes.play import Join
from machd_probes.scripts import Script
from machd_probes.subject import Subject

_ROUNDS = 3
_TOKENS = 3
_SLACK_BYTES = 1 << 16
"""For what an engine keeps of its last step, such as masks and token ids."""


def probe(subject: Subject) -> Finding:
    """The same rows again and again: each time they leave, memory is back to where it was."""
    rows = [Join(prompt, _TOKENS) for prompt in subject.prompts]
    held_bytes: list[int] = []
    for _ in range(_ROUNDS):
        Script(tuple(rows)).play(subject.engine)
        gc.collect()  # other models' arrays, freed meanwhile, would hide what these rows leave
        reading = subject.engine.memory()
        if reading.kv_used_bytes:
            detail = f"{reading.kv_used_bytes} bytes of KV are held when all rows have left"
            return Finding(Outcome.FAILED, detail)
        held_bytes.append(reading.active_bytes)
    grown_bytes = held_bytes[-1] - held_bytes[0]
    if grown_bytes > _SLACK_BYTES:
        detail = f"{grown_bytes} bytes more are held after every {_ROUNDS - 1} batches"
        return Finding(Outcome.FAILED, detail)
    return Finding(Outcome.PASSED, evidence=Evidence(0, 0.0, 0.0, cases=_ROUNDS * len(rows)))
