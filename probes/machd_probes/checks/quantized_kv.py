"""Keys and values may be kept in 8 bits: what is served is what the model says of rounded ones.

How far 8 bits move an answer is no question here: a tiny model of random weights, whose logits are
thirty nats apart, exaggerates it, and real ones are measured elsewhere. The question is whether the
model reads our caches as it reads its own. So the reference are its own caches, filled with keys
and values that were encoded and decoded before.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from machd.capabilities.evidence import Outcome
from machd.engine.assembly import make_engine
from machd.engine.backend.untyped import Cache
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.kv_format import KvWidths
from machd.engine.kv.row_caches import format_of, innermost, make_row_caches
from machd.engine.loading.loader import LoadedModel
from machd_probes.finding import Finding, unsupported
from machd_probes.passes import Passes
from machd_probes.play import Join
from machd_probes.scripts import Script, scripts
from machd_probes.subject import Subject

_FORMAT = kv_format_named("affine8")
_MAX_ROWS = 16
_LONG_TOKENS = 250
"""Just below 256 positions, where caches are enlarged."""

_FLOOR = 4e-3
"""In nats. A number at the border of two steps is rounded up by one order of adding and down by
another, which was seen to move a log-probability by 0.017; eight floors are tolerated."""

_MAX_ERROR = 1.5 / 255
"""Of a number, in ranges of its vector: half a step, and one at the ends, with rounding."""


def probe(subject: Subject) -> Finding:
    """Rows alone in 8-bit caches, and together; a batch counts only where plain caches pass it."""
    caches = innermost(make_row_caches(subject.module, _FORMAT))
    if not any(format_of(cache) is _FORMAT for cache in caches):
        return unsupported("no cache is a standard one, so there is nothing to quantise")
    found = _alone(subject)
    script = _script(subject)
    plain = subject.found({"plain keys and values in a batch": script})
    if not found.outcome is plain.outcome is Outcome.PASSED:
        return found
    model = LoadedModel(subject.module, FakeTokenizer(), subject.description, kv_format=_FORMAT)
    engine = make_engine(model, max_rows=_MAX_ROWS)
    served = Subject(engine, subject.extent, watch=subject.watch)
    served.noise_floor = max(served.noise_floor, _FLOOR)
    return served.found({"8-bit keys and values in a batch": script})


def _alone(subject: Subject) -> Finding:
    """A prompt in two chunks and some tokens more, in caches of ours and in rounded ones."""
    passes = subject.passes(subject.module)
    chunks = subject.prompt(33, 33), subject.prompt(11, 11)
    suffix = subject.prompt(8, 8)
    ours, rounded = make_row_caches(subject.module, _FORMAT), _rounded_caches(passes)
    for caches in (ours, rounded):
        for chunk in chunks:
            passes.feed(chunk, caches)
    heard, expected = passes.continued(suffix, ours), passes.continued(suffix, rounded)
    found = subject.judged_passes(
        [(expected, heard)], "the model reads 8-bit caches otherwise than its own"
    )
    error = max(cache.error for cache in innermost(rounded) if isinstance(cache, _RoundedCache))
    if error > _MAX_ERROR:
        detail = f"keys and values are off by {error:.2g} of their range in 8 bits"
        return replace(found, outcome=Outcome.FAILED, detail=detail)
    return found


def _script(subject: Subject) -> Script:
    """Rows that join and leave, one prompt in pieces, and one that makes the caches grow."""
    extent = subject.extent
    every = scripts(subject.prompts, extent.tokens)
    rows = (*every["early leaves"].joins, *every["chunked prefill"].joins)
    if extent.has_long_row:
        rows = (*rows, Join(subject.prompt(_LONG_TOKENS, 99), extent.tokens, at_step=3))
    return Script(rows)


def _rounded_caches(passes: Passes) -> list[Cache]:
    return [_rounded(cache) for cache in passes.new_caches()]


def _rounded(cache: Cache) -> Cache:
    if type(cache) is CacheList:
        return CacheList(*(_rounded(inner) for inner in cache.caches))
    return _RoundedCache() if type(cache) is KVCache else cache


class _RoundedCache(KVCache):  # type: ignore[misc]
    """mlx-lm's own, of keys and values that were encoded and decoded.

    Attributes:
        error: The largest of a number, in ranges of its vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = 0.0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Round, then do as mlx-lm does."""
        widths = KvWidths.of(keys, values)
        decoded = _FORMAT.decode(_FORMAT.encode(keys, values), widths)
        for exact, near in zip((keys, values), decoded, strict=True):
            if exact.size:
                span = exact.max(axis=-1) - exact.min(axis=-1)
                errors = mx.abs(exact - near).max(axis=-1) / mx.maximum(span, 1e-6)
                self.error = max(self.error, float(errors.max()))
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(*decoded)
        return fetched
