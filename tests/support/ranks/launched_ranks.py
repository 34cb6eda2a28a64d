"""Ranks on loopback, started by mlx.launch as an operator starts them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.clocks.polling import wait_until

_LAUNCH = Path(sys.executable).with_name("mlx.launch")
_TESTS = Path(__file__).parents[2]
_FIRST_PORT, _LAST_PORT = 12_000, 30_000
"""Below those that Linux (from 32,768 on) and macOS (from 49,152 on) give to connections."""


def rank_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts so many ranks of ``python ARGUMENTS`` on free ports of loopback."""
    launch = ["-n", str(ranks), "--backend", "ring", "-p", str(free_ports(ranks))]
    # Ranks import what this process imports, from a worktree for instance.
    path = os.pathsep.join(part for part in (str(_TESTS), os.environ.get("PYTHONPATH")) if part)
    # One thread each for products: more would spin on the same cores.
    return [
        *(sys.executable, str(_LAUNCH), *launch, "--env", "OPENBLAS_NUM_THREADS=1"),
        *("--env", f"PYTHONPATH={path}", "--python", sys.executable, "--", *arguments),
    ]


@contextlib.contextmanager
def launched(
    ranks: int,
    arguments: Sequence[str],
    *,
    log: Path,
    prefix: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ranks, and kill what is left of them at the end.

    Args:
        ranks: How many.
        arguments: Of Python, on each rank.
        log: Gets what all of them print.
        prefix: A command that starts mlx.launch.
        environ: More variables.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*prefix, *rank_command(ranks, arguments)],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rank_pids(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of the ranks, rank 0 first."""
    children = Path(f"/proc/{launcher.pid}/task").glob("*/children")
    found: list[int] = []

    def are_there() -> bool:
        found[:] = sorted({int(one) for file in children for one in file.read_text().split()})
        return bool(found)

    wait_until(are_there, "mlx.launch starts ranks")
    return sorted(found, key=_rank)


def _rank(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ranks = [one.removeprefix(b"MLX_RANK=") for one in variables if one.startswith(b"MLX_RANK=")]
    return int(ranks[0]) if ranks else -1


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports, none of which the system gives to anybody who asks for no certain one.

    Ranks bind theirs only after they have imported mlx. By then an outgoing connection would have got a port of the system's range, and a
    closed one keeps it for a minute.
    """
    while True:
        first = random.SystemRandom().randrange(_FIRST_PORT, _LAST_PORT - count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
