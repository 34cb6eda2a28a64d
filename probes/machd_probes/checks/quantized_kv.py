"""Keys and values in 8 bits give the answer that the model gives for rounded keys and values.

The check does not judge how far 8 bits move an answer: a tiny model of random weights, whose logits
are thirty nats apart, exaggerates it, and real models are measured elsewhere. It compares machd's
caches with the model's own, filled with keys and values that were encoded and decoded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache

from machd.capabilities.evidence import Outcome
from machd.engine.assembly import make_engine
from machd.engine.backend.untyped import Cache
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.kv_format import KvWidths
from machd.engine.kv.quantized_cache import format_of
from machd.engine.kv.row_caches import innermost, make_row_caches
from machd.engine.loading.loader import LoadedModel
from machd_probes.finding import Finding, unsupported
from machd_probes.passes import Logprobs, Passes, compared_passes
from machd_probes.play import Join
from machd_probes.scripts import Script, scripts
from machd_probes.subject import COARSEST_FLOOR, Subject, is_equal

_FORMAT = kv_format_named("affine8")
_MAX_ROWS = 16
_LONG_TOKENS = 250
"""Just below 256 positions, where caches are enlarged."""

_FLOOR = 4e-3
"""In nats, at least. A number at the border of two steps is rounded up by one order of adding and
down by another, which moved a log-probability of openelm by 0.022; eight floors are tolerated."""

_CHUNK_SIZES = (1, 3, 4, 8, 13)
"""Tokens. A BLAS adds in other orders for one row, for a few rows, and for each of its tile heights."""

_FLOOR_SHARE = 1 / 4
"""The share of the format's floor that counts: a difference of the format is a whole step of a number
already, and a batch may round two numbers otherwise, so two are tolerated and not eight."""

_MAX_ERROR = 1.5 / 255
"""Of a number, in ranges of its vector: half a step, and one at the ends, with rounding of float32."""

_ROUNDINGS = 3
"""Of a number in its dtype: scale, offset and their sum. In bfloat16 they are more than a step of 8 bits."""


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
    script_by_name = {"8-bit keys and values in a batch": script}
    found = served.found(script_by_name)
    if is_equal(found.evidence):
        return found
    # Measured only where it decides: it takes several times as long, and a floor only grows.
    served.noise_floor = max(served.noise_floor, _format_floor(subject, served, script))
    return served.found(script_by_name)


def _format_floor(subject: Subject, served: Subject, script: Script) -> float:
    """Measure the noise floor in the format itself, in nats: rows alone, cut in other ways.

    A number at the border of two steps may be rounded up in one cut and down in another, as in a
    batch. Rounding all numbers changes more than rounding a few of them otherwise, so a difference
    beyond that of the format is no rounding and is left out.
    """
    passes = subject.passes(subject.module)
    floors = [0.0]
    for prompt in {row.prompt: None for row in script.joins}:
        said = served.alone(Join(prompt, subject.extent.tokens))
        token_ids = (*prompt, *(token.token_id for token in said))
        whole = passes.feed(token_ids, make_row_caches(subject.module, _FORMAT))
        limit = min(COARSEST_FLOOR, _apart(whole, passes.feed(token_ids, passes.new_caches())))
        cuts = (_in_chunks(subject, token_ids, size) for size in _CHUNK_SIZES)
        floors += [one for one in (_apart(whole, cut) for cut in cuts) if one < limit]
    return max(floors) * _FLOOR_SHARE


def _in_chunks(subject: Subject, token_ids: Sequence[int], chunk_tokens: int) -> Logprobs:
    passes = subject.passes(subject.module)
    caches = make_row_caches(subject.module, _FORMAT)
    starts = range(0, len(token_ids), chunk_tokens)
    return np.concatenate(
        [passes.feed(token_ids[start : start + chunk_tokens], caches) for start in starts]
    )


def _apart(one: Logprobs, other: Logprobs) -> float:
    return compared_passes(one, other, noise_floor=0.0, slack=0.0).max_logprob_diff


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


def _error(exact: mx.array, near: mx.array) -> float:
    """Return the largest error beyond the dtype's own rounding, in ranges of its vector."""
    rounding = mx.finfo(exact.dtype).eps / 2
    exact, near = exact.astype(mx.float32), near.astype(mx.float32)
    span = exact.max(axis=-1) - exact.min(axis=-1)
    beyond = mx.abs(exact - near) - _ROUNDINGS * rounding * mx.abs(exact).max(
        axis=-1, keepdims=True
    )
    return float((beyond.max(axis=-1) / mx.maximum(span, 1e-6)).max())


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
                self.error = max(self.error, _error(exact, near))
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(*decoded)
        return fetched
