"""Log lines about the disk tier's directory when an engine is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S
from support.engines.block_samples import content_of, file_of, saved_block
from unit.engine.tiny_llama import TinyLlama

from machd.engine.loading.loader import load_model
from machd.engine.open import _engine
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.key import block_key
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

_OPEN = """
import sys
from pathlib import Path
from machd.engine.open import engine_loader
from machd.engine.backend.progress import SilentProgress
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings
is_on, directory, cache_directory = sys.argv[1:]
settings = Settings(cache=CacheSettings(prefix=is_on == "on", disk_dir=directory or None))
engine_loader(
    settings, cache_directory=Path(cache_directory), set_variable=lambda *_: None,
    progress=SilentProgress(),
)
"""


@pytest.mark.parametrize(("prefix", "directory"), [("off", "b"), ("on", "b"), ("off", "")])
def test_directory_without_a_prefix_cache_is_warned_of(
    tmp_path: Path, prefix: str, directory: str
) -> None:
    """The log says so before anything is loaded; neither setting alone is wrong."""
    path = str(tmp_path / directory) if directory else ""
    # A process of its own, because preparing for mlx chooses a BLAS for the whole process.
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, prefix, path, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=CEILING_S,
    )  # fmt: skip
    is_warned = "blocks.not_used" in done.stdout + done.stderr
    assert is_warned is ((prefix, directory) == ("off", "b"))


def test_damaged_files_are_warned_of(tmp_path: Path, tiny: TinyLlama) -> None:
    """Damaged files that are found at the start are logged as those that are read later."""
    loaded = load_model(tiny.source)
    root, key, saved = tmp_path / "blocks", block_key(loaded), saved_block(1)
    settings = Settings(cache=CacheSettings(disk_dir=str(root)))
    for count in (0, 1):
        files = DiskTier(root, key)
        files.save(saved, content_of(saved))
        files.close(10)
        if count:
            file_of(root, key, saved).write_bytes(b"not a block")
        with capture_logs() as lines:
            _engine(loaded, settings, root).close()
        warned = [one for one in lines if one["event"] == "blocks.damaged"]
        assert [(one["count"], one["log_level"]) for one in warned] == [(1, "warning")] * count
