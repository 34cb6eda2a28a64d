"""The caches of one prompt serve another prompt that begins alike."""

from __future__ import annotations

import numpy as np

from machd_probes.finding import Finding
from machd_probes.passes import restored, snapshot
from machd_probes.subject import Subject


def probe(subject: Subject) -> Finding:
    """A row's state put into two others' caches: all three go on as if it were theirs alone.

    They go on in turn, so that arrays that two of them share are overwritten before they are read.
    """
    passes = subject.passes(subject.module)
    prefix = subject.prompt(37, 37)
    texts = [subject.prompt(10, seed) for seed in (9, 9, 14)]
    owner = passes.new_caches()
    passes.feed(prefix, owner)
    state = snapshot(owner)
    rows = [owner, *(restored(passes.new_caches(), state) for _ in texts[1:])]
    heard = [
        [passes.continued(text[turn], row) for text, row in zip(texts, rows, strict=True)]
        for turn in (slice(0, 5), slice(5, 10))
    ]
    pairs = []
    for text, *parts in zip(texts, *heard, strict=True):
        fresh = passes.new_caches()
        passes.feed(prefix, fresh)
        pairs.append((passes.continued(text, fresh), np.concatenate(parts)))
    return subject.judged_passes(
        pairs, "what was taken out of a cache and put into another goes on differently"
    )
