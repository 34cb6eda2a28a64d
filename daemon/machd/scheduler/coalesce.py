"""Which sequences are the same work: one decode serves them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from machd.engine.protocol.sampling import SamplingParams
from machd.scheduler.decode import Decode
from machd.scheduler.sequence import SequenceRequest

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class CoalescingKey:
    """All that decides a sequence's tokens, and whose sequence it is."""

    namespace: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]


def key_of(request: SequenceRequest) -> CoalescingKey:
    """Two sequences with one key have the same tokens.

    The seed is part of it, so sequences that draw at random share only when they draw alike. A
    greedy one draws nothing: what shapes the draw does not tell it from another.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = replace(
            sampling,
            temperature=_GREEDY.temperature,
            seed=_GREEDY.seed,
            top_p=_GREEDY.top_p,
            top_k=_GREEDY.top_k,
            min_p=_GREEDY.min_p,
        )
    return CoalescingKey(
        request.namespace, request.prompt, sampling, request.max_tokens, request.stop_token_ids
    )


def is_shareable(request: SequenceRequest) -> bool:
    """Whether others may read along: log-probabilities of a prompt are not kept to be told again."""
    return request.sampling.prompt_logprobs is None


class CoalescingIndex:
    """The decodes that wait or run, by what they compute. Switched off, it never finds any."""

    def __init__(self, *, is_on: bool) -> None:
        """Start empty."""
        self.is_on = is_on
        self._decodes: dict[CoalescingKey, Decode] = {}
        # By number: a key hashes the whole prompt, which is not for every token.
        self._keys: dict[int, CoalescingKey] = {}

    def find(self, request: SequenceRequest, *, readers: int) -> Decode | None:
        """The decode that computes just this, unless ``readers`` more would miss too much of it.

        Then the next one to compute it is the one to be found.
        """
        decode = self._decodes.get(key_of(request)) if self._decodes else None
        if decode is not None and not decode.can_replay_to(readers):
            self.remove(decode)
            return None
        return decode

    def add(self, decode: Decode) -> None:
        """Let others find it."""
        if self.is_on and is_shareable(decode.request):
            key = self._keys[decode.number] = key_of(decode.request)
            before = self._decodes.setdefault(key, decode)
            assert before is decode, "identical work is done once"

    def remove(self, decode: Decode) -> None:
        """It takes nobody in any more; that it did not before is no fault."""
        key = self._keys.pop(decode.number, None)
        if key is not None:
            del self._decodes[key]
            decode.take_no_more_readers()

    def switch(self, *, is_on: bool) -> None:
        """Share from now on, or no longer: nobody joins what waits then.

        What came while it was off cannot be joined later either.
        """
        self.is_on = is_on
        if not is_on:
            for decode in tuple(self._decodes.values()):
                self.remove(decode)

    def check_invariants(self, decodes: Iterable[Decode]) -> None:
        """Assert that it holds exactly these."""
        expected = {key_of(one.request): one for one in decodes if one.takes_readers}
        assert self._decodes == expected, "the coalescing index names who waits and runs"
