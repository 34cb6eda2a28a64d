"""Row faults in a step's result."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np

from machd.engine.protocol.step import RowFault


def _fail(faults: list[RowFault]) -> weakref.ref[np.ndarray]:
    """Fail twice, the second time because of the first, beside a large array."""
    pixels = np.zeros(1000)
    try:
        try:
            Path("/nowhere").read_bytes()
        except OSError as error:
            raise ValueError("the image") from error
    except ValueError as cause:
        faults.append(RowFault(0, cause))
    return weakref.ref(pixels)


def test_a_fault_that_is_done_with_keeps_no_memory_of_what_failed() -> None:
    """Neither its own traceback nor those of its causes hold arrays; no garbage collection is needed."""
    gc.disable()
    try:
        faults: list[RowFault] = []
        pixels = _fail(faults)
        assert pixels() is not None, "a traceback holds what its functions held"
        faults[0].release_frames()
        assert pixels() is None
    finally:
        gc.enable()
    assert isinstance(faults[0].cause.__cause__, OSError), "what is shown of it stays"
