"""The mark of tests of layers that machd has for the CPU alone."""

from __future__ import annotations

import pytest

from machd.engine.backend.device import backend_name

for_cpu_layers = pytest.mark.skipif(
    backend_name() != "cpu", reason="on a GPU mlx-lm's own layers compute"
)
