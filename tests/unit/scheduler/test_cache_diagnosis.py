"""A lookup in the prefix cache names the true cause of what it did not find."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import pytest
from support.engines.fake_blocks import BYTES_PER_STATE, BYTES_PER_TOKEN, FakeDisk
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import LIMITS, batching_of, only, run_step

from machd.engine.protocol.media import FIRST_MEDIA_KEY
from machd.engine.protocol.step import SampledToken
from machd.errors import EngineFaultError
from machd.request.adapter import Adapter, adapter_namespace
from machd.request.generation import SamplingParams
from machd.scheduler import seen_prefixes
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    CacheDiagnosis,
    CacheReason,
    Event,
    OutputGenerated,
    PromptLookedUp,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.seen_prefixes import SeenPrefixes
from machd.scheduler.subscriber import SequenceRequest

_BLOCK_TOKENS = 4
_MIN_GAIN_TOKENS = 2
_PLENTY = PrefixLimits(100_000)

Text = tuple[int, ...]

SYSTEM: Text = tuple(range(1, 21))
"""Twenty tokens: five blocks."""

USER: Text = tuple(range(31, 41))
OTHER: Text = tuple(range(51, 61))
IMAGE: Text = tuple(FIRST_MEDIA_KEY + one for one in range(6))
OTHER_IMAGE: Text = tuple(FIRST_MEDIA_KEY + one for one in range(100, 106))
PIRATE, BUTLER = Adapter(b"pirate"), Adapter(b"butler")


class Cache:
    """A scheduler with a prefix cache and a fake engine."""

    def __init__(
        self,
        *,
        limits: PrefixLimits = _PLENTY,
        is_stateful: bool = False,
        disk: FakeDisk | None = None,
    ) -> None:
        """Start empty but for what is on ``disk``."""
        self.engine = FakeEngine(is_stateful=is_stateful, disk=disk)
        costs = BlockCosts(BYTES_PER_TOKEN, BYTES_PER_STATE if is_stateful else 0, 0, 0)
        shape = PrefixConfig(b"fake", _BLOCK_TOKENS, costs, min_gain_tokens=_MIN_GAIN_TOKENS)
        self.prefixes = PrefixCache(shape, limits, self.engine.saved_blocks())
        config = continuous(LIMITS, batching_of(coalesce=True))
        self.scheduler = Scheduler(config, self.prefixes, self.engine.adapters)
        self.events: list[Event] = []
        self._asked = 0

    def submit(
        self,
        prompt: Text,
        *,
        namespace: str = "one",
        adapters: tuple[Adapter, ...] = (),
        max_tokens: int = 1,
        sampling: SamplingParams | None = None,
    ) -> str:
        """Submit a prompt; returns its sequence's id."""
        self._asked += 1
        name = f"s{self._asked}"
        sampling = replace(sampling or SamplingParams(temperature=0.0), adapters=adapters)
        request = SequenceRequest(
            name,
            name,
            prompt,
            sampling,
            max_tokens,
            frozenset(),
            0.0,
            cache_namespace=adapter_namespace(adapters) + namespace,
        )
        self.events += self.scheduler.submit((request,), 0.0)
        return name

    def step(self) -> None:
        """Run one step."""
        self.events += run_step(self.scheduler, self.engine, 0.0)

    def finish(self) -> None:
        """Run steps until nothing is left to compute and to store."""
        while self.scheduler.running_count + self.scheduler.waiting_count or self.prefixes.changes:
            self.step()

    def ask(
        self,
        prompt: Text,
        *,
        namespace: str = "one",
        adapters: tuple[Adapter, ...] = (),
        max_tokens: int = 1,
        sampling: SamplingParams | None = None,
    ) -> CacheDiagnosis:
        """Have a prompt answered alone; returns its diagnosis."""
        name = self.submit(
            prompt, namespace=namespace, adapters=adapters, max_tokens=max_tokens, sampling=sampling
        )
        self.finish()
        return self.diagnosis(name)

    def diagnosis(self, name: str) -> CacheDiagnosis:
        """Return what was told of a sequence, once."""
        (told,) = [one for one in only(PromptLookedUp, self.events) if one.sequence_id == name]
        return told.diagnosis

    def answer(self, name: str) -> Text:
        """Return the tokens of a sequence."""
        return tuple(
            one.output.token_id
            for one in only(OutputGenerated, self.events)
            if one.sequence_id == name and isinstance(one.output, SampledToken)
        )

    def shrink(self, max_bytes: int = 0) -> None:
        """Evict down to so many bytes, and give the room back."""
        self.prefixes.set_limits(PrefixLimits(max_bytes))
        self.finish()
        self.prefixes.set_limits(_PLENTY)


