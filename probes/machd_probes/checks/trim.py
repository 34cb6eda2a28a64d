"""A row's caches can be cut back by some tokens, as after rejected drafts."""

from __future__ import annotations

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from machd_probes.finding import Finding, unsupported
from machd_probes.subject import Subject

_DRAFT_TOKENS = 3


def probe(subject: Subject) -> Finding:
    """Feed draft tokens, cut them off, and go on with the right tokens."""
    passes = subject.passes(subject.module)
    if not can_trim_prompt_cache(passes.new_caches()):
        return unsupported("the caches cannot be cut back")
    pairs = []
    for length in (4, 33):
        prefix, suffix = subject.prompt(length, length), subject.prompt(8, 8)
        fresh = passes.new_caches()
        passes.feed(prefix, fresh)
        expected = passes.continued(suffix, fresh)
        caches = passes.new_caches()
        passes.feed(prefix, caches)
        passes.feed(subject.prompt(_DRAFT_TOKENS, 50), caches)
        if not can_trim_prompt_cache(caches):
            return unsupported("the caches cannot be cut back once their window is full")
        trim_prompt_cache(caches, _DRAFT_TOKENS)
        pairs.append((expected, passes.continued(suffix, caches)))
    return subject.judged_passes(pairs, "after a draft was cut off, the row goes on differently")
