"""A prompt that was cancelled while it was computed is gone on with, and its answer is the one of a prompt computed at once.

On the tiny models, one for each kind of cache, through the scheduler. The bits are the same where both were cut into the
same chunks: sums over another number of rows round otherwise in some kinds' layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.engines.block_rows import ASKED
from support.engines.parity import differences
from support.engines.tiny_models import EVERY_RUN, TinyKind, each_kind_and_look_ahead
from support.every_run import sampled
from support.schedulers.tiny_serving import CHUNK_TOKENS, TOKENS, TinyServing, row_alone

from machd.scheduler.events import CacheReason
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.sequence import Sequence
from machd_probes.scripts import random_prompt

_PROMPT = random_prompt(93, 5)
_OTHER = random_prompt(31, 2)
_FORMATS = ("none", "affine8", "affine4", "turboquant")


@cache
def _undisturbed(kind: TinyKind, kv_format: str, *, batched: bool) -> list[tuple[object, ...]]:
    serving = TinyServing(kind, kv_format, batched=batched)
    serving.submit("at once", _PROMPT)
    serving.finish()
    said = serving.said("at once")
    assert len(said) == TOKENS
    return said


_EACH_MODE = pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])


_CASES = [
    (kind, kv_format, batched)
    for kind in TinyKind
    for kv_format in (_FORMATS if kind is TinyKind.STANDARD else _FORMATS[:2])
    for batched in (False, True)
]


@pytest.mark.parametrize(
    ("kind", "kv_format", "batched"),
    # Both modes with plain numbers; formats on the plain cache and in the model that has all others.
    sampled(
        _CASES,
        [
            (kind, kv_format, batched)
            for kind, kv_format, batched in _CASES
            if kind in EVERY_RUN
            and (kv_format == "none" or (batched and kind is not TinyKind.HYBRID_GDN))
        ],
    ),
)
def test_a_cancelled_prompt_is_gone_on_with_where_it_was(
    kind: TinyKind, kv_format: str, *, batched: bool
) -> None:
    """After each of its chunks: the same request begins behind all that was computed, and has the bits of an undisturbed one."""
    for chunks in range(1, 5):
        serving = TinyServing(kind, kv_format, batched=batched)
        serving.submit("cancelled", _PROMPT)
        serving.step(chunks)
        serving.cancel("cancelled")
        serving.submit("again", _PROMPT)
        serving.finish()
        told = serving.looked_up("again")
        assert told.cached_tokens == told.parted_at_tokens == chunks * CHUNK_TOKENS
        assert told.reason is told.client_reason is CacheReason.CONTINUED
        assert serving.said("again") == _undisturbed(kind, kv_format, batched=batched), chunks
        assert serving.engine.memory().kv_used_bytes == 0


@each_kind_and_look_ahead()
def test_a_prompt_cancelled_beside_others_is_gone_on_with(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """One row decodes, and a prompt with a common beginning waits: that one goes on where the cancelled one was."""
    serving = TinyServing(kind, "none", batched=True, looks_ahead=looks_ahead)
    serving.submit("decoding", _OTHER)
    serving.step(3)
    serving.submit("cancelled", _PROMPT)
    serving.submit("follower", (*_PROMPT[:-5], *_OTHER[:9]))
    serving.step(2)
    serving.cancel("cancelled")
    serving.submit("again", _PROMPT)
    serving.finish()
    assert serving.looked_up("follower").cached_tokens == 2 * CHUNK_TOKENS
    assert serving.looked_up("again").cached_tokens >= 2 * CHUNK_TOKENS
    for name, prompt in (
        ("decoding", _OTHER),
        ("follower", (*_PROMPT[:-5], *_OTHER[:9])),
        ("again", _PROMPT),
    ):
        assert differences(row_alone(kind, prompt), serving.tokens(name), ASKED) == [], name


@_EACH_MODE
def test_coalesced_requests_go_on_when_one_is_cancelled(*, batched: bool) -> None:
    """An identical request that waits for the same prompt gets its answer; nothing is computed anew."""
    serving = TinyServing(TinyKind.STANDARD, "none", batched=batched)
    serving.submit("first", _PROMPT)
    serving.step(2)
    serving.submit("second", _PROMPT)
    serving.step()
    serving.cancel("first")
    serving.finish()
    cached_tokens = 0 if batched else 3 * CHUNK_TOKENS  # one at a time, identical requests wait
    assert serving.looked_up("second").cached_tokens == cached_tokens
    assert serving.said("second") == _undisturbed(TinyKind.STANDARD, "none", batched=batched)


def _keep_nothing(patch: pytest.MonkeyPatch) -> None:
    leave = PrefixCache.leave

    def dropping(prefixes: PrefixCache, sequence: Sequence, *, keeps: bool) -> None:
        leave(prefixes, sequence, keeps=keeps and sequence.is_prefilled)

    patch.setattr(PrefixCache, "leave", dropping)


def _end_a_token_early(patch: pytest.MonkeyPatch) -> None:
    computed: Callable[[Sequence], int] = vars(Sequence)["computed_tokens"].fget
    more = property(lambda one: computed(one) - (not one.is_prefilled))
    patch.setattr(Sequence, "computed_tokens", more)


@pytest.mark.parametrize("plant", [_keep_nothing, _end_a_token_early])
@pytest.mark.parametrize("kind", [TinyKind.STANDARD, TinyKind.HYBRID])
def test_a_prompt_that_is_dropped_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], kind: TinyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test fails where a cancelled prompt's last blocks are dropped, or end a token early."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_cancelled_prompt_is_gone_on_with_where_it_was(kind, "none", batched=True)
