"""Free pieces of the C library's heap go back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.clocks.polling import CEILING_S

from machd.heap import find_heap_trim

_PROGRAM = """
from machd.heap import resident_bytes, trim_heap

pieces = [bytes(5000) for _ in range(20_000)]
kept = pieces[::50]
full_bytes = resident_bytes()
del pieces
freed_bytes = resident_bytes()
trim_heap()
print(full_bytes, freed_bytes, resident_bytes())
"""


@pytest.mark.skipif(find_heap_trim() is None, reason="this C library has no malloc_trim")
def test_trim_gives_free_pieces_back_when_used_ones_lie_between() -> None:
    """Freeing all but every fiftieth piece of 100 MB returns little memory, and a trim over half."""
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=CEILING_S,
    )
    full_bytes, freed_bytes, trimmed_bytes = map(int, run.stdout.split())
    assert full_bytes - freed_bytes < 20_000_000
    assert freed_bytes - trimmed_bytes > 50_000_000


_ARRAYS = """
import sys
import psutil
from machd.heap import map_large_arrays

def taken_bytes():
    return psutil.Process().memory_info().vms

if sys.argv[1] == "mapped":
    map_large_arrays()
before_bytes = taken_bytes()
bytearray(8 << 20)  # the C library learns from its end that such pieces are for the heap
arrays, small = [], []
for _ in range(20):
    arrays.append(bytearray(8 << 20))
    small.append(bytearray(100_000))
del arrays
print(taken_bytes() - before_bytes)
"""


@pytest.mark.skipif(find_heap_trim() is None, reason="this C library is not glibc")
@pytest.mark.parametrize(("way", "is_kept"), [("mapped", False), ("learnt", True)])
def test_large_arrays_give_their_addresses_back(way: str, *, is_kept: bool) -> None:
    """160 MB freed between small pieces return to the system at once; without the call none does."""
    run = subprocess.run(
        [sys.executable, "-c", _ARRAYS, way],
        capture_output=True,
        text=True,
        check=True,
        timeout=CEILING_S,
    )
    taken_bytes = int(run.stdout)
    assert taken_bytes > 150_000_000 if is_kept else taken_bytes < 20_000_000
