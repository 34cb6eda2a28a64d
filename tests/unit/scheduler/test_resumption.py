"""Requests of an engine process that died: another scheduler goes on behind the tokens that were read of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.schedulers.scheduler_loop import FAULT, SchedulerLoop, completion_of
from support.schedulers.sequence_samples import (
    LIMITS,
    batching_of,
    only,
    outputs_of,
    request_of,
)

from machd.engine.protocol.media import Media, MediaSpan
from machd.engine.protocol.step import ScoredPrompt
from machd.errors import (
    KvBudgetExceededError,
    KvBudgetSpentError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
)
from machd.request.generation import SamplingParams
from machd.request.media import MediaKind
from machd.scheduler.admission import KvPolicy
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    FinishReason,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceQueued,
    SequenceResumed,
    SequenceStarted,
    SuspendReason,
)
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Resumption, SequenceRequest

_MAX_TOKENS = 6


def _resumed(
    name: str = "a",
    tokens: int = 2,
    *,
    request: SequenceRequest | None = None,
    is_suspect: bool = False,
    reused_tokens: int = 0,
) -> SequenceRequest:
    """A request that had a slot, and of which so many tokens were read."""
    request = request or request_of(name, max_tokens=_MAX_TOKENS)
    generated = completion_of(request)[:tokens]
    former = Resumption(generated, reused_tokens, is_group_started=True, is_suspect=is_suspect)
    return replace(request, resumption=former)


@pytest.mark.parametrize("tokens", range(1, _MAX_TOKENS))
def test_a_resumed_request_is_told_its_remaining_tokens_only(tokens: int) -> None:
    """It is told that it is resumed, not that it is admitted or started, and its usage counts all its tokens."""
    loop = SchedulerLoop()
    request = _resumed(tokens=tokens)
    loop.submit(request)
    end = loop.run()["a"]
    assert loop.said("a") == completion_of(request)[tokens:]
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, _MAX_TOKENS)
    (resumed,) = only(SequenceResumed, loop.events)
    assert (resumed.reason, resumed.completion_tokens) == (SuspendReason.RESTART, tokens)
    assert (resumed.sequence_id, resumed.request_id) == ("a", request.request_id)
    assert not only(SequenceAdmitted, loop.events)
    assert not only(SequenceStarted, loop.events)


def test_a_request_without_tokens_is_told_of_everything_again() -> None:
    """Nothing was generated, so it begins again, and its client keeps what it was told first."""
    loop = SchedulerLoop()
    loop.submit(_resumed(tokens=0))
    assert loop.run()["a"].completion_tokens == _MAX_TOKENS
    assert len(only(SequenceAdmitted, loop.events)) == 1
    assert len(only(SequenceStarted, loop.events)) == 1
    assert not only(SequenceResumed, loop.events)


def test_the_opening_chunk_has_prompt_and_generated_tokens() -> None:
    """The engine is told how many of them the row had generated; images keep their places in the prompt."""
    media = Media(MediaKind.IMAGE, b"image", tuple(range(50, 54)), {})
    request = request_of(max_tokens=_MAX_TOKENS, sampling=SamplingParams(prompt_logprobs=1))
    request = replace(request, prompt=(1, *media.keys, 2), media=(MediaSpan(1, media),))
    resumed = _resumed(request=request, tokens=3)
    scheduler = Scheduler(continuous(LIMITS, batching_of()))
    scheduler.submit((resumed,), 0.0)
    scheduler.admit(0.0)
    (before_image,) = scheduler.plan().prefill
    assert before_image.token_ids == (1,)
    assert before_image.media == request.media
    (sequence,) = scheduler._running
    sequence.encoded = frozenset([media.digest])
    (chunk,) = scheduler.plan().prefill
    assert chunk.token_ids == (*request.prompt, *completion_of(request)[:3])
    assert (chunk.resumed_tokens, chunk.prompt_tokens) == (3, len(request.prompt) + 3)
    assert chunk.reserved_tokens == len(request.prompt) + _MAX_TOKENS
    assert chunk.sampling.prompt_logprobs is None, "they were sent before the first token"


@pytest.mark.parametrize("tokens", [0, 1])
def test_prompt_logprobs_are_told_again_before_the_first_token_only(tokens: int) -> None:
    """They were told with the first token; without one they may not have been."""
    loop = SchedulerLoop()
    request = request_of(max_tokens=_MAX_TOKENS, sampling=SamplingParams(prompt_logprobs=1))
    loop.submit(_resumed(request=request, tokens=tokens))
    loop.run()
    assert len(outputs_of(ScoredPrompt, loop.events)) == (0 if tokens else 1)


def test_cached_tokens_are_those_of_the_first_engine_process() -> None:
    """What the next process finds of prompt and completion is not told, and no hit of a prompt."""
    prefixes = PrefixCache(
        PrefixConfig(b"fake", 4, BlockCosts(10)), PrefixLimits(max_bytes=1_000_000)
    )
    loop = SchedulerLoop(prefixes=prefixes)
    request = request_of("b", prompt_tokens=20, max_tokens=_MAX_TOKENS)
    loop.submit(request)
    loop.run()
    loop.step()  # stores its blocks
    before = loop.scheduler.prefix_reading
    again = replace(request, sequence_id="a", group_id="a")
    loop.submit(_resumed(request=again, reused_tokens=8))
    loop.events += loop.scheduler.admit(0.0)
    assert loop.scheduler.plan().prefill[0].reused is not None
    assert loop.run()["a"].cached_tokens == 8
    assert [one.sequence_id for one in only(PromptLookedUp, loop.events)] == ["b"]
    after = loop.scheduler.prefix_reading
    assert before is not None
    assert after is not None
    assert (after.queries, after.hits) == (before.queries, before.hits)


def test_cached_tokens_are_told_anew_before_the_first_token() -> None:
    """A request without tokens is told what the next process finds of its prompt."""
    loop = SchedulerLoop()
    loop.submit(_resumed(tokens=0, reused_tokens=8))
    assert loop.run()["a"].cached_tokens == 0


@pytest.mark.parametrize("policy", KvPolicy)
def test_a_resumed_request_is_never_turned_away_for_room(policy: KvPolicy) -> None:
    """Neither the queue's bounds nor the policy ``reject`` end an answer that another process had begun."""
    limits = replace(LIMITS, max_queue=1, max_queue_tokens=4)
    loop = SchedulerLoop(continuous(limits, batching_of(max_b=2, budget_tokens=12, policy=policy)))
    names = "abcdef"
    loop.submit(*(_resumed(name) for name in names))
    assert len(only(SequenceQueued, loop.events)) == len(names)
    loop.submit(request_of("z", max_tokens=_MAX_TOKENS))
    refusal = QueueFullError if policy is KvPolicy.DEFER else KvBudgetSpentError
    assert isinstance(loop.ends["z"].error, refusal), "a new one is"
    ends = loop.run()
    assert {ends[name].reason for name in names} == {FinishReason.LENGTH}


