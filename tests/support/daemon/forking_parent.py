"""The parent of programs that tests fork: it imports their libraries once, and becomes what is ordered.

:mod:`support.daemon.forked_programs` is the caller's side.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from support.daemon.beyond_limit import TOLD, install
from support.daemon.forked_programs import (
    MAX_DESCRIPTORS,
    PROCESS_NAMES,
    PROGRAMS,
    Parent,
    inherit,
    limit_files,
    received,
    set_process_name,
)
from support.forked_workers import serve_collected

_PARENTS = {"machd.cli.main", "machd.cli.engine", "machd_probes.worker"}
"""Programs that start some of their own."""

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


def _serve(channel: socket.socket) -> None:
    """Fork a program an order, until the other end is closed."""
    while True:
        first, descriptors, _, _ = socket.recv_fds(channel, 4, MAX_DESCRIPTORS)
        if not first:
            return
        order = json.loads(received(channel, int.from_bytes(first)))
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
        set_process_name(PROCESS_NAMES.get(order["module"], "machd"))
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        channel.close()
        while os.getppid() == between:  # a program remembers its parent, and ends with it
            time.sleep(0.001)
        if order["starts_session"]:
            os.setsid()
        # Whoever has its id may kill its group.
        os.write(write_end, os.getpid().to_bytes(4))
        for one in (read_end, write_end):
            os.close(one)
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
    if order["max_file_bytes"] is not None:
        limit_files(order["max_file_bytes"])
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


def _moved_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512)


def _have_parent() -> None:
    """Fork a parent of this program's own programs, while it has no thread."""
    channel, other = socket.socketpair()
    if os.fork() == 0:
        channel.close()
        set_process_name("machd-parent")  # not an engine's, when it outlives one
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
    inherit(Parent(channel))


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
    number, *others = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    if others[:1] == ["tests"]:
        serve_collected(others[1:], lambda: _serve_with_libraries(channel))
        return
    channel_of_model = socket.socket(fileno=int(others[0]))
    for module in _LIBRARIES:
        importlib.import_module(module)
    if os.fork():
        channel_of_model.close()
        _serve_with_libraries(channel)
    else:  # before anything has read the variables of libraries
        channel.close()
        _keep()
        _serve(channel_of_model)


def _serve_with_libraries(channel: socket.socket) -> None:
    _import_all()
    _keep()
    _serve(channel)


def _keep() -> None:
    """Keep what is there out of all garbage collections, so that no fork copies it."""
    assert threading.active_count() == 1, "no thread lives on in a fork"
    gc.collect()
    gc.freeze()


def _import_all() -> None:
    from machd.admin import app as admin_app  # noqa: PLC0415 - the parent alone imports
    from machd.dialects import app as public_app  # noqa: PLC0415
    from machd.engine.backend.blas import choose_blas  # noqa: PLC0415
    from machd.engine.backend.mlx_lm_import import (  # noqa: PLC0415
        import_mlx_lm,
        import_mlx_lm_tokenizers,
    )
    from machd.engine.loading import architecture  # noqa: PLC0415
    from machd_probes.versions import probe_basis  # noqa: PLC0415

    is_for_cpu = choose_blas("auto").library is not None
    if is_for_cpu:
        import_mlx_lm()
    else:
        import_mlx_lm_tokenizers()  # a driver of a GPU cannot be forked
    for module in (*PROGRAMS.values(), *(_LIBRARIES_OF_MLX if is_for_cpu else ())):
        importlib.import_module(module)
    # What is kept: reading the sources takes 20 ms, building the routes 0.1 s, parsing mlx-lm's 15 ms for each tokenizer.
    probe_basis(backend="cpu", blas=None)
    public_app.routes((), has_metrics=True)
    admin_app.routes()
    vars(architecture)["_constant"] = cache(vars(architecture)["_constant"])
    architecture.tokenizer_defaults({"model_type": "llama"})


if __name__ == "__main__":
    _main()
