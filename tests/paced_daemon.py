"""A daemon in a process of its own, whose scripted model takes 20 ms for a step.

Neither a test's own threads and garbage nor a model's arithmetic stand in its way, so a pause of its
streams is its own doing. As a program it serves until its input ends.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from polling import CEILING_S
from running_daemon import RunningDaemon

from machd.engine.fake import FakeEngine
from machd.engine.mlx_lm_import import import_mlx_lm
from machd.engine.protocol import StepPlan

__all__ = ["PACE_S", "paced_daemon"]

PACE_S = 0.02
_FLAGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 4,
    "continuous_batching.window_ms": 0,
}


@contextmanager
def paced_daemon() -> Iterator[str]:
    """Run the daemon; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.communicate(timeout=CEILING_S)


def _pace(_plan: StepPlan) -> None:
    time.sleep(PACE_S)


def _engine() -> FakeEngine:
    return FakeEngine(before_step=_pace, context_tokens=100_000)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # Made by the first tool call otherwise, in the midst of a measurement; an MLX engine has done it.
    import_mlx_lm()
    with RunningDaemon(_engine, _FLAGS) as daemon:
        # As machd serve does.
        gc.collect()
        gc.freeze()
        print(daemon.url, flush=True)  # noqa: T201
        sys.stdin.read()
