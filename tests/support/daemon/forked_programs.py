"""Programs of machd at the cost of a fork: importing what they need takes seconds of processor time each.

:class:`ForkedProgram` is ``subprocess.Popen`` for commands like ``python -m machd``. A parent process has imported their
libraries, has no thread and has computed nothing (:mod:`support.daemon.forking_parent`); it forks a child, which becomes a
child of the caller. What a fork cannot do as an interpreter would is started as ever: another interpreter, other variables of Python's or of libraries.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support import module_command

PROGRAMS = {
    "machd": "machd.cli.main",
    "machd.cli.engine": "machd.cli.engine",
    "machd.engine.grammar.grammar_child": "machd.engine.grammar.grammar_child",
    "machd.engine.tokenizer.template_child": "machd.engine.tokenizer.template_child",
    "machd.engine.vision.processor_child": "machd.engine.vision.processor_child",
    "machd_probes.worker": "machd_probes.worker",
    "support.checkpoints.damaged_headers": "support.checkpoints.damaged_headers",
    "support.daemon.engine_child": "support.daemon.engine_child",
    "support.daemon.encoder_child": "support.daemon.encoder_child",
    "support.daemon.service_daemon": "support.daemon.service_daemon",
    "support.daemon.stopped_while_binding": "support.daemon.stopped_while_binding",
    "support.daemon.forking_parent": "support.daemon.forking_parent",
    "support.forked_workers": "support.forked_workers",
    "support.ranks.compared_rows": "support.ranks.compared_rows",
    "unit.probes.fake_encoder_worker": "unit.probes.fake_encoder_worker",
    "unit.probes.fake_vision_worker": "unit.probes.fake_vision_worker",
    "unit.probes.fake_worker": "unit.probes.fake_worker",
    "unit.probes.worker_without_repairs": "unit.probes.worker_without_repairs",
}
"""What is forked: modules as commands name them, and where their ``main`` is."""

FORKED_ENGINE_NAME = "machd-engine"
FORKED_TEMPLATE_NAME = "machd-template"
"""Names of processes that tests look for: the command line of one that was forked is its parent's."""

_WORKER = "support.forked_workers"
"""The program whose parent has tests in its memory."""

PROCESS_NAMES = {
    "machd.cli.engine": FORKED_ENGINE_NAME,
    "support.daemon.engine_child": FORKED_ENGINE_NAME,
    "support.daemon.encoder_child": FORKED_ENGINE_NAME,
    "machd.engine.tokenizer.template_child": FORKED_TEMPLATE_NAME,
}

STARTED = subprocess.Popen
"""What starts an interpreter always."""

_READ_AT_IMPORT = ("PYTHON", "LD_")
"""Beginnings of the variables that an interpreter reads once."""

_READ_BY_LIBRARIES = ("HF_", "MLX_")
"""The same of libraries, which ``machd model`` imports when it knows its arguments."""

_READ_BY_RANKS = {"MLX_RANK", "MLX_HOSTFILE"}
"""Variables that mlx reads when a rank joins its group."""

_WITHOUT_MLX = {
    "machd.engine.grammar.grammar_child",
    "machd.engine.tokenizer.template_child",
    "machd.engine.vision.processor_child",
}
"""Programs to which mlx's variables mean nothing; an engine that starts them has set one."""

FORKS = sys.platform == "linux"

_SET_CHILD_SUBREAPER, _SET_NAME = 36, 15  # linux/prctl.h
MAX_DESCRIPTORS = 64
"""That one program is given."""


