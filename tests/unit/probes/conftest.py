"""Models of the prober's tests compute as in the daemon."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_compilation() -> None:
    """Compute as the daemon does."""
    from support.engines.cpu_layers import compute_as_the_daemon  # noqa: PLC0415 - imports mlx

    compute_as_the_daemon()
