"""What files of tests of the HTTP API and of processes ask for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from support.daemon.forked_programs import ForkedProgram


@pytest.fixture(name="forked_programs", scope="module")
def _forked_programs() -> Iterator[None]:
    """Have machd's own code start its programs at the cost of a fork."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(subprocess, "Popen", ForkedProgram)
        yield
