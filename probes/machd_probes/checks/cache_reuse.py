"""What one prompt left in its caches serves another that begins alike."""

from __future__ import annotations

from machd_probes.finding import Finding
from machd_probes.passes import Passes, restored, snapshot
from machd_probes.subject import Subject

__all__ = ["probe"]


def probe(subject: Subject) -> Finding:
    """State taken out of a row's caches and put into two others': both go on as if it were theirs."""
    passes = Passes(subject.module)
    prefix, first, second = (subject.prompt(length, length) for length in (37, 9, 14))
    first_owner = passes.new_caches()
    passes.feed(prefix, first_owner)
    state = snapshot(first_owner)
    heard = [passes.continued(first, first_owner)]
    expected = []
    for suffix in (first, second):
        fresh = passes.new_caches()
        passes.feed(prefix, fresh)
        expected.append(passes.continued(suffix, fresh))
        reused = restored(passes.new_caches(), state)
        heard.append(passes.continued(suffix, reused))
    return subject.judged_passes(
        [(expected[0], heard[0]), (expected[0], heard[1]), (expected[1], heard[2])],
        "what was taken out of a cache and put into another goes on differently",
    )
