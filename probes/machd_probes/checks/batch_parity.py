"""Rows of a batch say what they say alone, whatever rows join and leave."""

from __future__ import annotations

from machd_probes.finding import Finding
from machd_probes.play import Join
from machd_probes.scripts import Script, scripts
from machd_probes.subject import Subject

_LONG_TOKENS = 250
"""Just below 256 positions, where caches are enlarged."""


def probe(subject: Subject) -> Finding:
    """Unequal lengths together and staggered, leaves early and late, down to one row and up again.

    Which of the scripts, the extent says: tiny models play more of them than a loaded one.
    """
    extent = subject.extent
    every = scripts(subject.prompts, extent.tokens)
    chosen = {name: every[name] for name in extent.scripts}
    if extent.has_long_row:
        rows = [Join(prompt, extent.tokens) for prompt in subject.prompts[1:4]]
        long_row = Join(subject.prompt(_LONG_TOKENS, 99), extent.tokens, at_step=3)
        chosen["across an enlargement"] = Script((*rows, long_row))
    return subject.found(chosen)
