"""``machd ctl`` and its like at the cost of a fork: importing what they need takes a second each time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support.clocks.polling import CEILING_S
from support.daemon.forked_programs import ForkedProgram


def run_machd(
    arguments: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command of machd to its end.

    Args:
        arguments: The command line after ``machd``.
        environ: Added to this process's variables, from which machd's own are left out.
        stdin: What it reads.

    Raises:
        TimeoutExpired: It takes longer than ``CEILING_S``; its streams so far are in it.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LME_")}
    with ForkedProgram(
        [sys.executable, "-P", "-m", "machd", *arguments],
        env={**clean, **(environ or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin or "", CEILING_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(["machd", *arguments], process.returncode, stdout, stderr)
