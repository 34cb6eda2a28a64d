"""All models of a daemon by their names, and the memory that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from machd.clock import Clock
from machd.errors import MachdError, ModelNotLoadedError, NotReadyError
from machd.served.lease import Lease
from machd.served.named_model import NamedModel
from machd.served.turns import ModelState, Rules, Turn, next_turn
from machd.served.waiting_request import Asker, WaitingRequest
from machd.settings.models import DEFAULT_NAME

_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """How requests wait for a model.

    Attributes:
        loads: A request for a model that is not loaded has it loaded.
        max_wait_s: How long one may wait.
    """

    loads: bool
    max_wait_s: float


class ServedModels:
    """Every model; gives leases, and loads, unloads and suspends by turns. Lives on the event loop."""

    def __init__(self, rules: Rules, waiting: Waiting, clock: Clock) -> None:
        """Begin without models.

        Args:
            rules: Of the memory.
            waiting: Of the requests.
            clock: Reads time.
        """
        self._rules = rules
        self._waiting = waiting
        self._clock = clock
        self._models: dict[str, NamedModel] = {}
        self._leaving: list[NamedModel] = []
        self._device_bytes: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: set[asyncio.Event] = set()
        self._waiting_requests: dict[WaitingRequest, None] = {}
        self._waiting_number = 0
        self._is_acting = self._has_changed = False
        self._is_stopped = False

    def __iter__(self) -> Iterator[NamedModel]:
        """Go through the models, the default one first."""
        return iter(self._models.values())

    def __getitem__(self, name: str) -> NamedModel:
        """Return the model of a name, or the default one by :data:`DEFAULT_NAME`."""
        return self.default if name == DEFAULT_NAME else self._models[name]

    def __contains__(self, name: str) -> bool:
        """Whether a model of this name is served; the default one is by :data:`DEFAULT_NAME`."""
        return name == DEFAULT_NAME or name in self._models

    @property
    def waiting_requests(self) -> tuple[WaitingRequest, ...]:
        """Requests that wait until their model is ready, the oldest first."""
        return tuple(self._waiting_requests)

    @property
    def default(self) -> NamedModel:
        """The first of them, which requests get that name none."""
        return next(iter(self))

    @property
    def is_one(self) -> bool:
        """Whether there is the default model alone, which lives as long as the daemon."""
        return self.default.is_one

    @property
    def with_leaving(self) -> tuple[NamedModel, ...]:
        """The models that are served, then those that are no longer, but have answers to end."""
        return (*self, *self._leaving)

    @property
    def running_count(self) -> int:
        """Sequences that run, of all models."""
        return sum(one.served.snapshot.running_count for one in self.with_leaving)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait, of all models."""
        return sum(one.served.snapshot.waiting_count for one in self.with_leaving)

    @property
    def slot_count(self) -> int:
        """Slots of the models that are loaded."""
        return sum(one.served.snapshot.slot_count for one in self)

    @property
    def heartbeat_age_s(self) -> float:
        """The longest time for which an engine that serves has given no sign of life."""
        return max(one.served.heartbeat_age_s for one in self.with_leaving)

    @property
    def budget_bytes(self) -> int | None:
        """Memory of all models: what is set, or what the device can hold; None while that is not known."""
        set_bytes = self._rules.budget_bytes
        return self._device_bytes if set_bytes is None else set_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory that is reserved for models."""
        return sum(one.reserved_bytes for one in self.with_leaving)

    @property
    def is_stopped(self) -> bool:
        """Whether the daemon has ended them all."""
        return self._is_stopped

    @contextmanager
    def watched(self) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever a model may do something else, until the context ends."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            yield changed
        finally:
            self._watchers.discard(changed)

    def serve(self, models: Iterable[NamedModel]) -> None:
        """Serve these models from now on, the default one first; others that were served end their answers and go."""
        old, self._models = self._models, {one.name: one for one in models}
        for one in old.values():
            if self._models.get(one.name) is not one:
                self._leaving.append(one)
                one.leave()
        self.act()

    def to_load_first(self) -> list[NamedModel]:
        """Models that are loaded before the daemon is ready: pinned ones, and the default one unless requests load any."""
        pinned = [one for one in self if one.residence.is_pinned]
        if self._waiting.loads and not pinned:
            return []
        return list({one.name: one for one in (self.default, *pinned)}.values())

    def note_device(self, memory_bytes: int) -> None:
        """Note what the device can hold, which is the budget unless one is set."""
        self._device_bytes = memory_bytes

    def set_rules(self, rules: Rules, waiting: Waiting) -> None:
        """Share the memory by other rules from now on."""
        self._rules, self._waiting = rules, waiting
        self.act()

    async def lease(
        self,
        model: NamedModel,
        on_wait: Callable[[], None] = lambda: None,
        *,
        loads: bool | None = None,
        asker: Asker | None = None,
    ) -> Lease:
        """Hold a model for a request, and wait until it is ready.

        Args:
            model: To hold.
            on_wait: Called if that takes time.
            loads: Whether it is loaded if it has to be; None as the settings have it.
            asker: The request, as operators see it while it waits; None for one that they do not see.

        Raises:
            ModelNotLoadedError: It is not loaded and requests load none, it cannot be loaded, or has not been in time.
        """
        if not model.is_ready:
            # Before it is held: a request that may not load it takes no unload back.
            self._check_loadable(model, loads=self._waiting.loads if loads is None else loads)
        lease = model.hold()
        try:
            if not model.is_ready:
                await self.until_ready(model, on_wait, asker)
        except BaseException:
            lease.close()
            raise
        return lease

    async def load(self, model: NamedModel) -> None:
        """Load a model for an operator, whatever ``models.autoload`` says, and wait until it is ready.

        Raises:
            ModelNotLoadedError: It cannot be loaded; the message says why.
        """
        lease = model.hold()
        model.retry()
        try:
            await model.want()
        except ModelNotLoadedError as error:
            raise _with_cause(error, model) from None
        finally:
            lease.close()

    def forget_pins(self) -> None:
        """Pin the models that the settings pin, and no others."""
        for one in self:
            one.pin(is_pinned=None)

    def _check_loadable(self, model: NamedModel, *, loads: bool) -> None:
        if not loads and not model.is_coming:
            reason = "the request says autoload=false"
            if not self._waiting.loads:
                reason = "models.autoload is off: an operator has to load it"
            raise ModelNotLoadedError(f"the model {model.name!r} is not loaded, and {reason}")

    async def until_ready(
        self,
        model: NamedModel,
        on_wait: Callable[[], None] = lambda: None,
        asker: Asker | None = None,
    ) -> None:
        """Have a model loaded that a request holds, and wait until it is; the rest is as of :meth:`lease`.

        Raises:
            ModelNotLoadedError: It cannot be loaded.
            NotReadyError: It is not loaded in time.
            OperatorAbortError: An operator has ended the request.
        """
        ready = model.want()
        if not ready.done():
            on_wait()
        with self._listed(asker, model, ready):
            await self._until(ready, model)

    @contextmanager
    def _listed(
        self, asker: Asker | None, model: NamedModel, ready: asyncio.Future[None]
    ) -> Iterator[None]:
        """List a request for operators while it waits."""
        if asker is None or ready.done():
            yield
            return
        self._waiting_number += 1
        waiting = WaitingRequest(f"waiting-{self._waiting_number}", asker, model, ready)
        self._waiting_requests[waiting] = None
        self._tell_watchers()
        try:
            yield
        finally:
            del self._waiting_requests[waiting]
            self._tell_watchers()

    async def _until(self, ready: asyncio.Future[None], model: NamedModel) -> None:
        try:
            async with asyncio.timeout(self._waiting.max_wait_s):
                await ready
        except TimeoutError:
            raise NotReadyError(
                f"the model {model.name!r} was not loaded within limits.queue_timeout_s "
                f"({self._waiting.max_wait_s:g} s)",
                retry_after_s=max(1, round(self._rules.max_turn_s)),
            ) from None

    def act(self) -> None:
        """Do what is to be done now; called whenever something has changed."""
        self._has_changed = True
        if self._is_acting or self._is_stopped:
            return
        self._is_acting = True
        rules = replace(self._rules, budget_bytes=self.budget_bytes)
        try:
            wake_s = inf
            while self._has_changed:
                self._has_changed = False
                self._let_go()
                # One that leaves and the one in its place have the same name.
                models = {str(number): one for number, one in enumerate(self.with_leaving)}
                claims = [replace(one.claim, name=key) for key, one in models.items()]
                turn = next_turn(claims, rules, self._clock.monotonic_s())
                self._take(turn, models)
                self._share_spare()
                wake_s = turn.wake_s
        finally:
            self._is_acting = False
        self._tell_watchers()
        self._wake_at(wake_s)

    def end_waiting(self, error: MachdError) -> None:
        """End the wait of all requests for models that are not ready."""
        for one in self.with_leaving:
            one.end_waiting(error)

    def stop(self, error: MachdError) -> None:
        """End every model's sequences with ``error``, and its engine process."""
        self._is_stopped = True
        self.end_waiting(error)
        for one in self.with_leaving:
            one.served.link.stop(error)
        if self._timer is not None:
            self._timer.cancel()
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        for one in self._watchers:
            one.set()

    def _let_go(self) -> None:
        """Forget models that have left."""
        gone = [one for one in self._leaving if one.is_gone]
        self._leaving = [one for one in self._leaving if one not in gone]
        for one in gone:
            one.go()

    def _take(self, turn: Turn, models: Mapping[str, NamedModel]) -> None:
        for key in turn.give_way:
            models[key].give_way()
        if turn.start is not None:
            models[turn.start].start()
        if turn.grant is not None:
            models[turn.grant].grant()
            self._share_spare()  # prefix caches of others shrink before the weights are read
            models[turn.grant].place()
        if turn.refuse is not None:
            self._refuse(models[turn.refuse])
        self._has_changed |= bool(turn.start or turn.grant or turn.refuse or turn.give_way)

    def _share_spare(self) -> None:
        """Let the prefix caches of loaded models share what no reservation has, in equal parts."""
        loaded = [
            one
            for one in self.with_leaving
            if one.claim.holds_memory and one.state is not ModelState.SUSPENDING
        ]
        spare_bytes = max(0, (self.budget_bytes or 0) - self.reserved_bytes)
        for one in loaded:
            if not one.is_one:
                one.spare(spare_bytes // len(loaded))

    def _refuse(self, model: NamedModel) -> None:
        pinned = [one for one in self if one.residence.is_pinned and one is not model]
        pinned_bytes = sum(one.reserved_bytes for one in pinned)
        needed_bytes = model.claim.needed_bytes or 0
        beside = f", of which pinned models have {pinned_bytes / _GB:.2f}" if pinned_bytes else ""
        model.refuse(
            ModelNotLoadedError(
                f"the model {model.name!r} needs {needed_bytes / _GB:.2f} GB, and models.memory_gb is "
                f"{(self.budget_bytes or 0) / _GB:.2f}{beside}"
            )
        )

    def _wake_at(self, wake_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay_s = wake_s - self._clock.monotonic_s()
        if delay_s < _LONGEST_S:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self.act)


def _with_cause(error: ModelNotLoadedError, model: NamedModel) -> ModelNotLoadedError:
    """Tell an operator what a client is not told."""
    if model.cause is None or model.cause is error:
        return error
    return ModelNotLoadedError(f"the model {model.name!r} could not be loaded: {model.cause}")


_LONGEST_S = 1e6
"""Beyond it nothing is waited for."""
