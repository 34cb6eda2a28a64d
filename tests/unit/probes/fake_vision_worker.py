"""A worker without mlx for families: the name of a family says what becomes of it."""

from __future__ import annotations

import os
import signal
import sys
import time

from support import module_command

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.matrix import ArchitectureReport
from machd_probes.vision_matrix.catalogue import CHECK_NAMES, SERVED, WINDOW_CHECK
from machd_probes.worker import messages_stream, probe_all
from machd_probes.worker_messages import WorkerReady, encode_message

COMMAND = module_command("unit.probes.fake_vision_worker")


def probe(name: str) -> ArchitectureReport:
    """Make the report of a family."""
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(600)
    if name == "text":
        served = ProbeResult(SERVED, Outcome.UNSUPPORTED, "text alone")
        return ArchitectureReport(name, results=(served,))
    layer = LayerCacheFacts("KVCache")
    if name == "single":
        layer = LayerCacheFacts("RotatingKVCache", window_tokens=8)
    outcome = Outcome.FAILED if name == "wrong" else Outcome.PASSED
    evidence = Evidence(0 if outcome is Outcome.PASSED else 7, 1.2e-5, 1.1e-6, cases=12)
    results = [ProbeResult(check, outcome, "", evidence) for check in CHECK_NAMES]
    if name == "single":
        results = [_without_data(one) if one.probe == WINDOW_CHECK else one for one in results]
    served = ProbeResult(SERVED, Outcome.PASSED)
    return ArchitectureReport(name, CacheFacts((layer,), 1024, 0), (served, *results))


def _without_data(result: ProbeResult) -> ProbeResult:
    return ProbeResult(result.probe, Outcome.NO_DATA, "the window is too wide")


def main() -> None:
    """Stand for a worker."""
    messages = messages_stream()
    messages.write(encode_message(WorkerReady("cpu", "FakeBLAS 1")))
    probe_all(sys.argv[1:], probe, messages)


if __name__ == "__main__":
    main()
