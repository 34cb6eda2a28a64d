"""What is so on the CPU alone: machd's own layers, and models that are not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

from machd.engine.backend.device import backend_name

for_cpu_layers = pytest.mark.skipif(
    backend_name() != "cpu", reason="on a GPU mlx-lm's own layers compute"
)


@contextmanager
def computing_as_the_daemon() -> Iterator[None]:
    """Switch mlx's compilation off on the CPU; a C++ compiler would take seconds for each activation."""
    if backend_name() == "cpu":
        mx.disable_compile()
    yield
    mx.enable_compile()  # whatever else has switched it off
