"""Which sequences are the same work: one sequence serves them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from machd.engine.protocol.sampling import SamplingParams
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import SequenceRequest

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
    """The sequences that wait or run, by what they compute. Switched off, it never finds any."""

    def __init__(self, *, is_on: bool) -> None:
        """Start empty."""
        self.is_on = is_on
        self._sequences: dict[CoalescingKey, Sequence] = {}
        # By number: a key hashes the whole prompt, which is not for every token.
        self._keys: dict[int, CoalescingKey] = {}

    def find(self, request: SequenceRequest, *, subscribers: int) -> Sequence | None:
        """The sequence that computes just this, unless ``subscribers`` more would miss too much of it.

        Then the next one to compute it is the one to be found.
        """
        sequence = self._sequences.get(key_of(request)) if self._sequences else None
        if sequence is not None and not sequence.can_replay(subscribers):
            self.remove(sequence)
            return None
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Let others find it."""
        if self.is_on and is_shareable(sequence.request):
            key = self._keys[sequence.number] = key_of(sequence.request)
            before = self._sequences.setdefault(key, sequence)
            assert before is sequence, "identical work is done once"

    def remove(self, sequence: Sequence) -> None:
        """It takes nobody in any more; that it did not before is no fault."""
        key = self._keys.pop(sequence.number, None)
        if key is not None:
            del self._sequences[key]
            sequence.close_to_subscribers()

    def switch(self, *, is_on: bool) -> None:
        """Share from now on, or no longer: nobody joins what waits then.

        What came while it was off cannot be joined later either.
        """
        self.is_on = is_on
        if not is_on:
            for sequence in tuple(self._sequences.values()):
                self.remove(sequence)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that it holds exactly these."""
        expected = {key_of(one.request): one for one in sequences if one.takes_subscribers}
        assert self._sequences == expected, "the coalescing index names who waits and runs"
