"""A row can be restored to an earlier position from the states it had there."""

from __future__ import annotations

from machd_probes.finding import Finding
from machd_probes.passes import restored, snapshot
from machd_probes.subject import Subject


def probe(subject: Subject) -> Finding:
    """Go on with other tokens, restore, and go on with the right ones, below and above a window."""
    passes = subject.passes(subject.module)
    pairs = []
    for length in (6, 41):
        prefix, astray, suffix = (subject.prompt(one, one) for one in (length, 11, 8))
        fresh = passes.new_caches()
        passes.feed(prefix[:-2], fresh)
        passes.continued(prefix[-2:], fresh)
        expected = passes.continued(suffix, fresh)
        caches = passes.new_caches()
        # Up to where a rotating cache writes in place: shared arrays would be overwritten.
        passes.feed(prefix[:-2], caches)
        passes.continued(prefix[-2:], caches)
        state = snapshot(caches)
        passes.continued(astray, caches)
        pairs.append((expected, passes.continued(suffix, restored(caches, state))))
    return subject.judged_passes(pairs, "a restored state goes on differently")
