"""Coalescing: identical requests become subscribers of one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from machd.request.generation import SamplingParams
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import SequenceRequest


@dataclass(frozen=True, slots=True)
class CoalescingKey:
    """All that a completion's tokens depend on, and the namespace that may share them."""

    namespace: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]


def key_of(request: SequenceRequest) -> CoalescingKey:
    """Return a key that only requests with the same tokens share.

    The seed is part of it. Greedy requests draw nothing, so their sampling settings are left out.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = replace(sampling, seed=0, top_p=1.0, top_k=0, min_p=0.0)
    return CoalescingKey(
        request.namespace, request.prompt, sampling, request.max_tokens, request.stop_token_ids
    )


def is_shareable(request: SequenceRequest) -> bool:
    """Return False for a request with outputs that are not replayed, and for a suspect, which runs alone.

    Prompt log-probabilities are not replayed, nor are those of tokens that an earlier engine process generated.
    """
    former = request.resumption
    if former is not None and (former.generated_token_ids or former.is_suspect):
        return False
    return request.sampling.prompt_logprobs is None


class CoalescingIndex:
    """Waiting and running sequences by coalescing key; empty while coalescing is off."""

    def __init__(self, *, is_on: bool) -> None:
        """Start empty."""
        self.is_on = is_on
        self._sequences: dict[CoalescingKey, Sequence] = {}
        # By sequence number: hashing the whole prompt for every token would be slow.
        self._keys: dict[int, CoalescingKey] = {}

    def find(self, request: SequenceRequest, *, subscribers: int) -> Sequence | None:
        """Return the sequence of an identical request, unless ``subscribers`` more would miss too much.

        In that case the next identical request starts a sequence for later ones to find.
        """
        if not (self._sequences and is_shareable(request)):
            return None
        sequence = self._sequences.get(key_of(request))
        if sequence is not None and not sequence.can_replay(subscribers):
            self.remove(sequence)
            return None
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Make a sequence available to later identical requests."""
        if self.is_on and is_shareable(sequence.request):
            key = self._keys[sequence.number] = key_of(sequence.request)
            before = self._sequences.setdefault(key, sequence)
            assert before is sequence, "identical work is done once"

    def remove(self, sequence: Sequence) -> None:
        """Close a sequence to later subscribers; no effect if it was closed before."""
        key = self._keys.pop(sequence.number, None)
        if key is not None:
            del self._sequences[key]
            sequence.close_to_subscribers()

    def switch(self, *, is_on: bool) -> None:
        """Switch coalescing; a sequence submitted or waiting while it is off is never joined."""
        self.is_on = is_on
        if not is_on:
            for sequence in tuple(self._sequences.values()):
                self.remove(sequence)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the index holds exactly those of ``sequences`` that take subscribers."""
        expected = {key_of(one.request): one for one in sequences if one.takes_subscribers}
        assert self._sequences == expected, "the coalescing index holds the open sequences"
