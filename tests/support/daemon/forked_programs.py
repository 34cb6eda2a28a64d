"""Programs of machd at the cost of a fork: importing what they need takes seconds of processor time each.

:class:`ForkedProgram` is ``subprocess.Popen`` for commands like ``python -m machd``. A parent process has imported their
libraries, has no thread and has computed nothing; it forks a child, which becomes a child of the caller. What a fork
cannot do as an interpreter would is started as ever: another interpreter, other variables of Python's or of libraries.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support import module_command
from support.daemon.beyond_limit import TOLD, install

_PROGRAMS = {
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
    "support.daemon.forked_programs": "support.daemon.forked_programs",
    "unit.probes.fake_encoder_worker": "unit.probes.fake_encoder_worker",
    "unit.probes.fake_vision_worker": "unit.probes.fake_vision_worker",
    "unit.probes.fake_worker": "unit.probes.fake_worker",
    "unit.probes.worker_without_repairs": "unit.probes.worker_without_repairs",
}
"""What is forked: modules as commands name them, and where their ``main`` is."""

FORKED_ENGINE_NAME = "machd-engine"
FORKED_TEMPLATE_NAME = "machd-template"
"""Names of processes that tests look for: the command line of one that was forked is its parent's."""

_NAMES = {
    "machd.cli.engine": FORKED_ENGINE_NAME,
    "support.daemon.engine_child": FORKED_ENGINE_NAME,
    "support.daemon.encoder_child": FORKED_ENGINE_NAME,
    "machd.engine.tokenizer.template_child": FORKED_TEMPLATE_NAME,
}

_PARENTS = {"machd.cli.main", "machd.cli.engine", "machd_probes.worker"}
"""Programs that start some of their own."""

STARTED = subprocess.Popen
"""What starts an interpreter always."""

_READ_AT_IMPORT = ("PYTHON", "LD_")
"""Beginnings of the variables that an interpreter reads once."""

_READ_BY_LIBRARIES = ("HF_", "MLX_")
"""The same of libraries, which ``machd model`` imports when it knows its arguments."""

_WITHOUT_MLX = {
    "machd.engine.grammar.grammar_child",
    "machd.engine.tokenizer.template_child",
    "machd.engine.vision.processor_child",
}
"""Programs to which mlx's variables mean nothing; an engine that starts them has set one."""

_LIBRARIES = (
    *("machd.cli.commands", "machd.cli.config", "machd.cli.ctl", "machd.cli.model"),
    *("machd.cli.front", "pydantic.v1", "litestar.plugins.pydantic", "litestar.plugins.attrs"),
)
_LIBRARIES_OF_MLX = (
    *("machd.engine.assembly", "machd.engine.loading.loader", "machd.engine.ranks.shared_loading"),
    *("machd.engine.encoding.loading", "machd_probes.model_probe", "mlx_lm.models.llama"),
    *("mlx_lm.models.gemma3_text", "mlx_lm.models.qwen3", "transformers.utils.chat_template_utils"),
)
"""What the programs import when they need it. No thread runs before an array is computed."""

_FORKS = sys.platform == "linux"

_SET_CHILD_SUBREAPER, _SET_NAME = 36, 15  # linux/prctl.h
_MAX_DESCRIPTORS = 64


