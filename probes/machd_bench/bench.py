"""The surroundings of a scenario: the loads, a server to ask, and means to start others."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import psutil

from machd.clock import Clock
from machd_bench.answer import Answer
from machd_bench.bare_model import ROOM, BareModel
from machd_bench.connection import Address, PieceListener
from machd_bench.peer import Peer
from machd_bench.prompts import Prompt, make_prompts
from machd_bench.report import Figure, Row, model_facts
from machd_bench.serve_process import serve
from machd_bench.server import Server
from machd_bench.static_batches import StaticBatches

_WARM_UP_PROMPT_TOKENS = 8
_WARM_UP_TOKENS = 3
_MIN_MAX_B = 4
_READINGS_AT_MOST = 25
_DAY_S = "86400"
_MAX_MEASURING_S = 300.0
"""For a first start on a GPU, where mlx compiles kernels; on the CPU nothing is left to wait for."""

_Result = TypeVar("_Result")


class Mode(StrEnum):
    """A way to decode."""

    SINGLE = "single"
    """``machd serve``, one generation at a time."""
    STATIC = "static"
    """mlx-lm's ``batch_generate``, without a server."""
    BATCHED = "batched"
    """``machd serve --continuous-batching``."""
    REMOTE = "remote"
    """A server at a URL, whichever way it decodes."""
    BARE = "bare"
    """The model in a loop, without a server."""
    SETTINGS = "settings"
    """``machd serve`` as the user's settings have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The loads: chosen on the command line, the same for every mode.

    Attributes:
        requests: For each level of the sweep, rounded up to the same number for every client.
        image_side: Width and height of images of the scenario vision-prefix, in pixels.
        expert_shares: Shares of the experts in memory that are compared.
        experts_gb: Size of the experts of a generated model, in units of 10^9 bytes.
        weight_formats: Weight formats that are compared.
        widths: Batch widths at which each is measured.
        started_unix_s: Also seeds prompts: a server that keeps running may remember others'.
        architectures: Of the scenario parity; empty takes one of each kind.
        peers: Servers that machd takes turns with.
        peer_rounds: How often each is asked, at each number of streams.
        speculation_mode: Value of ``speculation.mode`` that is compared with ``off``.
    """

    requests: int = 8
    prompt_tokens: int = 128
    max_tokens: int = 64
    concurrencies: tuple[int, ...] = (1, 2, 4)
    long_prompt_tokens: int = 1500
    prefix_tokens: int = 1000
    users: int = 10
    system_tokens: int = 500
    image_side: int = 512
    kv_formats: tuple[str, ...] = ()
    expert_shares: tuple[float, ...] = ()
    experts_gb: float = 1.5
    weight_formats: tuple[str, ...] = ()
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    architectures: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()
    peer_rounds: int = 4
    speculation_mode: str = "auto"
    speculation_tokens: int = 64
    speculation_rounds: int = 3
    started_unix_s: int = 0

    def level_requests(self, clients: int) -> int:
        """Requests of a level: a last round of some clients only would not be that concurrency."""
        return -(-self.requests // clients) * clients


class Progress(Protocol):
    """A view of how far a bench is."""

    def say(self, text: str) -> None:
        """Say what is measured now."""

    def advance(self, count: int = 1) -> None:
        """Count answers."""


@dataclass(slots=True)
class Bench:
    """One mode of a run.

    Attributes:
        serve_args: Settings of its servers as flags.
        server: The one that is measured; None for scenarios that start their own.
        bare: The model without a server; None at a URL.
        names_model: The settings name the model; without one the embedded model is served.
        is_measured: A daemon measures a model that it knows nothing of.
        rows: What was measured so far, in all modes.
        notes: What a reader of the report has to know besides.
    """

    plan: Plan
    clock: Clock
    progress: Progress
    mode: Mode = Mode.BARE
    serve_args: tuple[str, ...] = ()
    server: Server | StaticBatches | None = None
    bare: BareModel | None = None
    model: dict[str, Figure] | None = None
    names_model: bool = True
    is_measured: bool = True
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def prompts(self, series: str, count: int, tokens: int | None = None) -> list[Prompt]:
        """The prompts of a series, of ``prompt_tokens`` words unless said otherwise."""
        seed = f"{self.plan.started_unix_s}/{series}"
        return make_prompts(seed, count, tokens or self.plan.prompt_tokens)

    async def ask(
        self,
        prompt: str | Prompt,
        max_tokens: int | None = None,
        *,
        fields: Mapping[str, object] | None = None,
        on_piece: PieceListener | None = None,
    ) -> Answer:
        """Ask the mode's server, and count the answer; see :meth:`Server.ask`."""
        assert self.server is not None, "the mode has a server"
        tokens = max_tokens or self.plan.max_tokens
        answer = await self.server.ask(prompt, tokens, fields=fields, on_piece=on_piece)
        self.progress.advance()
        return answer

    async def ask_all(
        self, requests: Iterable[tuple[Prompt, Mapping[str, object]]]
    ) -> list[Answer]:
        """Send requests at once, each with fields of its own; answers in the requests' order."""
        return await together(self.ask(prompt, fields=fields) for prompt, fields in requests)

    async def warm_up(self, clients: int) -> None:
        """Send so many short requests at once: a width's first batch costs more than the others."""
        assert self.server is not None, "the mode has a server"
        if isinstance(self.server, StaticBatches):
            self.server.width = clients
        prompts = self.prompts(f"warm-up-{clients}", clients, _WARM_UP_PROMPT_TOKENS)
        await together(self.server.ask(prompt, _WARM_UP_TOKENS) for prompt in prompts)

    @asynccontextmanager
    async def serve(self, *args: str) -> AsyncIterator[Server]:
        """Start a server that has answered something; at a URL it is the one there.

        Settings in ``args`` count for more than the mode's.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: The server failed, or did not leave with exit code 0.
        """
        if self.mode is Mode.REMOTE and isinstance(self.server, Server):
            yield self.server
            return
        self.progress.say("starting a server")
        async with serve((*self.serve_args, *args), self.clock) as process:
            server = await Server.find(Address.of(process.url), self.clock)
            if self.is_measured:
                self.progress.say("waiting until the server has measured its model")
                await process.measured(_MAX_MEASURING_S, self.clock)
            if self.mode is Mode.BATCHED and self.is_measured:
                server = await server.when_measured(_MAX_MEASURING_S)
            self.model = model_facts(server.model_id, server.capabilities)
            yield replace(server, process=process)

    def has_room(self, server: Server, what: str) -> bool:
        """Tell whether free memory holds this one's model once more; note what is left out if not."""
        weights_bytes = server.capabilities.model.weights_bytes if server.capabilities else 0
        if psutil.virtual_memory().available >= ROOM * weights_bytes:
            return True
        self.notes.append(f"{what} left out: memory does not hold the model once more")
        return False


def serve_args(mode: Mode, streams: int, settings: Sequence[str]) -> tuple[str, ...]:
    """Flags of a mode's servers, under which so many requests may be open however long they wait.

    The user's own count for more than the limits, and the mode's for more than those.
    """
    width = str(max(streams, _MIN_MAX_B))
    of_mode = {
        Mode.SINGLE: ("--no-continuous-batching",),
        Mode.BATCHED: ("--continuous-batching", "--continuous-batching-max-b", width),
    }
    return (
        *("--limits-max-queue", str(max(64, 2 * streams))),
        *("--limits-max-in-flight", str(max(512, 4 * streams))),
        *("--limits-queue-timeout-s", _DAY_S, "--limits-request-timeout-s", _DAY_S),
        *(*settings, *of_mode.get(mode, ())),
    )


async def together(work: Iterable[Coroutine[object, object, _Result]]) -> list[_Result]:
    """Run all of it at once, and give the results in its order.

    The first failure cancels the rest, and is raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def settled(read: Callable[[], Awaitable[_Result]], every_s: float) -> _Result:
    """Read until a reading stays as it is: what an answer leaves is counted after its end."""
    before = await read()
    for _ in range(_READINGS_AT_MOST):
        await asyncio.sleep(every_s)
        if (now := await read()) == before:
            break
        before = now
    return before
