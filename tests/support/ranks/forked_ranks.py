"""Ranks on loopback at the cost of a fork: what mlx.launch does for them, less its own process and the ranks' imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support import module_command
from support.clocks.polling import CEILING_S
from support.ranks.launched_ranks import free_ports


class ForkedRanks:
    """Processes of one group, by rank."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Take running processes."""
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [one.pid for one in self._processes]

    def poll(self) -> int | None:
        """Return the exit code of a rank that has ended; None while all of them run."""
        return next((code for one in self._processes if (code := one.poll()) is not None), None)

    def wait(self) -> list[int]:
        """Wait until all have ended; returns their exit codes."""
        return [one.wait(CEILING_S) for one in self._processes]


@contextmanager
def forked_ranks(
    ranks: int, module: str, arguments: Sequence[str], *, log: Path
) -> Iterator[ForkedRanks]:
    """Run ranks of a program that tests fork, and kill what is left of them at the end.

    Args:
        ranks: How many.
        module: As :data:`support.daemon.forked_programs.PROGRAMS` names it.
        arguments: Of the program, on each rank.
        log: Gets what all of them print.
    """
    first_port = free_ports(ranks)
    hosts = log.with_name("hosts.json")
    hosts.write_text(json.dumps([[f"127.0.0.1:{first_port + rank}"] for rank in range(ranks)]))
    with ExitStack() as running:
        out = running.enter_context(log.open("wb"))
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [*_command(module), *arguments],
                env=rank_environ(rank, hosts),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            running.callback(process.wait)
            running.callback(process.kill)
            processes.append(process)
        yield ForkedRanks(processes)


def _command(module: str) -> Sequence[str]:
    """Return the command of a program of machd's or of the tests'."""
    return (sys.executable, "-m", module) if module == "machd" else module_command(module)


def rank_environ(rank: int, hosts: Path) -> Mapping[str, str]:
    """Return the variables of a rank, for a file that lists the addresses of all of them."""
    # One thread for products: more would spin on the same cores.
    return {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "MLX_RANK": str(rank),
        "MLX_HOSTFILE": str(hosts),
    }