def test_a_resumed_request_that_can_never_run_ends() -> None:
    """The next process may have a smaller KV budget."""
    loop = SchedulerLoop(continuous(LIMITS, batching_of(budget_tokens=5)))
    loop.submit(_resumed(tokens=2))
    end = loop.ends["a"]
    assert isinstance(end.error, KvBudgetExceededError)
    assert end.completion_tokens == 2


def test_the_queue_timeout_is_over_once_a_request_has_had_a_slot() -> None:
    """The request timeout counts from the arrival, which came before the process."""
    waiting = replace(request_of("b"), resumption=Resumption())
    loop = SchedulerLoop()
    loop.scheduler.hold_admission()
    loop.submit(_resumed("a"), _resumed("c", tokens=0), waiting)
    loop.events += loop.scheduler.admit(LIMITS.queue_timeout_s)
    assert {name: type(end.error) for name, end in loop.ends.items()} == {"b": QueueTimeoutError}
    loop.events += loop.scheduler.admit(LIMITS.request_timeout_s)
    for name in "ac":
        assert isinstance(loop.ends[name].error, RequestTimeoutError)
    assert loop.ends["a"].completion_tokens == 2


def test_resumed_requests_go_on_in_the_order_of_their_arrival() -> None:
    """Later ones wait, new ones among them."""
    loop = SchedulerLoop(continuous(LIMITS, batching_of(max_b=1)))
    requests = {name: replace(_resumed(name), arrived_s=-at) for at, name in enumerate("abc")}
    loop.submit(request_of("z"), *requests.values())
    loop.run()
    assert [one.sequence_id for one in only(SequenceResumed, loop.events)] == ["c", "b", "a"]


def test_requests_with_tokens_share_no_decode() -> None:
    """Log-probabilities of their tokens are unknown here, so none could be replayed."""
    loop = SchedulerLoop(continuous(LIMITS, batching_of(coalesce=True)))
    loop.submit(_resumed("a"), _resumed("b"), request_of("c", max_tokens=_MAX_TOKENS))
    loop.submit(request_of("d", max_tokens=_MAX_TOKENS), _resumed("e", tokens=1))
    assert len({*map(id, loop.scheduler._open.values())}) == 4, "only new ones share"
    loop.run()
    for name, tokens in {"a": 2, "b": 2, "c": 0, "d": 0, "e": 1}.items():
        assert loop.said(name) == completion_of(_resumed())[tokens:], name


