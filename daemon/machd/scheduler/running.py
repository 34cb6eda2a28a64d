"""Running sequences with the slot, the KV reservation and the row of the prefix cache of each."""

from __future__ import annotations

from collections.abc import Iterator

from machd.engine.protocol.adapters import AdapterRoom, Holding
from machd.engine.protocol.memory import MemoryReading, StepMemoryError
from machd.engine.protocol.step import Lane, RowFault, StepPlan, StepResult
from machd.errors import AdapterError, MachdError, OverloadedError, RequestError, RowFaultError
from machd.scheduler.common_prefixes import Sharing
from machd.scheduler.config import SchedulerConfig
from machd.scheduler.events import CacheDiagnosis
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.reservations import Reservations
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import SubscriberState
from machd.scheduler.waits import WaitReason


class RunningSequences:
    """Running sequences in order of slot index.

    Attributes:
        slots: Their slots, and those that the engine has still to free.
        reservations: Their KV reservations.
        prefixes: Prefix cache; None to compute every prompt whole.
        uncached: Diagnosis of prompts without a prefix cache; None to tell none.
        max_count: Sequences that may run together: fewer than slots after memory ran out.
    """

    def __init__(
        self, config: SchedulerConfig, prefixes: PrefixCache | None, adapters: AdapterRoom
    ) -> None:
        """Start with every slot free."""
        self.slots = Slots(config.slot_count)
        self.reservations = Reservations(config.kv, max_rows=config.slot_count)
        self.prefixes = prefixes
        self.uncached: CacheDiagnosis | None = None
        self.max_count = config.slot_count
        self._adapters = adapters
        self._adapter_policy = config.adapters

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences."""
        return iter(self.slots)

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self.slots)

    def at(self, slot_index: int) -> Sequence:
        """Return the sequence of an occupied slot."""
        sequence = self.slots.at(slot_index)
        assert sequence is not None, "chunks, tokens and faults belong to a running row"
        return sequence

    @property
    def is_at_rest(self) -> bool:
        """True while the engine has no row, running or still to free."""
        return not self.slots and not self.slots.released

    @property
    def is_full(self) -> bool:
        """True if no further sequence may run; a suspect runs alone."""
        has_room = self.slots.free_count and len(self) < self.max_count
        return not has_room or any(one.is_suspect for one in self)

    @property
    def full_for(self) -> WaitReason:
        """What the next sequence waits for: of a suspect that runs, and where there is room, its turn."""
        if any(one.is_suspect for one in self):
            return WaitReason.TURN
        if not self.slots.free_count:
            return WaitReason.SLOT
        return WaitReason.MEMORY if len(self) >= self.max_count else WaitReason.TURN

    @property
    def youngest(self) -> Sequence:
        """The last in queue order among those without a token, else among all."""
        return max(self, key=lambda one: (not one.completion_tokens, one.place))

    def hold(self, sequence: Sequence, *, has_room: bool) -> Holding:
        """Keep a sequence's adapters in memory for it to be admitted; without room only if it has none.

        Raises:
            AdapterError: One of them cannot be used, or none with this model.
        """
        adapters = sequence.request.sampling.adapters
        if not adapters:
            return Holding.HELD
        if self._adapter_policy.refusal:
            raise AdapterError(self._adapter_policy.refusal)
        if not self._adapter_policy.is_batched:
            sequence.needs_serial_lane = True
        return self._adapters.hold(adapters) if has_room else Holding.NO_ROOM

    def admit(self, sequence: Sequence, now_s: float) -> bool:
        """Give a sequence whose adapters are held a slot; returns whether a lane has room for it, and else lets them go."""
        self.reservations.leave_out(self._adapters.reading().used_bytes)
        sharing = self._sharing(sequence)
        lane = self.reservations.lane_for(sequence) if sharing is None else Lane.BATCH
        if lane is None:
            self._adapters.release(sequence.request.sampling.adapters)
            return False
        self.slots.occupy(sequence, lane, now_s)
        if sharing is not None:
            sequence.shared = sharing.prefix
            if sharing.peer is not None:
                sharing.peer.shared = sharing.prefix
                self.reservations.reserve(sharing.peer)
        self.reservations.reserve(sequence)
        if self.prefixes is not None:
            self.prefixes.enter(sequence)
        else:
            sequence.diagnosis = self.uncached
        return True

    def _sharing(self, sequence: Sequence) -> Sharing | None:
        """Find the prefix that a sequence can share, and has room for; None if there is none."""
        shares = self.reservations.shares_prefixes and not sequence.needs_serial_lane
        if self.prefixes is None or not shares:
            return None
        found = self.prefixes.sharing(sequence)
        if found is None or not self.reservations.has_room_to_share(sequence, found):
            return None
        return found

    def leave(self, sequence: Sequence, *, is_sound: bool) -> None:
        """Free a sequence's slot, reservation and row; ``is_sound`` keeps its blocks for other sequences."""
        assert sequence.slot_index is not None, "a running sequence has a slot"
        if self.prefixes is not None:
            self.prefixes.leave(sequence, keeps=is_sound)
        self._adapters.release(sequence.request.sampling.adapters)
        self.slots.leave(sequence.slot_index)
        self.reservations.release(sequence.slot_index)

    def limit_to(self, count: int) -> None:
        """Limit running sequences to ``count``, but at least to one."""
        self.max_count = max(1, count)

    def allow_one_more(self) -> None:
        """Let one more sequence run, up to the number of slots."""
        self.max_count = min(self.max_count + 1, self.slots.count)

    def observe_memory(self, reading: MemoryReading) -> None:
        """Limit the prefix cache and admission to the memory that is left."""
        if self.prefixes is not None:
            self.prefixes.observe_memory(reading.available_bytes)
        if reading.step_bytes is None:
            self.reservations.observe(None)
            return
        evictable_bytes = 0 if self.prefixes is None else self.prefixes.evictable_bytes
        self.reservations.observe(reading.kv_used_bytes + reading.step_bytes + evictable_bytes)

    def take_prompts(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Count the prompt tokens of a step, and store their blocks.

        Returns:
            Sequences whose prompt is complete now, without a fault.
        """
        sequences = [self.at(chunk.slot_index) for chunk in plan.prefill]
        for sequence, chunk in zip(sequences, plan.prefill, strict=True):
            sequence.is_opened = True
            sequence.prefilled_tokens += len(chunk.token_ids)
        for row in plan.encode:
            if row.media.digest in result.encoded:
                self.at(row.slot_index).encoded |= {row.media.digest}
        faulty = {fault.slot_index for fault in result.faults}
        whole = [one for one in sequences if one.is_prefilled and one.slot_index not in faulty]
        if self.prefixes is not None:
            self.prefixes.commit(plan, result)
        return whole

    def forget_rows(self) -> None:
        """Free all slots and drop all blocks in memory after an engine fault."""
        self.slots.confirm_released(self.slots.released)
        if self.prefixes is not None:
            self.prefixes.fail()

    def check_invariants(self, *, is_whole: bool) -> None:
        """Assert that slots, sequences, reservations and prefix cache agree.

        Args:
            is_whole: Check all blocks of the prefix cache, and not only those of running sequences.
        """
        for sequence in self:
            slot_index = -1 if sequence.slot_index is None else sequence.slot_index
            assert self.slots.at(slot_index) is sequence, "a sequence does not know its slot"
            sequence.check_subscribers(SubscriberState.RUNNING)
        self.reservations.check_invariants(self.slots)
        if self.prefixes is not None:
            self.prefixes.check_invariants(self.slots, is_whole=is_whole)


def error_of(fault: RowFault) -> MachdError:
    """Return a row fault's cause if it is the client's mistake, else an error without its details."""
    if isinstance(fault.cause, RequestError):
        return fault.cause
    if isinstance(fault.cause, StepMemoryError):
        return OverloadedError(
            "the server has too little memory left for an image or video of this size; try again "
            "later, or send a smaller one"
        )
    error = RowFaultError("the generation failed inside the server")
    error.__cause__ = fault.cause
    return error
