"""Free pieces of the C library's heap go back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from polling import CEILING_S

from machd.engine.heap import find_heap_trim

_PROGRAM = """
from machd.engine.heap import resident_bytes, trim_heap

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
    """Of 100 MB with every fiftieth piece in use, freeing gives little back and a trim over half."""
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