def test_requests_without_tokens_share_a_decode_unless_suspect() -> None:
    """As they had in the process before."""
    loop = SchedulerLoop(continuous(LIMITS, batching_of(coalesce=True)))
    loop.submit(_resumed("a", tokens=0), _resumed("b", tokens=0))
    loop.submit(_resumed("c", tokens=0, is_suspect=True))
    assert len({*map(id, loop.scheduler._open.values())}) == 2
    assert {end.reason for end in loop.run().values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("tokens", [_MAX_TOKENS, _MAX_TOKENS + 1])
def test_a_whole_completion_ends_at_once(tokens: int) -> None:
    """Its end got lost with the process: nothing is computed for it."""
    longer = completion_of(request_of(max_tokens=tokens))
    loop = SchedulerLoop()
    loop.submit(replace(_resumed(), resumption=Resumption(longer)))
    end = loop.ends["a"]
    assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, tokens)
    loop.scheduler.check_invariants()
    assert loop.scheduler.plan().is_empty


def test_a_completion_with_its_stop_token_ends_at_once() -> None:
    """The reason is ``stop``, even with the last token that it may have."""
    request = request_of(max_tokens=2, stop_token_ids=[70])
    loop = SchedulerLoop()
    loop.submit(replace(request, resumption=Resumption((65, 70))))
    assert (loop.ends["a"].reason, loop.ends["a"].completion_tokens) == (FinishReason.STOP, 2)
    assert not loop.scheduler.waiting_count


def test_a_prompt_without_a_completion_is_computed_again() -> None:
    """It has no token, and ends behind its prompt."""
    loop = SchedulerLoop()
    request = request_of(max_tokens=0, sampling=SamplingParams(prompt_logprobs=1))
    loop.submit(_resumed(request=request, tokens=0))
    assert not loop.ends
    assert loop.run()["a"].reason is FinishReason.LENGTH
    assert len(outputs_of(ScoredPrompt, loop.events)) == 1


def test_a_group_goes_on_each_choice_behind_its_own_tokens() -> None:
    """Submitted together: one had tokens, one had a slot, and one waited."""
    loop = SchedulerLoop()
    group = [
        request_of(
            name,
            group_id="g",
            max_tokens=_MAX_TOKENS,
            sampling=SamplingParams(temperature=1.0, seed=seed),
        )
        for seed, name in enumerate("abc")
    ]
    resumed = tuple(
        _resumed(request=one, tokens=n) for one, n in zip(group, (3, 0, 0), strict=True)
    )
    loop.events += loop.scheduler.submit(resumed, 0.0)
    loop.run()
    for request, tokens in zip(group, (3, 0, 0), strict=True):
        assert loop.said(request.sequence_id) == completion_of(request)[tokens:]


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_suspects_go_on_alone_for_a_token_then_together(tokens: int) -> None:
    """None is admitted beside a suspect; a request that was not running waits until all are cleared."""
    loop = SchedulerLoop()
    loop.submit(_resumed("w", 1), *(_resumed(name, tokens, is_suspect=True) for name in "abc"))
    ends = loop.run()
    assert loop.widths[:3] == [1, 1, 1]
    assert max(loop.widths) == 4
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    for name in "abc":
        assert loop.said(name) == completion_of(_resumed())[tokens:]
    assert loop.said("w") == completion_of(_resumed())[1:]


def test_a_suspect_that_fails_alone_is_ended_and_no_other() -> None:
    """A process that died and a step that failed are two faults, which convict one."""
    loop = SchedulerLoop()
    loop.submit(*(_resumed(name, is_suspect=True) for name in "abc"))
    loop.poison = "b"
    ends = loop.run()
    assert ends["b"].error is FAULT
    assert ends["b"].completion_tokens == 2
    assert {ends["a"].reason, ends["c"].reason} == {FinishReason.LENGTH}


def test_a_resumed_request_may_be_suspended_again() -> None:
    """Behind all its tokens, those of both processes."""
    loop = SchedulerLoop()
    loop.submit(_resumed(tokens=2))
    loop.step()
    loop.scheduler.suspend()
    loop.run()
    assert loop.said("a") == completion_of(_resumed())[2:]
    reasons = [(one.reason, one.completion_tokens) for one in only(SequenceResumed, loop.events)]
    assert reasons == [(SuspendReason.RESTART, 2), (SuspendReason.CONFIG, 3)]


def test_an_aborted_resumed_request_has_the_tokens_of_both_processes() -> None:
    """Waiting or running."""
    loop = SchedulerLoop()
    loop.submit(_resumed("a"), _resumed("b"))
    loop.events += loop.scheduler.abort(("a",), None, 0.0)
    loop.step()
    loop.events += loop.scheduler.abort(("b",), None, 0.0)
    assert {name: end.completion_tokens for name, end in loop.ends.items()} == {"a": 2, "b": 3}
