"""``machd serve`` in a process that also says what it holds: tasks, threads, heap, mlx's counters.

To run one by hand, and to ask it::

    .venv/bin/python tests/support/daemon/observed_daemon.py /tmp/observed.sock serve --port 8080
    .venv/bin/python -c "…observed_daemon import ask; print(ask('/tmp/observed.sock'))"
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from support.clocks.polling import CEILING_S

LEAK_VARIABLE = "MACHD_SOAK_LEAK_COPIES"
"""How often the body of every response is copied into a list that is never emptied; 0 unless set."""

_MALLINFO_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: sums over all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


def ask(path: Path | str, what: str = "counts") -> dict[str, Any]:
    """Counts of an observed daemon; with ``what`` = ``objects``, Python objects by type as well."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CEILING_S)
        connection.connect(str(path))
        connection.sendall(what.encode() + b"\n")
        with connection.makefile("rb") as answer:
            counts: dict[str, Any] = json.loads(answer.read())
            return counts


class _Observer:
    """A thread that answers on a Unix socket with what its process holds."""

    def __init__(self, path: Path) -> None:
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._answer, name="observer", daemon=True).start()

    def watch(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Count the tasks of this event loop."""
        self._event_loop = event_loop

    def _answer(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rwb") as stream:
                what = stream.readline().decode().strip()
                stream.write(json.dumps(self._counts(with_objects=what == "objects")).encode())

    def _counts(self, *, with_objects: bool) -> dict[str, Any]:
        tasks = () if self._event_loop is None else asyncio.all_tasks(self._event_loop)
        counts: dict[str, Any] = {"tasks": len(tasks), **_heap_counts(), **_mlx_counts()}
        if with_objects:
            gc.collect()
            types = Counter(type(one).__qualname__ for one in gc.get_objects())
            counts["objects"] = dict(types.most_common(60))
        return counts


def _heap_counts() -> dict[str, int]:
    """Bytes of the C library's heap: empty unless it is glibc's."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return {}
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return {
        "heap_used_bytes": info.uordblks,
        "heap_free_bytes": info.fordblks,
        "heap_mapped_bytes": info.hblkhd,
    }


def _mlx_counts() -> dict[str, int]:
    mx: Any = sys.modules.get("mlx.core")  # never imported here: the BLAS comes before it
    if mx is None or not hasattr(mx, "get_active_memory"):
        return {}
    return {"mlx_active_bytes": mx.get_active_memory(), "mlx_cache_bytes": mx.get_cache_memory()}


def _plant_leak(copies: int) -> None:
    """Keep the body of every response so many times, as a list that is never emptied would."""
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle  # noqa: PLC0415

    kept: list[bytes] = []
    send = RequestResponseCycle.send

    async def send_and_keep(self: RequestResponseCycle, message: Any) -> None:
        kept.append(bytes(message.get("body", b"")) * copies)
        await send(self, message)

    RequestResponseCycle.send = send_and_keep  # type: ignore[method-assign]


def _main() -> None:
    observer = _Observer(Path(sys.argv[1]))
    sys.argv = ["machd", *sys.argv[2:]]
    from machd.cli.main import main  # noqa: PLC0415 - after the arguments are its own
    from machd.daemon import Daemon  # noqa: PLC0415

    run = Daemon.run

    async def run_observed(self: Daemon) -> None:
        observer.watch(asyncio.get_running_loop())
        await run(self)

    Daemon.run = run_observed  # type: ignore[method-assign]
    if copies := int(os.environ.get(LEAK_VARIABLE, "0")):
        _plant_leak(copies)
    main()


if __name__ == "__main__":
    _main()
