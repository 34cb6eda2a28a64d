"""A worker without mlx: what it is to probe says what becomes of it.

Started as a program it stands for ``python -m machd_probes.worker``, and everything that keeps its
messages apart and its memory small is that module's own. Tests import its reports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import module_command

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.matrix import ArchitectureReport
from machd_probes.worker import limit_resources, messages_stream, probe_all
from machd_probes.worker_messages import WorkerReady, encode_message

COMMAND = module_command("unit.probes.fake_worker")
LOG_VARIABLE = "FAKE_WORKER_LOG"
"""Names a file that gets the number of each process, and the names it was given."""

_MAX_MEMORY_BYTES = 2**30


def made_report(
    architecture: str,
    outcome: Outcome = Outcome.PASSED,
    *,
    layer: LayerCacheFacts | None = None,
    mlx_lm: Outcome = Outcome.PASSED,
) -> ArchitectureReport:
    """A row with results of three probes."""
    evidence = Evidence(0 if outcome is Outcome.PASSED else 7, 1.2345e-5, 1.1111e-6, cases=12)
    return ArchitectureReport(
        architecture,
        CacheFacts((layer or LayerCacheFacts("KVCache"),), 1024, 0),
        (
            ProbeResult("batch_parity", outcome, "", evidence, duration_s=0.1234567),
            ProbeResult("quantized_kv", Outcome.UNSUPPORTED, "nothing to quantise"),
            ProbeResult("mlx_lm_batch", mlx_lm, "", evidence),
        ),
    )


def probe(name: str) -> ArchitectureReport:
    """Do what the name says, before a ``-`` that tells equal ones apart."""
    act = _ACTS.get(name.partition("-")[0])
    if act is not None:
        act()
    if name == "nan":
        return _without_figures(name)
    return made_report("somebody_else" if name == "other" else name)


def _abort() -> None:
    sys.stderr.write("loading /home/somebody/models/tiny.bin\nterminate called\n")
    sys.stderr.flush()
    os.abort()


def _print() -> None:
    """From Python, from C, and by the descriptor."""
    print('{"type":"ready","backend":"printed"}')  # noqa: T201 - what it stands for prints
    ctypes.CDLL(None).puts(b"not a message")
    os.write(1, b"\xff\x00 neither\n")


_ACTS: dict[str, Callable[[], object]] = {
    "abort": _abort,
    "chatter": lambda: sys.stderr.write("noise\n" * 200_000),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: sys.exit("install the optional package"),
    "hang": lambda: time.sleep(600),
    "leave": lambda: os._exit(7),
    "memory": lambda: bytearray(4 * _MAX_MEMORY_BYTES),
    "print": _print,
}


def _without_figures(name: str) -> ArchitectureReport:
    evidence = Evidence(1, float("nan"), float("inf"), cases=1)
    return ArchitectureReport(
        name, results=(ProbeResult("batch_parity", Outcome.FAILED, "", evidence),)
    )


def main() -> None:
    """Stand for a worker."""
    names = sys.argv[1:]
    messages = messages_stream()
    log = os.environ.get(LOG_VARIABLE)
    if log is not None and names:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {' '.join(names)}\n")
    if names[:1] == ["late"]:
        time.sleep(600)
    messages.write(b"garbage\n[1, 2\n" + encode_message(WorkerReady("cpu", "FakeBLAS 1")))
    limit_resources(_MAX_MEMORY_BYTES)
    probe_all(names, probe, messages)


if __name__ == "__main__":
    main()
