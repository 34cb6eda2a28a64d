"""``machd check`` as a process of its own: what it measures may crash a backend, and must not end the bench."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from machd.errors import EngineFaultError


async def check_json(args: Sequence[str]) -> bytes:
    """Run ``machd check --json`` with these arguments, and return what it prints.

    Raises:
        EngineFaultError: It did not leave with exit code 0.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "machd", "check", *args, "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, complaints = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    if process.returncode != 0:
        last = complaints.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise EngineFaultError(f"machd check ended with exit code {process.returncode}: {last}")
    return printed