@dataclass(frozen=True)
class Planted:
    """A prompt that was asked before, something that happens, and another prompt.

    Attributes:
        before: Prompts that are computed first.
        prompt: The prompt to diagnose.
        parted_at_tokens: Its tokens in common with a kept text.
        client_reason: Where a client is told another reason.
    """

    name: str
    before: Items[Text]
    prompt: Text
    reason: CacheReason
    parted_at_tokens: int
    happens: Callable[[Cache], object] = lambda _cache: None
    is_stateful: bool = False
    namespace: str = "one"
    adapters: tuple[Adapter, ...] = ()
    sampling: SamplingParams | None = None
    client_reason: CacheReason | None = None


def _changed(text: Text, at: int) -> Text:
    return (*text[:at], 200, *text[at + 1 :])


def _evict_and_ask_another(cache: Cache) -> None:
    cache.shrink()
    cache.ask((*SYSTEM, *OTHER))


def _fail(cache: Cache) -> None:
    cache.events += cache.scheduler.fail(EngineFaultError("planted"), 0.0)


_TEXT = (*SYSTEM, *USER)
_PLANTED = [
    Planted("nothing_was_asked", [], _TEXT, CacheReason.FIRST_SEEN, 0),
    Planted("another_text_was_asked", [OTHER], _TEXT, CacheReason.FIRST_SEEN, 0),
    Planted("first_token_changed", [_TEXT], _changed(_TEXT, 0), CacheReason.FIRST_SEEN, 0),
    Planted("second_token_changed", [_TEXT], _changed(_TEXT, 1), CacheReason.DIVERGED, 1),
    Planted("billing_token_in_a_block", [_TEXT], _changed(_TEXT, 6), CacheReason.DIVERGED, 6),
    Planted("date_at_a_block_end", [_TEXT], _changed(_TEXT, 8), CacheReason.DIVERGED, 8),
    Planted("tools_in_another_order", [_TEXT], (*SYSTEM[:10], *SYSTEM[15:], *SYSTEM[10:15], *USER), CacheReason.DIVERGED, 10),
    Planted("message_was_edited", [(*_TEXT, *OTHER)], (*_TEXT[:25], *OTHER), CacheReason.DIVERGED, 25),
    Planted("message_was_inserted", [_TEXT], (*SYSTEM, *OTHER, *USER), CacheReason.DIVERGED, 20),
    Planted("middle_was_compacted", [(*_TEXT, *OTHER, *USER)], (*SYSTEM, *OTHER), CacheReason.DIVERGED, 20),
    Planted("another_conversation_with_the_same_system", [_TEXT], (*SYSTEM, *OTHER), CacheReason.DIVERGED, 20),
    Planted("two_texts_part_elsewhere", [_TEXT, (*SYSTEM[:7], *OTHER)], _changed(_TEXT, 15), CacheReason.DIVERGED, 15),
    Planted("the_same_again", [_TEXT], _TEXT, CacheReason.WHOLE, len(_TEXT) - 1),
    Planted("a_beginning_of_it", [_TEXT], _TEXT[:14], CacheReason.WHOLE, 13),
    Planted("the_next_turn", [_TEXT], (*_TEXT, *OTHER), CacheReason.CONTINUED, len(_TEXT)),
    Planted("the_next_turn_in_a_block", [SYSTEM[:14]], _TEXT, CacheReason.CONTINUED, 14),
    Planted("all_was_evicted", [_TEXT], _TEXT, CacheReason.EVICTED, 0, happens=Cache.shrink),
    Planted("all_of_a_short_text_was_evicted", [(1, 2, 3)], (1, 2, 3), CacheReason.EVICTED, 0, happens=Cache.shrink),
    Planted("its_end_was_evicted", [_TEXT], _TEXT, CacheReason.EVICTED, 16, happens=lambda cache: cache.shrink(16 * BYTES_PER_TOKEN)),
    Planted("its_end_was_evicted_and_it_goes_on", [_TEXT], (*_TEXT, *OTHER), CacheReason.EVICTED, 12, happens=lambda cache: cache.shrink(12 * BYTES_PER_TOKEN)),
    Planted("evicted_beside_a_text_that_goes_on", [_TEXT], _TEXT, CacheReason.EVICTED, 20, happens=_evict_and_ask_another),
    Planted("memory_was_cleared", [_TEXT], _TEXT, CacheReason.EVICTED, 0, happens=lambda cache: cache.scheduler.clear_prefixes(is_disk_included=False)),
    Planted("blocks_were_lost_in_a_fault", [_TEXT], _TEXT, CacheReason.EVICTED, 0, happens=_fail),
    Planted("evicted_and_changed_before", [_TEXT], _changed(_TEXT, 2), CacheReason.FIRST_SEEN, 0, happens=Cache.shrink),
    Planted("another_key_asked_it", [_TEXT], _TEXT, CacheReason.OTHER_NAMESPACE, 0, namespace="two", client_reason=CacheReason.FIRST_SEEN),
    Planted("another_key_went_on", [_TEXT], _TEXT, CacheReason.OTHER_NAMESPACE, 13, namespace="two", happens=lambda cache: cache.ask(SYSTEM[:13], namespace="two"), client_reason=CacheReason.CONTINUED),
    Planted("another_key_asked_another_text", [OTHER], _TEXT, CacheReason.FIRST_SEEN, 0, namespace="two"),
    Planted("without_the_adapter", [_TEXT], _TEXT, CacheReason.ADAPTER, 0, adapters=(PIRATE,)),
    Planted("with_another_adapter", [], _TEXT, CacheReason.ADAPTER, 0, adapters=(BUTLER,), happens=lambda cache: cache.ask(_TEXT, adapters=(PIRATE,))),
    Planted("another_key_with_an_adapter", [], _TEXT, CacheReason.OTHER_NAMESPACE, 0, adapters=(BUTLER,), namespace="two", happens=lambda cache: cache.ask(_TEXT, adapters=(PIRATE,)), client_reason=CacheReason.FIRST_SEEN),
    Planted("another_scale_of_the_adapter", [], _TEXT, CacheReason.ADAPTER, 0, adapters=(replace(PIRATE, scale=0.5),), happens=lambda cache: cache.ask(_TEXT, adapters=(PIRATE,))),
    Planted("another_image", [(*SYSTEM, *IMAGE, *USER)], (*SYSTEM, *OTHER_IMAGE, *USER), CacheReason.IMAGE_CHANGED, 20),
    Planted("an_image_in_place_of_text", [(*SYSTEM, *USER)], (*SYSTEM, *IMAGE, *USER), CacheReason.DIVERGED, 20),
    Planted("text_in_place_of_an_image", [(*SYSTEM, *IMAGE, *USER)], (*SYSTEM, *USER), CacheReason.DIVERGED, 20),
    Planted("text_behind_an_image", [(*SYSTEM, *IMAGE, *USER)], (*SYSTEM, *IMAGE, *OTHER), CacheReason.DIVERGED, 26),
    Planted("state_in_the_middle", [_TEXT], (*_TEXT[:27], 200), CacheReason.KIND_CANNOT, 27, is_stateful=True),
    Planted("state_and_an_early_change", [_TEXT], _changed(_TEXT, 3), CacheReason.DIVERGED, 3, is_stateful=True),
    Planted("state_and_the_next_turn", [_TEXT], (*_TEXT, *OTHER), CacheReason.CONTINUED, len(_TEXT), is_stateful=True),
    Planted("state_was_evicted", [_TEXT], _TEXT, CacheReason.EVICTED, 0, is_stateful=True, happens=Cache.shrink),
    Planted("log_probabilities_of_the_prompt", [_TEXT], _TEXT, CacheReason.PROMPT_LOGPROBS, 0, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1)),
]  # fmt: skip


