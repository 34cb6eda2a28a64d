"""A worker without mlx for encoders: the name of an encoder says what becomes of it."""

from __future__ import annotations

import os
import signal
import sys
import time

from support import module_command

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd_probes.encoder_matrix.catalogue import BATCH_CHECK, KERNELS_CHECK, POOLING_CHECK
from machd_probes.worker import messages_stream, probe_all
from machd_probes.worker_messages import WorkerReady, encode_message

COMMAND = module_command("unit.probes.fake_encoder_worker")
RIGHT, WRONG, CRASHING, NOT_BUILT, HANGING = "bert", "qwen3", "mistral", "modernbert", "qwen2"
CLASSIFIER = "bert-reranker"


def probe(name: str) -> ArchitectureReport:
    """Make the report of an encoder."""
    if name == CRASHING:
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == HANGING:
        time.sleep(600)
    if name == NOT_BUILT:
        return ArchitectureReport(name, problem="the extra vision is not installed")
    outcome = Outcome.FAILED if name == WRONG else Outcome.PASSED
    gap = 0.25 if name == WRONG else 2.5e-12
    evidence = Evidence(0, 0.0, 0.0, cases=20, max_cosine_gap=gap)
    if name == CLASSIFIER:
        evidence = Evidence(0, 0.0, 0.0, cases=20, max_logit_diff=3e-6)
    detail = "in one pass, texts of 7 tokens differ" if name == WRONG else ""
    results = (
        ProbeResult(BATCH_CHECK, outcome, detail, evidence),
        ProbeResult(POOLING_CHECK, Outcome.PASSED, "", evidence),
        ProbeResult(KERNELS_CHECK, Outcome.UNSUPPORTED, "none here"),
    )
    return ArchitectureReport(name, results=results)


def main() -> None:
    """Stand for a worker."""
    messages = messages_stream()
    messages.write(encode_message(WorkerReady("cpu", "FakeBLAS 1")))
    probe_all(sys.argv[1:], probe, messages)


if __name__ == "__main__":
    main()
