"""The model without a server, in a process of its own: the bare loop, and mlx-lm's own batches.

It has a process of its own because the matrix library must be chosen before mlx is imported, and
because its memory must not count as the server's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

from machd.engine.backend.blas import measure_blas
from machd.engine.backend.mlx_environment import set_mlx_environment
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.source import resolve_model
from machd.engine.open import choose_checked_blas
from machd.errors import EngineFaultError, MachdError
from machd.settings.model import Settings
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory
from machd_bench.report import Figure

_JOIN_S = 10.0
ROOM = 1.5
"""Memory that a server takes over its weights, with what it computes in."""

_FACTS = ("weights_bytes", "dtype", "quantization", "backend", "blas")

_Query: TypeAlias = tuple[str, list[str], int]
"""``loop`` or ``batch``, the prompts, and how many tokens each answer has."""


@dataclass(frozen=True, slots=True)
class LoopRun:
    """One run: a prefill of rows of so many tokens, then steps that give each row one more."""

    width: int
    prompt_tokens: int
    prefill_s: float
    step_s: tuple[float, ...]

    @property
    def step_p50_s(self) -> float:
        """The median step; 0 where there was none."""
        return statistics.median(self.step_s) if self.step_s else 0.0

    @property
    def tps(self) -> float:
        """Every row's first token and those of every step, over the time of all of it."""
        return self.width * (1 + len(self.step_s)) / (self.prefill_s + sum(self.step_s))


class BareModel:
    """Starts its process when it is first asked, and again after :meth:`close`.

    Attributes:
        runs: Of the bare loop, in their order.
        model: What was loaded, once it is.
        leaves_room: Whether a server could load the weights once more beside it.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepare for the model of the settings that the server gets, too; nothing runs yet."""
        self._settings = settings
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self.model: dict[str, Figure] = {}
        self.leaves_room = True
        self.runs: list[LoopRun] = []

    async def run_loop(self, prompts: list[str], steps: int) -> LoopRun:
        """Prefill these prompts, brought to their mean length, in one call, then make so many steps.

        Raises:
            StartupError: The model cannot be loaded.
            EngineFaultError: The process failed.
        """
        run: LoopRun = await self._ask(("loop", prompts, steps))
        self.runs.append(run)
        return run

    async def run_batch(self, prompts: list[str], max_tokens: int) -> list[tuple[int, int]]:
        """Run one batch of mlx-lm's to its end; tokens of each prompt and of its completion.

        Raises as :meth:`run_loop`.
        """
        counts: list[tuple[int, int]] = await self._ask(("batch", prompts, max_tokens))
        return counts

    async def close(self) -> None:
        """End the process and give its memory back."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process is not None and pipe is not None:
            process.kill()  # it keeps nothing
            await asyncio.to_thread(process.join, _JOIN_S)
            pipe.close()
            process.close()

    async def _ask(self, query: _Query) -> Any:  # noqa: ANN401 - as many kinds as queries
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            arguments = (theirs, self._settings)
            self._process = context.Process(target=_serve, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
            self.model, self.leaves_room = await self._receive(self._pipe)
        self._pipe.send(query)
        return await self._receive(self._pipe)

    async def _receive(self, pipe: Connection) -> Any:  # noqa: ANN401 - as many kinds as queries
        try:
            reply = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            raise EngineFaultError("the bare loop's process has ended") from None
        except asyncio.CancelledError:
            await self.close()  # the waiting thread ends with the process
            raise
        if isinstance(reply, MachdError):
            raise reply
        return reply


def _serve(pipe: Connection, settings: Settings) -> None:
    """Load the model, say so, and answer queries until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the bench's to heed
    sys.stdout = sys.stderr  # libraries print what they like
    try:
        ready, answer = _load(settings)
        pipe.send(ready)
        while True:
            pipe.send(answer(pipe.recv()))
    except EOFError:
        return
    except MachdError as error:
        pipe.send(error)


def _load(settings: Settings) -> tuple[object, Callable[[_Query], object]]:
    environ = process_environ()
    cache_directory = user_cache_directory(environ)
    choice = choose_checked_blas(
        settings.engine.blas,
        cache_directory=cache_directory,
        environ=os.environ,  # noqa: TID251 - libraries read theirs by themselves
    )
    set_mlx_environment(os.environ, cache_directory)  # noqa: TID251 - mlx reads its own by itself
    import_mlx_lm()
    from machd.engine.backend.device import available_memory_bytes  # noqa: PLC0415 - imports mlx
    from machd.engine.ceiling import BareLoop, equal_lengths  # noqa: PLC0415 - imports mlx
    from machd.engine.loading.loader import load_model  # noqa: PLC0415 - imports mlx
    from machd.engine.static_batch import StaticBatch  # noqa: PLC0415 - imports mlx

    model = settings.model
    loaded = load_model(
        resolve_model(model.path, offline=model.offline, cache_directory=cache_directory),
        dtype=model.dtype,
        max_context_tokens=model.max_context_tokens,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.chat_template,
        blas=measure_blas(choice).name,
    )
    loop, batch = BareLoop(loaded.model), StaticBatch(loaded.model, loaded.tokenizer)
    it = loaded.description
    facts = {"id": it.model_id, **{name: getattr(it, name) for name in _FACTS}}
    leaves_room = available_memory_bytes() >= ROOM * it.weights_bytes

    def answer(query: _Query) -> object:
        kind, prompts, tokens = query
        if kind == "batch":
            counts = batch.run(prompts, max_tokens=tokens)
            return list(zip(counts.prompt_tokens, counts.completion_tokens, strict=True))
        rows = [loaded.tokenizer.encode(one, add_special_tokens=True) for one in prompts]
        run = loop.measure(equal_lengths(rows), steps=tokens)
        return LoopRun(run.batch_width, run.prompt_tokens, run.prefill_s, run.step_s)

    return (facts, leaves_room), answer