class ForkedProgram(subprocess.Popen[Any]):
    """``subprocess.Popen``, which forks where it can."""

    def __init__(
        self, command: Any, *others: Any, max_file_bytes: int | None = None, **options: Any
    ) -> None:
        """Start a program, which can write no file larger than ``max_file_bytes``."""
        self._max_file_bytes = max_file_bytes
        if max_file_bytes is not None and not _FORKS:
            options["preexec_fn"] = lambda: _limit_files(max_file_bytes)
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
        parent = _inherited or _started_parents()[order["kind"]]
        self.pid = parent.fork(order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _order(arguments: Any, environ: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return what the parent has to know of a command that it can become, else None."""
    if not isinstance(arguments, Sequence) or not _FORKS:
        return None
    command = list(map(os.fspath, arguments))
    if command[:1] != [sys.executable] or any("engine-blas" in one for one in command):
        return None
    rest = command[2:] if command[1:2] == ["-P"] else command[1:]
    for module, place in _PROGRAMS.items():
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
    return {name: value for name, value in environ.items() if name.startswith(names)}


_FIRST_ENVIRON = dict(os.environ)


class _Parent:
    """A parent of programs, as this process sees it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have a child made of this process; returns its id.

        Raises:
            OSError: The system has no room for one.
        """
        content = json.dumps(order).encode()
        with self._lock:
            # While it is set, a process whose parent ends becomes a child of this one.
            _prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [len(content).to_bytes(4)], list(descriptors))
                self._channel.sendall(content)
                process_id = int.from_bytes(_received(self._channel, 4))
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)
        if not process_id:
            raise BlockingIOError("no room for a process")
        return process_id

    def close(self) -> None:
        """End it."""
        self._channel.close()


_inherited: _Parent | None = None
"""Of a program that was forked itself: a parent of its own, of its descent."""


@functools.cache
def _started_parents() -> Mapping[str, _Parent]:
    """Start a parent of this process's programs, of ``any``, and one of ``machd model``, which it forks halfway."""
    pairs = {kind: socket.socketpair() for kind in ("any", "model")}
    numbers = [other.fileno() for _, other in pairs.values()]
    command = (*module_command("support.daemon.forked_programs"), *map(str, numbers))
    process = STARTED(command, env=_FIRST_ENVIRON, pass_fds=numbers)
    for _, other in pairs.values():
        other.close()
    parents = {kind: _Parent(channel) for kind, (channel, _) in pairs.items()}

    def end() -> None:
        for parent in parents.values():
            parent.close()
        process.wait()

    atexit.register(end)
    return parents


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


_IN_A_SHELL = """#!{python} -IS
# machd as a shell finds it, at the cost of a fork.
import fcntl, json, os, signal, socket, sys

# What it says of commands depends on which machd a shell would find.
folders = [one for one in os.environ["PATH"].split(":") if one != os.path.dirname(__file__)]
os.environ["PATH"] = ":".join(folders)
read_end, write_end = os.pipe()
with open(__file__) as lock, socket.socket(fileno={channel}) as channel:
    fcntl.flock(lock, fcntl.LOCK_EX)
    order = json.dumps({{
        "kind": "any", "module": "machd.cli.main", "arguments": ["machd", *sys.argv[1:]],
        "environ": dict(os.environ), "folder": os.getcwd(), "starts_session": False,
        "max_file_bytes": None, "numbers": [0, 1, 2, 3], "code_number": 3,
    }}).encode()
    socket.send_fds(channel, [len(order).to_bytes(4, "big")], [0, 1, 2, write_end])
    channel.sendall(order)
    process_id = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, whose group is this program's alone
    signal.signal(number, lambda number, _: os.kill(process_id, number))
os.close(write_end)
sys.exit(ord(os.read(read_end, 1) or bytes([137])))
"""


@functools.cache
def forked_in_shells() -> tuple[Path, Sequence[int]]:
    """Return a folder with a ``machd`` for a shell's PATH, and the descriptors that the shell has to inherit."""
    folder = Path(tempfile.mkdtemp(prefix="machd-in-shells-"))
    atexit.register(shutil.rmtree, folder)
    program = folder / "machd"
    if not _FORKS:
        program.symlink_to(Path(sys.executable).with_name("machd"))
        return folder, ()
    channel, other = socket.socketpair()
    with other:
        # A parent of their own, which nothing else of this process asks meanwhile.
        command = (sys.executable, "-m", "support.daemon.forked_programs", str(other.fileno()))
        process = ForkedProgram(command, pass_fds=[other.fileno()])
    atexit.register(process.wait)
    atexit.register(channel.close)
    program.write_text(_IN_A_SHELL.format(python=sys.executable, channel=channel.fileno()))
    program.chmod(0o755)
    return folder, (channel.fileno(),)


def _received(channel: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = channel.recv(count - len(content))
        assert part, "the parent of programs lives"
        content += part
    return content


def _serve(channel: socket.socket) -> None:
    """Fork a program an order, until the other end is closed."""
    while True:
        first, descriptors, _, _ = socket.recv_fds(channel, 4, _MAX_DESCRIPTORS)
        if not first:
            return
        order = json.loads(_received(channel, int.from_bytes(first)))
        try:
            process_id = _fork(channel, order, descriptors)
        except OSError:
            process_id = 0
        channel.sendall(process_id.to_bytes(4))
        for one in descriptors:
            os.close(one)


def _fork(channel: socket.socket, order: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Fork a program through a process that ends at once, so that it is adopted; returns its id.

    Raises:
        OSError: The system has no room for one.
    """
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        # The program's name, from its birth.
        _prctl(_SET_NAME, _NAMES.get(order["module"], "machd").encode())
        process_id = os.fork()
        if process_id:
            os.write(write_end, process_id.to_bytes(4))
            os._exit(0)
        for one in (read_end, write_end):
            os.close(one)
        channel.close()
        while os.getppid() == between:  # a program remembers its parent, and ends with it
            time.sleep(0.001)
        _become(order, descriptors)
    os.waitpid(between, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as told:
        return int.from_bytes(told.read(4))


def _become(order: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the program to its end."""
    numbers = order["numbers"]
    # Through numbers that no program asked for, so that none is overwritten before it is moved.
    free = [os.dup(one) if one in numbers else one for one in descriptors]
    high = [_moved_up(one) for one in free]
    for one in {*descriptors, *free}:
        if one > 2:
            os.close(one)
    for one, number in zip(high, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    if order["starts_session"]:
        os.setsid()
    if order["max_file_bytes"] is not None:
        _limit_files(order["max_file_bytes"])
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    sys.argv[:] = order["arguments"]
    if order["module"] in _PARENTS and order["kind"] != "model":
        _have_parent()
    code = _run_main(order["module"])
    if order.get("code_number"):
        os.write(order["code_number"], bytes([code]))
    os._exit(code)


def _limit_files(max_file_bytes: int) -> None:
    # Python ignores SIGXFSZ, so that what is too long is an error, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def _moved_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512)


def _have_parent() -> None:
    """Fork a parent of this program's own programs, while it has no thread."""
    global _inherited  # noqa: PLW0603 - of this process
    channel, other = socket.socketpair()
    if os.fork() == 0:
        channel.close()
        _prctl(_SET_NAME, b"machd-parent")  # not an engine's, when it outlives one
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        # No program of its own keeps open what this one was given: another process waits for its end.
        kept = {0, 1, 2, other.fileno()}
        for one in {int(one.name) for one in Path("/proc/self/fd").iterdir()} - kept:
            with contextlib.suppress(OSError):
                os.close(one)
        _serve(other)
        os._exit(0)
    other.close()
    _inherited = _Parent(channel)
    fork_programs()


def fork_programs() -> None:
    """Have ``subprocess`` fork programs of machd from now on; :data:`STARTED` starts them all the same."""
    vars(subprocess)["Popen"] = ForkedProgram


def _run_main(module: str) -> int:
    """Run a program's ``main``, and end as the interpreter does; returns the exit code."""
    code = 0
    if module == "machd.cli.engine" and TOLD.items() <= os.environ.items():
        install()
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


def main() -> None:
    """Be one more parent, which was forked from the first."""
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _main() -> None:
    channel, channel_of_model = (socket.socket(fileno=int(one)) for one in sys.argv[1:])
    for module in _LIBRARIES:
        importlib.import_module(module)
    if os.fork() == 0:  # before anything has read the variables of libraries
        channel.close()
    else:
        channel_of_model.close()
        _import_all()
    gc.collect()
    gc.freeze()
    _serve(channel_of_model if channel.fileno() == -1 else channel)


def _import_all() -> None:
    from machd.engine.backend.blas import choose_blas  # noqa: PLC0415 - the parent alone imports
    from machd.engine.backend.mlx_lm_import import (  # noqa: PLC0415
        import_mlx_lm,
        import_mlx_lm_tokenizers,
    )
    from machd_probes.versions import probe_basis  # noqa: PLC0415

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not live on in a child
    is_for_cpu = choose_blas("auto").library is not None
    if is_for_cpu:
        import_mlx_lm()
    else:
        import_mlx_lm_tokenizers()  # a driver of a GPU cannot be forked
    for module in (*_PROGRAMS.values(), *(_LIBRARIES_OF_MLX if is_for_cpu else ())):
        importlib.import_module(module)
    # It is kept: reading the sources takes 0.4 s.
    probe_basis(backend="cpu", blas=None)


if __name__ == "__main__":
    _main()
