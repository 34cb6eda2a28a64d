"""The sequences that an engine process has not ended yet, with their tokens so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from machd.engine.protocol.step import SampledToken
from machd.errors import MachdError
from machd.scheduler.events import (
    Event,
    FinishReason,
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceResumed,
)
from machd.scheduler.subscriber import Resumption, SequenceRequest

_DEATHS = 2
"""Number of crashes with a sequence as the only running one, after which it is to blame."""


class _OpenSequence:
    """A sequence that has not ended.

    Attributes:
        reused_tokens: Prompt tokens of its :class:`PromptLookedUp`.
        is_running: It has a slot, or was suspended by the present process, or was sent to a process that has not queued
            it yet: submitting it may be what crashes the process.
        has_run: It or a sibling has had a slot.
        deaths: Consecutive crashes while it ran, with none of its tokens between.
        lone_deaths: Crashes while it was the only running sequence.
    """

    __slots__ = (
        "deaths",
        "has_run",
        "is_running",
        "lone_deaths",
        "request",
        "reused_tokens",
        "token_ids",
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.reused_tokens = 0
        self.is_running = False
        self.has_run = False
        self.deaths = self.lone_deaths = 0

    @property
    def resumption(self) -> Resumption:
        """The state from which another process resumes it."""
        return Resumption(
            generated_token_ids=tuple(self.token_ids),
            reused_tokens=self.reused_tokens,
            is_group_started=self.has_run,
            is_suspect=self.deaths > 0,
        )


class OpenSequences:
    """Open sequences in order of submission."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenSequence] = {}

    def __len__(self) -> int:
        """Return the number of open sequences."""
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the sequences' ids."""
        return iter(self._open)

    def __contains__(self, sequence_id: object) -> bool:
        """Return whether a sequence has not ended."""
        return sequence_id in self._open

    def add(self, requests: Iterable[SequenceRequest]) -> None:
        """Add the sequences of a request."""
        for request in requests:
            self._open[request.sequence_id] = _OpenSequence(request)

    def note_sent(self, requests: Iterable[SequenceRequest]) -> None:
        """Note that sequences were sent to a process."""
        for request in requests:
            self._open[request.sequence_id].is_running = True

    def follow(self, events: Iterable[Event]) -> bool:
        """Apply events of sequences; return whether one has a whole answer."""
        has_answered = False
        for event in events:
            one = self._open.get(getattr(event, "sequence_id", ""))
            if one is not None:
                self._note(one, event)
                if isinstance(event, SequenceFinished):
                    has_answered |= event.error is None and event.completion_tokens > 0
        return has_answered

    def _note(self, one: _OpenSequence, event: Event) -> None:
        match event:
            case OutputGenerated(output=SampledToken() as token):
                one.token_ids.append(token.token_id)
                one.deaths = 0
            case SequenceQueued():
                one.is_running = False
            case PromptLookedUp(_, diagnosis):
                one.reused_tokens = diagnosis.cached_tokens
            case SequenceAdmitted() | SequenceResumed():
                self._note_slot(one)
            case SequenceFinished(sequence_id):
                del self._open[sequence_id]
            case _:
                pass

    def _note_slot(self, admitted: _OpenSequence) -> None:
        admitted.is_running = True
        if not admitted.has_run:
            for one in self._open.values():
                one.has_run |= one.request.group_id == admitted.request.group_id

    def pause(self) -> None:
        """Note that no sequence runs any more, through no fault of one."""
        for one in self._open.values():
            one.is_running = False

    def survive(self, fault: MachdError, now_s: float) -> list[Event]:
        """Suspect the sequences that ran in a process that has ended; one that is to blame ends with ``fault``.

        A suspect runs alone until its next token, so a suspect without a token since the first crash is to blame for a
        second. A later crash, with several running sequences, shows no culprit; if crashes go on, sequences are sent
        one at a time.

        Returns:
            The final events of sequences that are to blame.
        """
        ran = [one for one in self._open.values() if one.is_running]
        for one in ran:
            one.deaths += 1
            one.lone_deaths += len(ran) == 1
            one.is_running = False
        blamed = [one for one in ran if max(one.deaths, one.lone_deaths) >= _DEATHS]
        blamed_ids = [one.request.sequence_id for one in blamed]
        return self.end(blamed_ids, FinishReason.ERROR, fault, now_s)

    def resumed(self) -> list[tuple[SequenceRequest, ...]]:
        """Return the requests that a new process resumes, each with its sequences."""
        again = [replace(one.request, resumption=one.resumption) for one in self._open.values()]
        return [tuple(group) for _, group in groupby(again, lambda one: one.group_id)]

    def end(
        self,
        sequence_ids: Iterable[str],
        reason: FinishReason,
        error: MachdError | None,
        now_s: float,
    ) -> list[Event]:
        """End sequences that no process computes any more; return their events."""
        ended = [(one, self._open.pop(one)) for one in sequence_ids]
        return [
            SequenceFinished(
                sequence_id=sequence_id,
                reason=reason,
                error=error,
                prompt_tokens=len(one.request.prompt),
                cached_tokens=one.reused_tokens,
                completion_tokens=len(one.token_ids),
                at_s=now_s,
            )
            for sequence_id, one in ended
        ]
