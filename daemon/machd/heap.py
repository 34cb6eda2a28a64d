"""The C library's heap: its size, and the return of its free pages to the system.

Imports no mlx, so that every layer may use it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import psutil

_MAPPED_BYTES = 1 << 20
"""Allocations of at least this size get a mapping of their own."""

_M_MMAP_THRESHOLD = -3
"""See mallopt(3)."""


def find_heap_trim() -> Callable[[], None] | None:
    """Find the function that returns the heap's free pages; None where the C library has none.

    glibc keeps a free piece of its heap unless it is the last one. Its ``malloc_trim`` gives the
    pages of all free pieces in all arenas back. Any thread may call it; it holds no lock of
    Python's. musl and macOS have no such function.
    """
    if sys.platform != "linux":
        return None
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return None

    def trim() -> None:
        malloc_trim(0)

    return trim


def trim_heap() -> None:
    """Give the heap's free pages back to the system where the C library can. Takes 4 to 70 ms."""
    trim = find_heap_trim()
    if trim is not None:
        trim()


def map_large_arrays() -> None:
    """Make glibc allocate each array of 1 MiB or more with mmap, and return it when it is freed.

    By default glibc raises that threshold up to 32 MiB and keeps freed arrays in its heap. They still
    count against a limit on the address space (``ulimit -v``). A mapping costs two system calls and
    page faults, so call this only in a process that has such a limit. Does nothing without mallopt.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def resident_bytes() -> int:
    """Bytes of physical memory that this process holds."""
    return int(psutil.Process().memory_info().rss)
