"""Models that share a memory without a daemon: their engines load, end and fail when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from machd.capabilities.fit import MemoryNeeds
from machd.served.named_model import NamedModel
from machd.served.residence import Residence
from machd.served.served_model import ServedModel
from machd.served.served_models import ServedModels, Waiting
from machd.served.turns import Rules
from machd.served.vector_cache import VectorCache
from machd.settings.model import Settings
from support.clocks.manual_clock import ManualClock

NEEDS = MemoryNeeds(
    weights_bytes=60,
    working_bytes=0,
    kv_budget_bytes=1,
    bytes_per_token=0,
    bytes_per_sequence=1,
    context_tokens=1,
)
SIZE_BYTES = 100_060
"""Of a model with these needs: a KV budget is 100,000 bytes at least."""


class ScriptedEngine:
    """An engine process that has begun to load as soon as it is told, and is ready or broken when the test says.

    Attributes:
        loading: Resolves when the load ends.
        suspended: Resolves when it has ended; at once, unless the test replaces it.
        limits: Settings that it has been told, the last ones last.
        is_placed: It may read its weights.
    """

    front = None
    state = None

    def __init__(self) -> None:
        self.loading: Future[None] = Future()
        self.finished: Future[None] = Future()
        self.suspended: Future[None] = Future()
        self.suspended.set_result(None)
        self.limits: list[Settings] = []
        self.is_placed = False
        self.snapshot = SimpleNamespace(running_count=0, waiting_count=0, slot_count=0)

    @property
    def loaded(self) -> Future[None]:
        """The first load."""
        return self.loading

    def start(self) -> None:
        """Load."""

    def resume(self) -> Future[None]:
        """Load again."""
        self.loading = Future()
        return self.loading

    def suspend(self) -> Future[None]:
        """End."""
        return self.suspended

    def place(self, settings: Settings) -> None:
        """Read the weights."""
        self.is_placed = True
        self.limits.append(settings)

    def set_limits(self, settings: Settings) -> None:
        """Go on by other settings."""
        self.limits.append(settings)

    def stop(self, _error: object) -> None:
        """End, once the test says so."""


class ModelHouse:
    """Models that share the memory of ``places`` of them.

    Attributes:
        clock: Of all of them.
        models: All of them.
    """

    def __init__(
        self, *names: str, places: int, loads: bool = True, max_wait_s: float = 60.0
    ) -> None:
        self.clock = ManualClock()
        rules = Rules(budget_bytes=places * SIZE_BYTES, max_turn_s=60.0)
        self.models = ServedModels(rules, Waiting(loads=loads, max_wait_s=max_wait_s), self.clock)
        self.models.serve([self._model(name) for name in names])

    def leave(self, name: str) -> None:
        """Serve a model no longer."""
        self.models.serve([one for one in self.models if one.name != name])

    def engine(self, name: str) -> ScriptedEngine:
        """Return the engine of a model."""
        return cast("ScriptedEngine", self.models[name].served.link)

    def _model(self, name: str) -> NamedModel:
        served = SimpleNamespace(
            link=ScriptedEngine(), snapshot=None, state=None, vectors=VectorCache()
        )
        return NamedModel(
            name,
            Settings(),
            cast("ServedModel", served),
            cast("Callable[[], Any]", ScriptedEngine),
            residence=Residence(),
            on_change=self.models.act,
            on_ready=lambda: None,
            on_gone=lambda: None,
            clock=self.clock,
        )

    async def load(self, name: str, error: Exception | None = None) -> None:
        """Have an operator load a model, whose engine then is ready, or fails."""
        model = self.models[name]
        loading = asyncio.create_task(self.models.load(model))
        await let_go_on()
        model.sized(NEEDS)
        await let_go_on()
        engine = cast("ScriptedEngine", model.served.link)
        if error is None:
            engine.loading.set_result(None)
        else:
            engine.loading.set_exception(error)
        await loading


async def let_go_on() -> None:
    """Let the tasks of the event loop do what they can."""
    for _ in range(5):
        await asyncio.sleep(0)
