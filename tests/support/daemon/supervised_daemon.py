"""A daemon in this process whose engine is in another one: the fake engine of :mod:`support.daemon.engine_child`."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from machd.clock import SystemClock
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.encoder import EncoderInput, InputTokenizer
from machd.engine.protocol.engine import GrammarCompiler, ModelDescription
from machd.engine.protocol.progress import SilentProgress
from machd.link.port import EngineListener, OpenEngine
from machd.served.restarts import Restarts
from machd.served.started_engine import StartedEngine
from machd.served.supervised_engine import SupervisedEngine
from machd.settings.model import Settings
from support import module_command
from support.daemon.running_daemon import RunningDaemon


@dataclass(frozen=True, slots=True)
class _Front:
    """The fake model's texts."""

    model: ModelDescription
    grammars: GrammarCompiler
    tokenizer: FakeTokenizer
    inputs: InputTokenizer | None
    media: None = None


class _TakenInputs:
    """Takes token ids as they are, and no texts."""

    def take(self, token_ids: Sequence[Sequence[int]], *, truncates: bool) -> list[EncoderInput]:
        del truncates
        return [EncoderInput(tuple(one)) for one in token_ids]


def _open_front(model: ModelDescription, grammars: GrammarCompiler) -> _Front:
    inputs = None if model.encoder is None else cast(InputTokenizer, _TakenInputs())
    return _Front(model, grammars, FakeTokenizer(), inputs)


class SupervisedDaemon(RunningDaemon):
    """A context manager: inside it the daemon is ready at ``url``.

    Attributes:
        processes: Engine processes that were started, in order.
        refused_starts: How often the system has no room for the next ones.
        engine: The front's end of it.
    """

    engine: SupervisedEngine

    def __init__(
        self,
        flags: Mapping[str, object] | None = None,
        *,
        config_path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        child: Sequence[str] = ("support.daemon.engine_child",),
    ) -> None:
        """Prepare it; ``flags`` are settings by dotted key, beside those of a file and of ``environ``.

        ``child`` is the module of the engine process, with its first arguments.
        """
        super().__init__(flags=flags, config_path=config_path, environ=environ)
        self._child = child
        self.processes: list[subprocess.Popen[bytes]] = []
        self.refused_starts = 0

    def _open_engine(self) -> OpenEngine:
        make_engine = partial(
            SupervisedEngine,
            start_process=self._start_process,
            read_files=lambda _settings, _name: lambda _located, _front_settings: _open_front,
            progress=SilentProgress(),
            restarts=Restarts(SystemClock()),
            clock=SystemClock(),
        )

        def open_engine(settings: Settings, listener: EngineListener) -> SupervisedEngine:
            self.engine = make_engine(settings, listener)
            return self.engine

        return open_engine

    def _start_process(self, settings: Settings, name: str) -> StartedEngine:
        if self.refused_starts:
            self.refused_starts -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        command = (*module_command(self._child[0]), *self._child[1:])
        started = StartedEngine(command, settings.model_dump_json(), name)
        self.processes.append(started.process)
        return started