class ForkedProgram(subprocess.Popen[Any]):
    """``subprocess.Popen``, which forks where it can."""

    def __init__(
        self, command: Any, *others: Any, max_file_bytes: int | None = None, **options: Any
    ) -> None:
        """Start a program, which can write no file larger than ``max_file_bytes``."""
        self._max_file_bytes = max_file_bytes
        if max_file_bytes is not None and not FORKS:
            options["preexec_fn"] = lambda: limit_files(max_file_bytes)
        super().__init__(command, *others, **options)

    def _execute_child(self, args: Any, *others: Any) -> None:
        # As of Python 3.11 to 3.14: preexec_fn, pass_fds, cwd, env, shell; then three pipes, each with both its ends.
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = others
        pipes, starts_session = rest[:6], bool(rest[11])
        given = [pipes[0], pipes[3], pipes[5]]
        streams = [number if one == -1 else one for number, one in enumerate(given)]
        has_group = rest[12] != -1
        is_plain = not (preexec_fn or shell or has_group or any(map(os.isatty, streams)))
        order = _order(args, env) if is_plain else None
        if order is None:
            assert self._max_file_bytes is None or preexec_fn, "nothing else has the limit"
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        order |= {
            "folder": os.fspath(cwd or Path.cwd()),
            "starts_session": starts_session,
            "max_file_bytes": self._max_file_bytes,
            "numbers": [0, 1, 2, *pass_fds],
        }
        self.pid = _parent_of(order).fork(order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _order(arguments: Any, environ: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return what the parent has to know of a command that it can become, else None."""
    if not isinstance(arguments, Sequence) or not FORKS:
        return None
    command = list(map(os.fspath, arguments))
    if command[:1] != [sys.executable] or any("engine-blas" in one for one in command):
        return None
    rest = command[2:] if command[1:2] == ["-P"] else command[1:]
    for module, place in PROGRAMS.items():
        if rest[:2] == ["-m", module]:
            rest = rest[2:]
        elif tuple(command[1:3]) == module_command(module)[1:]:
            rest = command[3:]
        else:
            continue
        variables = dict(os.environ if environ is None else environ)
        kind = "model" if rest[:1] == ["model"] and _inherited is None else "any"
        # The linker read its variables once; what cv2 adds to them later means nothing to this process either.
        first = _FIRST_ENVIRON | {
            name: one for name, one in os.environ.items() if name.startswith("LD_")
        }
        names = _read_by(module, kind)
        if _named(variables, names) != _named(first, names):
            return None
        return {"kind": kind, "module": place, "arguments": [module, *rest], "environ": variables}
    return None


def _read_by(module: str, kind: str) -> tuple[str, ...]:
    """Return beginnings of the variables that have to be those of the parent."""
    if kind == "model":
        return _READ_AT_IMPORT
    of_libraries = [
        one for one in _READ_BY_LIBRARIES if one != "MLX_" or module not in _WITHOUT_MLX
    ]
    return (*_READ_AT_IMPORT, *of_libraries)


def _named(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(names) and name not in _READ_BY_RANKS
    }


_FIRST_ENVIRON = dict(os.environ)


def _parent_of(order: Mapping[str, Any]) -> Parent:
    if order["module"] == _WORKER:
        return _parent_of_workers[0]
    return _inherited or _started_parents()[order["kind"]]


class ParentEndedError(ConnectionError):
    """The parent of programs has ended."""


class Parent:
    """A parent of programs, as this process sees it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have a child made of this process; returns its id.

        Raises:
            ParentEndedError: There is no such process any more.
            OSError: The system has no room for one.
        """
        content = json.dumps(order).encode()
        with self._lock:
            # While it is set, a process whose parent ends becomes a child of this one.
            _prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [len(content).to_bytes(4)], list(descriptors))
                self._channel.sendall(content)
                process_id = int.from_bytes(received(self._channel, 4))
            except ConnectionError as error:
                raise ParentEndedError("the parent of programs has ended") from error
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)
        if not process_id:
            raise BlockingIOError("no room for a process")
        return process_id

    def close(self) -> None:
        """End it."""
        self._channel.close()


_inherited: Parent | None = None
"""Of a program that was forked itself: a parent of its own, of its descent."""


def inherit(parent: Parent) -> None:
    """Have this program's own programs forked by a parent that is its child."""
    global _inherited  # noqa: PLW0603 - of this process
    _inherited = parent
    fork_programs()


@cache
def _started_parents() -> Mapping[str, Parent]:
    """Start a parent of this process's programs, of ``any``, and one of ``machd model``, which it forks halfway."""
    return dict(zip(("any", "model"), _started(2), strict=True))


_parent_of_workers: list[Parent] = []


def start_parent_of_workers(arguments: Sequence[str]) -> None:
    """Start what forks workers of tests, which pytest finds with these arguments."""
    _parent_of_workers[:] = _started(1, "tests", *arguments)


def _started(count: int, *arguments: str) -> list[Parent]:
    """Start a program of so many parents (:mod:`support.daemon.forking_parent`), which ends with this process."""
    pairs = [socket.socketpair() for _ in range(count)]
    numbers = [other.fileno() for _, other in pairs]
    command = (*module_command("support.daemon.forking_parent"), *map(str, numbers), *arguments)
    process = STARTED(command, env=_FIRST_ENVIRON, pass_fds=numbers)
    for _, other in pairs:
        other.close()
    parents = [Parent(channel) for channel, _ in pairs]

    def end() -> None:
        for parent in parents:
            parent.close()
        process.wait()

    atexit.register(end)
    return parents


def set_process_name(name: str) -> None:
    """Name this process, as the system shows it; what it forks has the name, too."""
    _prctl(_SET_NAME, name.encode())


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def received(channel: socket.socket, count: int) -> bytes:
    """Read so many bytes of a parent's channel.

    Raises:
        ConnectionError: The other end is closed.
    """
    content = b""
    while len(content) < count:
        part = channel.recv(count - len(content))
        if not part:
            raise ConnectionError("the other end is closed")
        content += part
    return content


def limit_files(max_file_bytes: int) -> None:
    """Let this process write no longer files."""
    # Python ignores SIGXFSZ, so that what is too long is an error, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def fork_programs() -> None:
    """Have ``subprocess`` fork programs of machd from now on; :data:`STARTED` starts them all the same."""
    vars(subprocess)["Popen"] = ForkedProgram
