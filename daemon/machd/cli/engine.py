"""The engine process of one model: the program that ``machd serve`` starts beside itself."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import TextIO

from machd.capabilities.fit import MemoryNeeds
from machd.clock import SystemClock
from machd.engine.backend.blas import BlasChoice
from machd.engine.encoding.encoder_files import EncoderFiles, find_encoder
from machd.engine.loading.source import ModelSource, resolve_model
from machd.engine.open import (
    WaitForMemory,
    choose_checked_blas,
    encoder_loader,
    engine_loader,
)
from machd.engine.ranks.joining import rank_place
from machd.engine_process.assembly import engine_loop
from machd.engine_process.encoding_loop import EncodingLoop
from machd.engine_process.front_link import FrontLink
from machd.engine_process.loop import EngineLoop
from machd.errors import MachdError, SettingsError
from machd.link.frames import Frames
from machd.link.kv_memory import effective_budget_bytes
from machd.link.port import EnginePort
from machd.process.idle_heap import IdleHeap
from machd.settings.model import Settings
from machd.telemetry.logs import configure_logs, log_model
from machd.user_directories import user_cache_directory
from machd_probes.startup import startup_measures


def main() -> None:
    """Serve the front at the other end of the link until it is told to stop, or the front is gone."""
    # A terminal and a service manager signal both processes. The front decides, and ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    faulthandler.enable()
    link_number, log_number = map(int, sys.argv[1:])
    frames = Frames(socket.socket(fileno=link_number))
    first = frames.receive()
    if first is None:
        return
    # As Python opens standard error, and like that never closed: threads may log to the end.
    log = os.fdopen(log_number, "w", 1, encoding=sys.stderr.encoding, errors="backslashreplace")
    settings, name = first
    _serve(frames, Settings.model_validate_json(settings), bytes(name).decode(), log)
    # Threads may be inside native code: unwinding Python under them would abort the process with a core dump.
    for stream in (log, sys.stderr):
        stream.flush()
    os._exit(0)


_ENCODER_NICENESS = 10
"""Of the process of an encoder: its passes keep all processors busy, and an answer that somebody reads is worth more than a batch of texts."""


def _serve(frames: Frames, settings: Settings, name: str, log: TextIO) -> None:
    """Compute for the front.

    Args:
        frames: The link's end.
        settings: In force until others come.
        name: The model's among others; empty for the only one.
        log: The front's standard error. This process's own is a pipe for what is no log.
    """

    def configure(settings: Settings) -> None:
        chosen = settings.logging
        configure_logs(
            level=chosen.level, log_format=chosen.format, stream=log, on_event=link.logged
        )

    link = FrontLink(frames, on_settings=configure, model_name=name)
    configure(settings)
    environ = os.environ  # noqa: TID251 - libraries read theirs by themselves
    cache_directory = user_cache_directory(environ)

    def wait_for_memory(needs: MemoryNeeds, device_memory_bytes: int) -> None:
        asked_gb = settings.continuous_batching.kv_budget_gb if needs.context_tokens else 0
        budget_bytes = effective_budget_bytes(asked_gb, device_memory_bytes)
        link.model_sized(replace(needs, kv_budget_bytes=budget_bytes), device_memory_bytes)
        link.wait_placed()

    try:
        source = resolve_model(
            settings.model.path,
            offline=settings.model.offline,
            cache_directory=cache_directory,
            progress=link,
        )
        source = replace(source, model_id=name or source.model_id)
        log_model(source.model_id)
        link.located(source.kind.value, str(source.path), source.model_id)
        encoder = find_encoder(source)
        blas = choose_checked_blas(
            settings.engine.blas, cache_directory=cache_directory, environ=environ
        )
        wait = wait_for_memory if name else None
        loop: EnginePort
        if encoder is None:
            loop = _sequence_loop(settings, source, link, blas, wait)
        else:
            loop = _input_loop(settings, encoder, source.model_id, link, blas, wait)
    except MachdError as error:
        link.refuse(error)
        return
    loop.loaded.add_done_callback(lambda _: _freeze())
    threading.Thread(target=_watch_heap, args=[loop], name="machd-heap", daemon=True).start()
    link.serve(loop)


def _sequence_loop(
    settings: Settings,
    source: ModelSource,
    link: FrontLink,
    blas: BlasChoice,
    wait_for_memory: WaitForMemory | None,
) -> EngineLoop:
    """Make the loop of a model that generates text."""
    environ = os.environ  # noqa: TID251 - libraries read theirs by themselves
    cache_directory = user_cache_directory(environ)
    load = engine_loader(
        settings,
        cache_directory=cache_directory,
        environ=environ,
        progress=link,
        blas=blas,
        place=rank_place(environ),
        wait_for_memory=wait_for_memory,
    )
    return engine_loop(
        settings,
        link,
        on_note=link.note,
        on_beat=link.beat,
        load=lambda: load(source),
        clock=SystemClock(),
        measures=startup_measures(
            cache_directory,
            model_path=settings.model.path,
            blas=blas.for_other_processes,
            on_measure=lambda: link.stage("probing", None),
        ),
    )


def _input_loop(
    settings: Settings,
    files: EncoderFiles,
    model_id: str,
    link: FrontLink,
    blas: BlasChoice,
    wait_for_memory: WaitForMemory | None,
) -> EncodingLoop:
    """Make the loop of an encoder.

    Raises:
        SettingsError: Several ranks were to compute it, or the settings ask for what encoders do not do.
    """
    environ = os.environ  # noqa: TID251 - libraries read theirs by themselves
    problems = []
    if rank_place(environ) is not None:
        problems.append("an encoder is computed by one process: serve it without ranks")
    if settings.model.quantize is not None:
        problems.append("model.quantize: an encoder is computed as it is stored; leave it out")
    if settings.model.max_context_tokens is not None:
        problems.append(
            "model.max_context_tokens: an encoder's own files say its length; leave it out"
        )
    if problems:
        raise SettingsError(problems)
    os.nice(_ENCODER_NICENESS)
    load = encoder_loader(
        settings,
        files,
        cache_directory=user_cache_directory(environ),
        environ=environ,
        progress=link,
        blas=blas,
        wait_for_memory=wait_for_memory,
    )
    return EncodingLoop(
        lambda: load(model_id), clock=SystemClock(), on_note=link.note, on_beat=link.beat
    )


def _watch_heap(loop: EnginePort) -> None:
    """Give back what a burst of requests left free in this process's heap."""
    heap = IdleHeap(lambda: not loop.snapshot.running_count + loop.snapshot.waiting_count)
    asyncio.run(heap.watch())


def _freeze() -> None:
    """Keep what is there now: looked through again and again it would stop all rows for a tenth of a second each time."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
