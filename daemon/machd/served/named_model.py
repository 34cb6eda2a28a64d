"""One model by its name: what it does, who holds it, and the engine that computes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import structlog

from machd.capabilities.fit import MemoryNeeds
from machd.clock import Clock
from machd.errors import (
    DrainDeadlineError,
    EngineEndedError,
    EngineFaultError,
    MachdError,
    ModelNotLoadedError,
)
from machd.link.port import EnginePort
from machd.served.failed_load import FailedLoad
from machd.served.lease import Lease
from machd.served.load_history import LoadHistory, LoadOutcome
from machd.served.load_stage import LoadStage
from machd.served.model_files import ModelFiles
from machd.served.reserved_needs import NeedsBasis, placed, prefix_mb
from machd.served.residence import Residence
from machd.served.restarts import Restarts
from machd.served.served_model import ServedModel
from machd.served.turns import Claim, ModelState
from machd.served.waiters import Waiters
from machd.settings.model import Settings

_MB, _GB = 1_000_000, 1_000_000_000


class NamedModel:
    """One model. Lives on the event loop.

    Attributes:
        name: As requests and operators name it.
        settings: Its own, as they are written.
        served: What handlers ask about it, with the link to its engine.
        load_stage: How far its load is; None unless it loads.
        cause: What it failed of; None unless it did.
        needs: What is reserved for it, by what its engine process has found; None before.
        files: Its files, as they were at the start; None where they are not known.
        history: What became of its loads.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that it calls
        self,
        name: str,
        settings: Settings,
        served: ServedModel,
        open_engine: Callable[[], EnginePort],
        *,
        residence: Residence,
        on_change: Callable[[], None],
        on_ready: Callable[[], None],
        on_gone: Callable[[], None],
        on_state: Callable[[], None] = lambda: None,
        clock: Clock,
        is_one: bool = False,
        files: ModelFiles | None = None,
    ) -> None:
        """Begin unloaded.

        Args:
            name: As requests and operators name it.
            settings: Its own.
            served: With the link to an engine that is not started yet.
            open_engine: Prepares another engine, after one has failed for good.
            residence: How it lives beside others.
            on_change: Called when something has changed on which turns depend.
            on_ready: Called when it has been loaded.
            on_gone: Called when it has left: it is served no longer, and no request holds it.
            on_state: Called when it is in another state.
            clock: Reads time.
            is_one: There is no other: the daemon says what becomes of it, and leaves when it cannot be loaded.
            files: Its files, as they were at the start; None where they are not known.
        """
        self.name = name
        self.settings = settings
        self.served = served
        self.load_stage: LoadStage | None = None
        self.cause: BaseException | None = None
        self.needs: MemoryNeeds | None = None
        self.files = files
        self.history = LoadHistory()
        self._open_engine = open_engine
        self._residence = residence
        self._is_pinned: bool | None = None
        self._on_change = on_change
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._on_state = on_state
        self._state = ModelState.UNLOADED
        self._clock = clock
        self._event_loop = asyncio.get_running_loop()
        self._leases = 0
        self._waiters = Waiters(clock)
        self._ready_since_s = self._idle_since_s = clock.monotonic_s()
        self._is_sized = self._is_granted = self._is_unwanted = False
        self._needs_basis: NeedsBasis | None = None
        self._load_begun_s = 0.0
        self._failed = FailedLoad(clock)
        self._deaths = Restarts(clock)
        self._prefix_mb = self._spare_bytes = 0
        self._is_one = is_one
        self._log = structlog.get_logger("machd.models", model=name)
        self._is_spent = self._is_started = self._is_leaving = False

    @property
    def state(self) -> ModelState:
        """What it does."""
        return self._state

    @state.setter
    def state(self, state: ModelState) -> None:
        if state is not self._state:
            self._state = state
            self.load_stage = LoadStage() if state is ModelState.LOADING else None
            self._on_state()

    @property
    def is_one(self) -> bool:
        """Whether it is the only model, which lives as long as the daemon."""
        return self._is_one

    @property
    def shown_name(self) -> str:
        """Name that answers have: the model's id once it is known."""
        front = self.served.link.front
        return self.name if front is None else front.model.model_id

    @property
    def is_ready(self) -> bool:
        """Whether requests are computed."""
        return self.state is ModelState.READY

    @property
    def leases(self) -> int:
        """Requests that hold it."""
        return self._leases

    @property
    def residence(self) -> Residence:
        """How it lives beside others: as its settings say, unless an operator has pinned or unpinned it."""
        if self._is_pinned is None:
            return self._residence
        return replace(self._residence, is_pinned=self._is_pinned)

    @property
    def idle_s(self) -> float | None:
        """How long no request has held it; None while one does, and while it is not loaded."""
        if self._leases or self.state is not ModelState.READY:
            return None
        return self._clock.monotonic_s() - self._idle_since_s

    @property
    def is_gone(self) -> bool:
        """Whether it has left: no request holds it, and its engine process has ended."""
        has_no_process = self.state in {ModelState.UNLOADED, ModelState.FAILED}
        return self._is_leaving and not self._leases and has_no_process

    @property
    def settings_in_force(self) -> Settings:
        """Its own, with no more memory for keys and values than it has beside others."""
        if self.needs is None or not self._is_granted:
            return self.settings
        batching, cache = self.settings.continuous_batching, self.settings.cache
        budget_gb = min(batching.kv_budget_gb, self.needs.kv_budget_bytes / _GB)
        memory_mb = max(self._prefix_mb, int(self._spare_bytes * cache.memory_percent) // _MB)
        if cache.memory_mb is not None:
            memory_mb = min(memory_mb, cache.memory_mb)
        return self.settings.model_copy(
            update={
                "continuous_batching": batching.model_copy(update={"kv_budget_gb": budget_gb}),
                "cache": cache.model_copy(update={"memory_mb": memory_mb}),
            }
        )

    @property
    def reserved_bytes(self) -> int:
        """Memory that is reserved for it now."""
        return self.claim.reserved_bytes

    @property
    def claim(self) -> Claim:
        """What turns are decided by."""
        return Claim(
            self.name,
            self.state,
            needed_bytes=self._needed_bytes,
            is_granted=self._is_granted,
            is_pinned=self.residence.is_pinned,
            leases=self._leases,
            waiting_since_s=self._waiters.since_s,
            ready_since_s=self._ready_since_s,
            idle_since_s=self._idle_since_s,
            ttl_s=None if self.residence.is_pinned else self.residence.ttl_s,
            is_unwanted=self._is_unwanted or self._is_leaving,
        )

    @property
    def _needed_bytes(self) -> int | None:
        """What it needs; None until the engine process that loads has said so, and where files or settings have changed since."""
        is_known = self._is_sized or self.state not in {ModelState.LOADING, ModelState.UNLOADED}
        if self.needs is None or not is_known:
            return None
        return self.needs.total_bytes

    @property
    def is_coming(self) -> bool:
        """Whether it is being loaded, or will be, for requests that hold it already."""
        is_suspended = self.state is ModelState.SUSPENDING and self._leases > 0
        is_asked_for = is_suspended and not self._is_unwanted
        return self.state is ModelState.LOADING or self._waiters.since_s is not None or is_asked_for

    def live(self, residence: Residence) -> None:
        """Live beside others in another way from now on."""
        self._residence = residence
        self._on_change()

    def pin(self, *, is_pinned: bool | None) -> None:
        """Give way to no other model, or to any; None for what its settings say."""
        self._is_pinned = is_pinned
        self._on_change()

    def hold(self) -> Lease:
        """Count a request that needs the model, now or once it is loaded."""
        self._leases += 1
        self._is_unwanted = False
        return Lease(self)

    def release(self) -> None:
        """Count one less; the idle time begins with the last."""
        self._leases -= 1
        if not self._leases:
            self._idle_since_s = self._clock.monotonic_s()
            if self.state is ModelState.UNLOADED and not self._waiters.has_requests:
                self._waiters.since_s = None
            self._end_idle_load()
        self._on_change()

    def want(self) -> asyncio.Future[None]:
        """Have it loaded; the future resolves once it is ready, or to why it cannot be.

        Raises:
            ModelNotLoadedError: It has failed just now.
        """
        if self.state is ModelState.READY:
            ready: asyncio.Future[None] = self._event_loop.create_future()
            ready.set_result(None)
            return ready
        if self.state is ModelState.FAILED:
            self._failed.check()
            self.state = ModelState.UNLOADED
        if self.state is ModelState.UNLOADED and self._waiters.since_s is None:
            basis = self._needs_basis
            self._is_sized = basis is not None and basis == NeedsBasis.now(self.settings)
        ready = self._waiters.add()
        self._on_change()
        return ready

    def check_loaded(self) -> None:
        """Raise why nothing is known of the model.

        Raises:
            ModelNotLoadedError: It was never loaded.
        """
        if self.served.state is None:
            raise ModelNotLoadedError(
                f"the model {self.name!r} is not loaded; a request for an answer loads it"
            )

    def unload(self) -> None:
        """Have it unloaded once no request holds it, unless one comes before."""
        self._is_unwanted = True
        self._on_change()

    def load(self) -> None:
        """Have it loaded, even if it has failed just now, and do not wait for it."""
        self.retry()
        lease = self.hold()

        def end(ready: asyncio.Future[None]) -> None:
            if not ready.cancelled():
                ready.exception()  # the model's cause has it
            lease.close()

        self.want().add_done_callback(end)

    def suspend(self) -> None:
        """Unload it now, if it is ready; its answers wait until another request, or an operator, has it loaded.

        One that is being suspended is not loaded again for its answers. A load goes on, and a request that waits for
        one has it.
        """
        self._is_unwanted = True
        if self.state is ModelState.READY:
            self.give_way()
        self._on_change()

    def leave(self) -> None:
        """Be served no longer: requests that hold it are answered, then its engine process ends.

        It gives way as any other meanwhile, and its answers go on in their turn.
        """
        self._is_leaving = True
        self._residence = replace(self._residence, is_pinned=False, ttl_s=None)
        self._is_pinned = None
        if not self._leases:
            self._waiters.since_s = None
            self._waiters.resolve(
                ModelNotLoadedError(f"the model {self.name!r} is served no longer")
            )
        self._end_idle_load()

    def go(self) -> None:
        """End what is left of its engine, once it :attr:`is_gone`."""
        self._is_spent = True
        error = DrainDeadlineError("the model is served no longer")
        self.served.link.stop(error)
        self._waiters.resolve(error)  # a reload waits for its load without a lease
        self._on_gone()

    def end_waiting(self, error: MachdError) -> None:
        """End the wait of all requests that want it."""
        self._waiters.resolve(error)

    def _end_idle_load(self) -> None:
        """End a load that no request waits for: of a model that has left, or before it has been given memory."""
        if self._leases or self.state is not ModelState.LOADING:
            return
        if not self._is_leaving and (self._is_granted or self._waiters.has_requests):
            return
        self._waiters.since_s = None
        self.give_way()  # not stopped: that is done before the process has ended

    def retry(self) -> None:
        """Forget a failure, so that the next request has it loaded."""
        self._failed.forgive()

    def start(self) -> None:
        """Start its engine process, which opens the files and says what they need."""
        self.state, self._is_sized, self._is_granted = ModelState.LOADING, False, False
        self._load_begun_s = self._clock.monotonic_s()
        if not self._is_one:
            self._log.info("model.loading")
        if self._is_spent:
            self.served.link = self._open_engine()
            self._is_spent = self._is_started = False
        link = self.served.link
        if self._is_started:
            # Not what its last process had room for.
            link.set_limits(self.settings)
            loading = link.resume()
        else:
            link.finished.add_done_callback(lambda ended: self._soon(self._finished, ended))
            link.start()
            loading = link.loaded
        self._is_started = True
        loading.add_done_callback(lambda done: self._soon(self._loaded, link, done))

    def sized(self, needs: MemoryNeeds) -> None:
        """Note what it needs; its engine process waits for the grant.

        One that takes the place of a process that has died has its grant, unless it needs more.
        """
        needs = placed(needs, self.settings, keeps_kv_budget=self._residence.keeps_kv_budget)
        has_room = self._is_granted and needs.total_bytes <= self.reserved_bytes
        self.needs, self._is_sized, self._is_granted = needs, True, has_room
        self._needs_basis = NeedsBasis.now(self.settings)
        self._prefix_mb = prefix_mb(self.settings)
        if has_room:
            self.place()
        else:
            self._on_change()

    def grant(self) -> None:
        """Reserve its memory."""
        self._is_granted = True

    def place(self) -> None:
        """Let it read its weights."""
        self._load_begun_s = self._clock.monotonic_s()
        self.served.link.place(self.settings_in_force)

    def spare(self, spare_bytes: int) -> None:
        """Let its prefix cache take its share of so much memory that no model has reserved."""
        if spare_bytes == self._spare_bytes:
            return
        before = self.settings_in_force
        self._spare_bytes = spare_bytes
        if self.settings_in_force != before:
            self.served.link.set_limits(self.settings_in_force)

    def refuse(self, error: MachdError) -> None:
        """Give up its load, or begin none; suspended answers end with ``error``, because they could never go on."""
        self.history.outcomes[LoadOutcome.REFUSED] += 1
        self._log.error("model.failed", error=str(error))
        if not self._is_spent:
            self.served.link.stop(error)
        self._is_spent = True
        self._fail(error)

    def give_way(self) -> None:
        """End its engine process; what is open goes on when it is loaded again."""
        self.state = ModelState.SUSPENDING
        if self._leases:
            self.history.suspensions += 1
        if not self._is_one:
            self._log.info("model.suspending", leases=self._leases)
        self.served.vectors.clear()
        link = self.served.link
        begun = link.suspend()
        assert begun is not None, "models that share memory have processes of their own"
        begun.add_done_callback(lambda _: self._soon(self._suspended, link))

    def _suspended(self, link: EnginePort) -> None:
        """Go on waiting for a turn, if requests hold it."""
        if self.state is not ModelState.SUSPENDING or self.served.link is not link:
            return
        self.state, self._is_granted, self._is_sized = ModelState.UNLOADED, False, False
        if self._leases and not self._is_unwanted:
            self._waiters.begin()
        self._on_change()

    def _loaded(self, link: EnginePort, done: Future[None]) -> None:
        if self.state is not ModelState.LOADING or self.served.link is not link:
            return  # it was refused meanwhile
        error = done.exception()
        if error is not None:
            self._not_loaded(error)
            return
        now_s = self._clock.monotonic_s()
        self.state, self.cause = ModelState.READY, None
        self._waiters.since_s = None
        self._ready_since_s = self._idle_since_s = now_s
        self._deaths.forget()
        self.history.outcomes[LoadOutcome.LOADED] += 1
        self.history.last_load_s = now_s - self._load_begun_s
        self.history.loaded_unix_s = self._clock.unix_s()
        if not self._is_one:
            self._log.info("model.ready")
        self._on_ready()
        self._waiters.resolve(None)
        self._on_change()

    def _not_loaded(self, error: BaseException) -> None:
        self._is_spent = True
        if isinstance(error, EngineEndedError) and self._may_try_again():
            self.state = ModelState.UNLOADED  # the next turn tries again
            self._on_change()
            return
        self.history.outcomes[LoadOutcome.FAILED] += 1
        if not self._is_one:
            self._log.error("model.failed", error=str(error))
        self._fail(
            ModelNotLoadedError(
                f"the model {self.name!r} could not be loaded; its operator finds the reason in the log"
            ),
            cause=error,
        )

    def _may_try_again(self) -> bool:
        """Count an engine process that died while it loaded; return whether another one may load the model."""
        if self._is_one or not (self._leases or self._waiters.has_requests):
            return False
        try:
            self._deaths.note()
        except EngineFaultError:
            return False
        return True

    def _finished(self, ended: Future[None]) -> None:
        """Note that its engine has failed for good: every answer has ended with that."""
        is_current = self.served.link.finished is ended and not self._is_spent
        if not is_current or ended.exception() is None:
            return
        self._is_spent = True
        self._fail(EngineFaultError(f"the engine of the model {self.name!r} has failed"))

    def _fail(self, error: MachdError, cause: BaseException | None = None) -> None:
        self.cause = cause or error
        self.state, self._is_granted = ModelState.FAILED, False
        self._failed.note(error)
        self._waiters.since_s = None
        self._deaths.forget()
        self._waiters.resolve(error)
        self._on_change()

    def _soon(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._event_loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return  # the event loop has closed
