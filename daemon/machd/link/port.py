"""The port through which a front reaches the engine of one model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Protocol, TypeAlias

from machd.capabilities.fit import MemoryNeeds
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.media import PlainArray
from machd.engine.protocol.progress import LoadProgress
from machd.errors import MachdError
from machd.link.block_events import KvEvent
from machd.link.logged_event import LoggedEvent
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.scheduler.events import Event
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings


class RestartReason(StrEnum):
    """Why an engine process was replaced by another one."""

    EXIT = "exit"
    """It ended: a crash, the kernel's OOM killer, an operator's signal."""

    FAULT = "fault"
    """Its engine failed repeatedly."""

    STALL = "stall"
    """It had no heartbeat for ``engine.stall_timeout_s``, and was killed."""


class EnginePort(Protocol):
    """The engine of one model, as its front sees it. Every method may be called from any thread.

    Attributes:
        loaded: Resolves once the model is served, or with the error of loading.
        finished: Resolves when the engine has ended for good: to None after a stop, else with the fault.
    """

    loaded: Future[None]
    finished: Future[None]

    @property
    def pid(self) -> int | None:
        """Number of the process that the engine lives in; None while there is none."""
        ...

    @property
    def state(self) -> ServedState | None:
        """The state of the loaded model; None before."""
        ...

    @property
    def front(self) -> ModelFront | None:
        """The model's description, tokenizer and templates; None until it is served."""
        ...

    @property
    def snapshot(self) -> LoopSnapshot:
        """The newest counts; memory at most a second old."""
        ...

    @property
    def idle_snapshot(self) -> LoopSnapshot:
        """The counts at the last idle moment."""
        ...

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last began a step or was idle; a measurement may take longer."""
        ...

    @property
    def is_changing_config(self) -> bool:
        """Whether a requested scheduler config is not in force yet."""
        ...

    def start(self) -> None:
        """Begin to load the model."""
        ...

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        """Start the sequences of one request."""
        ...

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        """Abort sequences; ``error`` is None if their client needs no more tokens."""
        ...

    def encode(
        self, inputs: tuple[EncoderInput, ...], *, is_suspect: bool = False
    ) -> Future[PlainArray]:
        """Make vectors or labels of texts, of a model that does; what a process leaves undone the next one does.

        Args:
            inputs: At least one.
            is_suspect: Whether a process has ended over them, so that they are computed alone, and before others.

        Returns:
            A future of float32 numbers, [texts, dimensions], or of the error that ends the engine, or of a fault.
        """
        ...

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        """Forget texts, the same object, that no request waits for any more; their future never resolves."""
        ...

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:
        """Schedule by other settings after the step that runs; ``measure`` measures the model before that.

        Running sequences are suspended and then resumed; waiting ones stay queued.

        Returns:
            A future that resolves when the config is applied, or replaced by a later one. It fails with the
            error of the measurement, which changes nothing, or with the error that ends the engine. It cannot
            be cancelled.
        """
        ...

    def set_limits(self, settings: Settings) -> None:
        """Apply other limits to new, waiting and running requests and to caches, from the next step on."""
        ...

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:
        """Drop the unused blocks of the prefix cache; resolves to their number.

        Never resolves if the engine ends before.
        """
        ...

    def place(self, settings: Settings) -> None:
        """Let a model that has said what it needs be put into memory.

        Args:
            settings: In force from now on, with the KV budget that there is room for.
        """
        ...

    def suspend(self) -> Future[None] | None:
        """End the engine process, and keep every open sequence for the next one; no sequence ends, and none gets a token.

        Returns:
            A future that resolves once the process has ended, so that its memory is free; None where the engine has
            no process of its own. Again is no mistake.
        """
        ...

    def resume(self) -> Future[None]:
        """Load a suspended model again, and go on with its sequences.

        Returns:
            A future that resolves once it is served, or to why it cannot be: the engine has then finished.
        """
        ...

    def kill(self) -> bool:
        """Kill a stalled engine, which another one replaces; return False if it cannot be killed."""
        ...

    def stop(self, error: MachdError) -> None:
        """Tell the engine to end all sequences with ``error`` and then itself. A pending change of config fails at once."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the engine's end; return whether it has ended."""
        ...


class EngineListener(LoadProgress, Protocol):
    """What a front does with what its engine says, of each of its loads too. Called on a thread of the engine's; never waits.

    Attributes:
        model_name: The model's among others, which share the memory with it; empty for the only one.
    """

    model_name: str

    def model_sized(self, needs: MemoryNeeds, device_memory_bytes: int) -> None:
        """Note what the model needs, which is put into memory once the engine is told to :meth:`EnginePort.place` it.

        Args:
            needs: Of the model.
            device_memory_bytes: What the device can hold in all.
        """
        ...

    def publish(self, events: list[Event]) -> None:
        """Receive the events of a step."""
        ...

    def verdicts_changed(self, changed: frozenset[str]) -> None:
        """Note the features whose verdicts have changed."""
        ...

    def logged(self, event: LoggedEvent) -> None:
        """Receive an event of the log of the engine's process."""
        ...

    def block_changed(self, event: KvEvent) -> None:
        """Note a change of the blocks in memory; without an endpoint that publishes them at most that there are none."""
        ...

    def engine_ended(self, reason: RestartReason) -> None:
        """Note that the engine process has ended and is being replaced."""
        ...

    def engine_served(self) -> None:
        """Note that the new engine process serves the model."""
        ...


OpenEngine: TypeAlias = Callable[[Settings, EngineListener], EnginePort]
"""Makes the engine for settings; nothing runs before its start."""
