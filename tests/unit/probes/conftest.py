"""Models of the prober's tests compute as in the daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_compilation() -> Iterator[None]:
    """Compute as the daemon does."""
    from support.engines.cpu_layers import computing_as_the_daemon  # noqa: PLC0415 - imports mlx

    with computing_as_the_daemon():
        yield
