"""``python -m machd_probes.worker NAME…``: probes architectures one after the other.

Not a command for people: :mod:`machd_probes.runner` starts it, so that a crash, a hang or an
out-of-memory ends this process and nothing else. ``machd_probes.worker_messages`` says what it
writes to standard output; whatever models print goes to standard error. Without a name it says
what computes, and ends. With ``--stand-in`` it reads an order from standard input, and probes a small
model in place of the one that a daemon has loaded. After ``--switches`` the code of other switches is
probed too; after ``--vision`` the names are those of vision-language families, after ``--encoders`` those of
tiny encoders.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from machd.capabilities.matrix import ArchitectureReport
from machd.engine.backend.blas import choose_blas, measure_blas
from machd.engine.backend.mlx_environment import set_mlx_environment
from machd.errors import MachdError
from machd.user_directories import user_cache_directory
from machd_probes.worker_messages import (
    BLAS_VARIABLE,
    CheckFinished,
    StandInOrder,
    WorkerFinished,
    WorkerReady,
    encode_message,
    faulted,
)

STAND_IN_FLAG = "--stand-in"
"""In place of names."""

VISION_FLAG = "--vision"
"""Before names of families."""

ENCODERS_FLAG = "--encoders"
"""Before names of tiny encoders."""

SWITCHES_FLAG = "--switches"
"""Before names of architectures of which the code of other switches is probed too."""

_MAX_MEMORY_BYTES = 4 * 2**30
"""Of address space; a worker with mlx-lm in it has 240 MiB before the first model."""

_MAX_VISION_MEMORY_BYTES = 16 * 2**30
"""The same for families with images: mlx-vlm fixes phi3_v's tower at 300 million weights, which both sides hold."""

_PARENT_CHECK_S = 1.0


def main() -> None:
    """Probe what the command line names."""
    messages = messages_stream()
    _end_with_parent()
    _let_run()
    names, flag = sys.argv[1:], ""
    if names and names[0] in {VISION_FLAG, ENCODERS_FLAG, SWITCHES_FLAG}:
        flag, *names = names
    memory_bytes = _MAX_VISION_MEMORY_BYTES if flag == VISION_FLAG else _MAX_MEMORY_BYTES
    try:
        ready = _prepare(with_models=bool(names), max_memory_bytes=memory_bytes)
    except MachdError as error:
        sys.stderr.write(error.message + "\n")
        sys.exit(error.exit_code)
    messages.write(encode_message(ready))
    if names == [STAND_IN_FLAG]:
        from machd_probes.stand_in import probe_stand_in  # noqa: PLC0415 - imports mlx

        order = msgspec.json.decode(sys.stdin.buffer.read(), type=StandInOrder)
        for result in probe_stand_in(order):
            messages.write(encode_message(CheckFinished(result)))
    elif names:
        probe_all(names, _probe(flag), messages)


def _probe(flag: str) -> Callable[[str], ArchitectureReport]:
    """Return what probes a name behind a flag; the modules import mlx."""
    if flag == VISION_FLAG:
        from machd_probes.vision_matrix.prober import probe_family  # noqa: PLC0415

        return partial(probe_family, cache_directory=_cache_directory())
    if flag == ENCODERS_FLAG:
        from machd_probes.encoder_matrix.prober import probe_encoder  # noqa: PLC0415

        return probe_encoder
    from machd_probes import prober  # noqa: PLC0415

    return prober.probe_switches if flag == SWITCHES_FLAG else prober.probe_architecture


def _cache_directory() -> Path:
    from machd.settings.sources import process_environ  # noqa: PLC0415 - brings pydantic along

    return user_cache_directory(process_environ())


def messages_stream() -> BinaryIO:
    """Standard output for messages alone: what others write there goes to standard error.

    Native code that prints is caught as well, because the descriptor itself is exchanged.
    """
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return stream


def probe_all(
    names: Iterable[str], probe: Callable[[str], ArchitectureReport], messages: BinaryIO
) -> None:
    """Probe one after the other, and say what was found as soon as it is.

    Args:
        names: Of architectures.
        probe: Builds and measures one; whatever it raises is that architecture's fault alone.
        messages: Takes the messages.
    """
    for name in names:
        try:
            line = encode_message(WorkerFinished(probe(name)))
        except KeyboardInterrupt:
            raise
        # One architecture of mlx-lm's calls sys.exit while it is imported.
        except BaseException as error:  # noqa: BLE001 - a row's fault is a row's fault
            words = f"{type(error).__name__}: {error}".rstrip(": ")
            problem = faulted(name, words)
            line = encode_message(WorkerFinished(problem))
        messages.write(line)


def limit_resources(max_memory_bytes: int | None) -> None:
    """Let this process leave no core files, and cap its address space.

    A system that knows no such limit, or sets a lower one, is left as it is.

    Args:
        max_memory_bytes: The cap; None for a process that maps a GPU's memory, which no such
            limit fits.
    """
    import resource  # noqa: PLC0415 - only where a limit is wanted

    limits = [(resource.RLIMIT_CORE, 0)]
    if max_memory_bytes is not None:
        limits.append((resource.RLIMIT_AS, max_memory_bytes))
    for which, wanted in limits:
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(which)[1]
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(which, (soft, hard))


def _prepare(*, with_models: bool, max_memory_bytes: int = _MAX_MEMORY_BYTES) -> WorkerReady:
    """Choose the BLAS and what mlx reads, then import mlx, in that order.

    Args:
        with_models: Whether to import mlx-lm too, which takes 0.9 s.
        max_memory_bytes: Cap of the address space on the CPU.

    Raises:
        StartupError: The BLAS asked for cannot be loaded, or the scratch directory is not private.
    """
    # It brings pydantic along, which nothing above has a use for.
    from machd.settings.sources import process_environ  # noqa: PLC0415

    environ = process_environ()
    # Without comparing libraries: workers that run side by side have to choose alike.
    choice = choose_blas(environ.get(BLAS_VARIABLE) or "auto", environ=environ)
    set_mlx_environment(os.environ, user_cache_directory(environ))  # noqa: TID251 - mlx reads its own by itself
    if with_models:
        from machd.engine.backend.mlx_lm_import import import_mlx_lm  # noqa: PLC0415 - needs ``resource``

        import_mlx_lm()
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS is chosen

    report = measure_blas(choice)
    on_cpu = report.backend == "cpu"
    if on_cpu:
        # As the daemon does: what is probed is what will serve.
        mx.disable_compile()
    limit_resources(max_memory_bytes if on_cpu else None)
    return WorkerReady(report.backend, report.name)


def _end_with_parent() -> None:
    """Leave when the runner is gone: killed, it cannot end a worker that hangs."""
    parent = os.getppid()
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            never.wait(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _let_run() -> None:
    """Ask the kernel not to interrupt one thread for another of this process at every wake-up.

    mlx wakes its CPU thread for every operation of a pass. With two workers on two cores each
    wake-up was a context switch: 150,000 for one architecture, 12,000 so, and half the time.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then it is only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    main()
