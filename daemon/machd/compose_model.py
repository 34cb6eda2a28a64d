"""One model in the front: what listens to its engine, and what handlers ask about it, wired once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVarTuple, Unpack

from machd.admin.event_feed import EventFeed
from machd.capabilities.fit import MemoryNeeds
from machd.clock import Clock
from machd.generations.fanout import Fanout
from machd.generations.open_generations import OpenGenerations
from machd.generations.service import GenerationService
from machd.kv_events.publisher import KvEventPublisher
from machd.link.block_events import AllBlocksCleared, KvEvent
from machd.link.logged_event import LoggedEvent
from machd.link.port import OpenEngine, RestartReason
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.scheduler.events import Event
from machd.served.engine_watch import EngineWatch
from machd.served.model_files import ModelFiles
from machd.served.named_model import NamedModel
from machd.served.residence import Residence
from machd.served.served_model import ServedModel
from machd.served.served_models import ServedModels
from machd.served.throughput import Throughput
from machd.served.turns import ModelState
from machd.settings.model import Settings
from machd.telemetry.announcements import Announcements
from machd.telemetry.gauges import watch_model_gauges, watch_turns
from machd.telemetry.log_ring import LogRing
from machd.telemetry.logs import SchedulerLog
from machd.telemetry.metrics import Metrics

_Arguments = TypeVarTuple("_Arguments")


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that models have in common."""

    open_generations: OpenGenerations
    configuration: Configuration
    metrics: Metrics
    lifecycle: Lifecycle
    throughput: Throughput
    feed: EventFeed
    log: LogRing
    clock: Clock
    kv_events: Callable[[], KvEventPublisher | None]


