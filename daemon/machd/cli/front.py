"""The front process of ``machd serve``: the daemon, with its engine in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from machd.cli.progress import ProgressBar
from machd.cli.serve import ENGINE_COMMAND, welcome
from machd.clock import SystemClock
from machd.daemon import Daemon
from machd.engine.adapters.adapter_files import adapter_digest, describe_adapter
from machd.engine.backend.own_code import OwnCode
from machd.engine.front import Texts
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.opening import read_checkpoint
from machd.engine.loading.source import ModelSource, SourceKind, local_source
from machd.engine.protocol.engine import ModelFront
from machd.heap import trim_heap
from machd.link.messages import Located
from machd.served.adapter_readings import AdapterFiles
from machd.served.restarts import MAX_RESTARTS, Restarts
from machd.served.started_engine import StartedEngine
from machd.served.supervised_engine import OpenFront, PrepareFront, SupervisedEngine
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, OriginKind, SettingsSources
from machd.telemetry.log_ring import LogRing
from machd.telemetry.logs import configure_logs


def run_front(
    loaded: LoadedSettings, sources: SettingsSources, first: StartedEngine | None, *, is_alone: bool
) -> None:
    """Serve until told to stop.

    Args:
        loaded: The settings.
        sources: Where a reload reads them.
        first: The engine process of the only model; None where there are several.
        is_alone: No other ranks compute the model with it.

    Raises:
        MachdError: The model could not be loaded, or the engine stopped for good.
    """
    settings = loaded.settings
    log = LogRing()
    configure_logs(
        level=settings.logging.level, log_format=settings.logging.format, on_event=log.add
    )
    started = [] if first is None else [first]

    def start_process(settings: Settings, name: str) -> StartedEngine:
        return (
            started.pop()
            if started
            else StartedEngine(ENGINE_COMMAND, settings.model_dump_json(), name)
        )

    with ProgressBar(has_lines=False) as progress:

        def announce(url: str, front: ModelFront | None) -> None:
            progress.stop()
            # What is there now stays. Looked through again and again it would stop all streams for
            # a tenth of a second each time.
            gc.collect()
            gc.freeze()
            trim_heap()
            is_given = loaded.origins["admin.listen"].kind is OriginKind.FLAG
            told = welcome(
                url,
                daemon.admin_url,
                front,
                daemon.decode_mode,
                names_admin=is_given,
                has_page=loaded.settings.console.public,
            )
            click.echo(told, err=True)

        make_daemon = functools.partial(
            Daemon,
            sources,
            loaded,
            functools.partial(
                SupervisedEngine,
                start_process=start_process,
                read_files=_read_files,
                progress=progress,
                # The other ranks end with rank 0's, and whoever has launched them launches all anew.
                restarts=Restarts(SystemClock(), MAX_RESTARTS if is_alone else 0),
                clock=SystemClock(),
            ),
            adapter_files=AdapterFiles(describe_adapter, adapter_digest),
            on_ready=announce,
            log=log,
        )
        daemon = _made_between_signals(make_daemon)
        asyncio.run(daemon.run())


def _read_files(settings: Settings, name: str) -> PrepareFront:
    """Read what lies around the weights of a model among others; the engine process finds those of the only one.

    Raises:
        ModelError: One of its kinds: a file is damaged or missing.
    """
    model = settings.model
    source = local_source(model.path) if name else None
    checkpoint = None
    if source is not None:
        checkpoint = read_checkpoint(source, OwnCode.of(is_trusted=model.trust_remote_code))
    return functools.partial(_prepare_front, checkpoint)


def _prepare_front(
    checkpoint: Checkpoint | None, located: Located, settings: Settings
) -> OpenFront:
    """Begin to open the model's texts, while the engine process loads it from the same files."""
    model = settings.model
    threads = ThreadPoolExecutor(1, "machd-texts")
    opening = threads.submit(
        Texts,
        ModelSource(SourceKind(located.kind), Path(located.path), located.model_id),
        checkpoint,
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
    )
    threads.shutdown(wait=False)
    return lambda description, grammars: opening.result().front(description, grammars)


def _made_between_signals(make_daemon: Callable[[], Daemon]) -> Daemon:
    """Make the daemon, which binds addresses and writes files, and stop it in order from then on.

    On its event loop it handles signals itself.
    """
    received: list[int] = []
    _handle_stops(received.append)
    daemon = make_daemon()
    _handle_stops(lambda _number: daemon.request_stop())
    for _ in received:
        daemon.request_stop()
    return daemon


def _handle_stops(handle: Callable[[int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: handle(received))
