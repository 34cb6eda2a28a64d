"""Every test here runs where no settings of this machine are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from machd.settings.keys import ENVIRONMENT_PREFIX
from machd.settings.sources import process_environ


@pytest.fixture(autouse=True)
def _no_settings_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder is the working folder and the home, and no variable of ours is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name in process_environ():
        if name.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(name)