@pytest.mark.parametrize("planted", _PLANTED, ids=lambda one: one.name)
def test_a_planted_divergence_has_its_true_cause(planted: Planted) -> None:
    """The reason, and where the prompt parts from kept texts, are those that were planted."""
    cache = Cache(is_stateful=planted.is_stateful)
    for text in planted.before:
        cache.ask(text)
    planted.happens(cache)

    told = cache.ask(
        planted.prompt,
        namespace=planted.namespace,
        adapters=planted.adapters,
        sampling=planted.sampling,
    )

    assert (told.reason, told.parted_at_tokens) == (planted.reason, planted.parted_at_tokens)
    assert told.client_reason is (planted.client_reason or planted.reason)


def test_a_cache_with_state_begins_at_a_branch_point_that_it_has_met() -> None:
    """The second text with a common prefix is computed whole, because its kind cannot begin there; the third begins there."""
    cache = Cache(is_stateful=True)
    texts = [(*_TEXT[:27], *range(one, one + 4)) for one in (200, 210)]
    cache.ask(_TEXT)
    second, third = (cache.ask(text) for text in texts)
    assert (second.reason, second.cached_tokens) == (CacheReason.KIND_CANNOT, 0)
    assert (third.reason, third.cached_tokens) == (CacheReason.DIVERGED, 27)


