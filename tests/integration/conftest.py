"""Fixtures that files of tests of the HTTP API and of processes ask for."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator

import pytest
from support.daemon.forked_programs import ForkedProgram

from machd_probes import versions

_sources_digest = functools.cache(versions.sources_digest)


@pytest.fixture(name="forked_programs", scope="module")
def _forked_programs() -> Iterator[None]:
    """Have machd's own code start its programs at the cost of a fork, and read its sources once: 0.4 s."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(subprocess, "Popen", ForkedProgram)
        monkeypatch.setattr(versions, "sources_digest", _sources_digest)
        yield