class ModelParts:
    """Everything of one model in the front; an :class:`machd.link.port.EngineListener`. Made on the event loop."""

    def __init__(  # noqa: PLR0913 - one argument for each fact of the model
        self,
        name: str,
        settings: Settings,
        shared: Shared,
        open_engine: OpenEngine,
        *,
        residence: Residence,
        is_one: bool,
        models: ServedModels,
        files: ModelFiles | None = None,
        on_gone: Callable[[ModelParts], None],
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            name: As requests and operators name it.
            settings: Its own.
            shared: What it has in common with others.
            open_engine: Makes its engine, which is told of these parts.
            residence: How it lives beside others.
            is_one: There is no other, so that the daemon lives as the model does.
            models: Of which it is to be one.
            files: Its files, as they were at the start; None where they are not known.
            on_gone: Called when it is served no longer and its last answer has ended.
        """
        self._shared = shared
        self.model_name = "" if is_one else name
        self._is_one = is_one
        self._models = models
        self._watching: asyncio.Task[None] | None = None
        self._is_replaced = False
        self._event_loop = asyncio.get_running_loop()
        engine = open_engine(settings, self)  # first: it may fail, and then nothing is to be undone
        # The model that it takes the place of may have answers to end, which count for the same name.
        self.metrics = shared.metrics.model(name) or shared.metrics.add_model()
        if not is_one:
            self.metrics.name_model(name)
        feed = self._feed = shared.feed.add_model(lambda: self.metrics.model_id)
        log = SchedulerLog(lambda: self.metrics.model_id)
        self._fanout = Fanout(self._event_loop, [self.metrics, log, shared.throughput, feed])
        self.served = ServedModel(engine, lambda: self.model.settings_in_force, self._check_loaded)
        self.model = NamedModel(
            name,
            settings,
            self.served,
            lambda: open_engine(self.model.settings, self),
            residence=residence,
            on_change=models.act,
            on_ready=self._ready,
            on_gone=lambda: on_gone(self),
            on_state=self._tell_state,
            clock=shared.clock,
            is_one=is_one,
            files=files,
        )
        self.announcements = Announcements(
            self.served, lambda: self.model.settings_in_force, self.metrics, feed.on_verdict
        )
        watch_model_gauges(
            self.metrics,
            self.served,
            lambda: self.model.settings_in_force,
            open_generations=lambda: shared.open_generations.count_of(self.model.shown_name),
        )
        if not is_one:
            watch_turns(self.metrics, self.model)
        self.service = GenerationService(
            served=self.served,
            fanout=self._fanout,
            open_=shared.open_generations,
            until_ready=lambda: models.until_ready(self.model),
            pause=self._pause,
        )

    def publish(self, events: list[Event]) -> None:
        """Hand the events of a step to their readers."""
        self._fanout.publish(events)

    def block_changed(self, event: KvEvent) -> None:
        """Publish a change of the blocks in memory."""
        kv_events = self._shared.kv_events()
        if kv_events is not None and not self._is_replaced:
            kv_events.put(event, self.model_name)

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Note a stage of its load."""
        self._on_event_loop(self._note_stage, name, total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Note bytes that its load has read."""
        self._on_event_loop(self._note_read, done_bytes)

    def logged(self, event: LoggedEvent) -> None:
        """Keep an event of its engine process's log."""
        self._shared.log.add(event)

    def model_sized(self, needs: MemoryNeeds, device_memory_bytes: int) -> None:
        """Have the model wait for the memory that it needs."""
        self._on_event_loop(self._models.note_device, device_memory_bytes)
        self._on_event_loop(self._note_stage, "waiting for memory", None)
        self._on_event_loop(self.model.sized, needs)

    def engine_ended(self, reason: RestartReason) -> None:
        """Count it, and tell routers until another process serves."""
        if self._is_one:
            self._on_event_loop(self._shared.lifecycle.restart)
        self._on_event_loop(self.metrics.count_restart, reason)

    def engine_served(self) -> None:
        """Tell routers that requests are computed again."""
        if self._is_one:
            self._on_event_loop(self._shared.lifecycle.restarted)

    def verdicts_changed(self, changed: frozenset[str]) -> None:
        """Announce what else the model can do now."""
        self._on_event_loop(self.announcements.announce_changes, changed)

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:
        """Schedule as the settings say, and then say what came of it. On the event loop."""
        done = self.served.link.change_config(settings, measure=measure)

        def announce(done: Future[None]) -> None:
            if done.exception() is None and self.served.state is not None:
                self._on_event_loop(self.announcements.announce)

        done.add_done_callback(announce)
        return done

    def watch(self) -> EngineWatch:
        """What notices that its engine has ended for good, or hangs."""
        return EngineWatch(
            self.served.link,
            lambda: self._shared.configuration.settings.engine.stall_timeout_s,
            lambda: self.metrics.count_fault("engine"),
        )

    def be_replaced(self) -> None:
        """Publish no blocks from now on: another model has the name, and with it the topic."""
        self.block_changed(AllBlocksCleared())
        self._is_replaced = True

    def forget(self, *, has_heir: bool) -> None:
        """Leave nothing behind of a model that has gone.

        Args:
            has_heir: Another one has its name, and counts on in its metrics.
        """
        if self._watching is not None:
            self._watching.cancel()
        self._shared.feed.forget_model(self._feed)
        if not has_heir:
            self._shared.metrics.forget_model(self.metrics)

    def _ready(self) -> None:
        """Say what holds for it; look after its engine, which is the daemon's to do where there is one model."""
        if self._is_one:
            return
        self.announcements.announce()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self.watch().failed())

    def _note_stage(self, name: str, total_bytes: int | None) -> None:
        """Note a stage of a load; not of a process that takes another one's place while the model stays ready."""
        if self.model.load_stage is not None:
            self.model.load_stage.stage(name, total_bytes)
            self._tell_state()

    def _note_read(self, done_bytes: int) -> None:
        stage = self.model.load_stage
        if stage is None:
            return
        before = round(stage.share, 2)
        stage.advance(done_bytes)
        if round(stage.share, 2) != before:
            self._tell_state()

    def _tell_state(self) -> None:
        """Tell operators what the model does; the state of the only one is the daemon's."""
        if self._is_one:
            self._shared.feed.on_event()
            return
        stage, cause = self.model.load_stage, self.model.cause
        has_failed = self.model.state is ModelState.FAILED
        self._feed.on_model(
            self.model.name,
            self.model.state,
            stage=None if stage is None else stage.name,
            progress=None if stage is None else round(stage.share, 2),
            failure=str(cause) if has_failed else None,
        )

    def _pause(self) -> ModelState | None:
        """Return what the model does while another one has its turn; None while it computes."""
        is_there = self._is_one or self.model.is_ready
        return None if is_there else self.model.state

    def _check_loaded(self) -> None:
        """Raise why there is nothing to say of the model."""
        self._shared.lifecycle.check_accepting()
        self.model.check_loaded()

    def _on_event_loop(
        self, call: Callable[[Unpack[_Arguments]], object], *arguments: *_Arguments
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._event_loop.call_soon_threadsafe(call, *arguments)