def test_the_turn_behind_an_answer_continues_it() -> None:
    """An answer that was evicted is part of what is missed."""
    cache = Cache()
    name = cache.submit(_TEXT, max_tokens=8)
    cache.finish()
    turn = (*_TEXT, *cache.answer(name), *OTHER)
    assert cache.ask(turn).reason is CacheReason.CONTINUED
    cache.shrink(len(_TEXT) * BYTES_PER_TOKEN)
    assert cache.ask(turn).reason is CacheReason.EVICTED


def test_a_prompt_on_disk_is_found_by_the_next_daemon_and_missed_if_damaged() -> None:
    """What was saved is whole; what cannot be read was lost."""
    limits = PrefixLimits(100_000, disk_bytes=100_000)
    disk: FakeDisk = {}
    Cache(limits=limits, disk=disk).ask(_TEXT)
    cache = Cache(limits=limits, disk=disk)
    assert cache.ask(_TEXT).reason is CacheReason.WHOLE
    cache = Cache(limits=limits, disk=disk)
    disk.clear()
    told = cache.ask(_TEXT)
    assert (told.reason, told.cached_tokens) == (CacheReason.EVICTED, 0)


def test_a_row_behind_its_leader_finds_what_that_computes() -> None:
    """The first of two prompts computes what the second one finds."""
    cache = Cache()
    first, second = cache.submit(_TEXT), cache.submit((*_TEXT[:-1], 99))
    cache.finish()
    assert cache.diagnosis(first).reason is CacheReason.FIRST_SEEN
    assert cache.diagnosis(second).reason is CacheReason.WHOLE


def test_a_coalesced_request_has_the_diagnosis_of_its_sequence() -> None:
    """It is told even if it joins after the prompt was looked up."""
    cache = Cache()
    first = cache.submit(_TEXT, max_tokens=6)
    cache.step()
    cache.step()
    second = cache.submit(_TEXT, max_tokens=6)
    cache.finish()
    assert cache.diagnosis(second) == cache.diagnosis(first)


def test_a_cancelled_prompt_has_evicted_nothing() -> None:
    """Tokens that were never computed are first seen, however far an earlier request would have gone."""
    cache = Cache()
    name = cache.submit(_TEXT, max_tokens=1)
    cache.events += cache.scheduler.admit(0.0)
    cache.events += cache.scheduler.abort((name,), None, 0.0)
    cache.finish()
    assert cache.ask(_TEXT).reason is CacheReason.FIRST_SEEN


def test_seen_prefixes_are_bounded_and_the_newest_are_kept() -> None:
    """A generation that is full takes the place of the one before."""
    cache = Cache()
    cache.prefixes._seen = SeenPrefixes(max_generation_keys=60)
    for first in range(100, 140):
        cache.ask((first, *_TEXT))
        assert len(cache.prefixes._seen) <= 120
    cache.shrink()
    assert cache.ask((139, *_TEXT)).reason is CacheReason.EVICTED
    cache.shrink()
    assert cache.ask((100, *_TEXT)).reason is CacheReason.FIRST_SEEN
    assert seen_prefixes.MAX_GENERATION_KEYS == 32_768
