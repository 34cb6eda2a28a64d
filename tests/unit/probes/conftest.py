"""Models of the prober's tests compute as in the daemon, and sources are hashed once where they do not change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from machd_probes import versions

_digest_once = cache(versions.sources_digest)


@pytest.fixture(autouse=True, scope="module")
def _without_compilation() -> Iterator[None]:
    """Compute as the daemon does."""
    from support.engines.cpu_layers import computing_as_the_daemon  # noqa: PLC0415 - imports mlx

    with computing_as_the_daemon():
        yield


@pytest.fixture
def one_digest_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash the sources once for all tests: reading and parsing them takes half a second."""
    monkeypatch.setattr(versions, "sources_digest", _digest_once)
