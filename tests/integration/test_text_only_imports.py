"""A daemon that takes text only loads nothing of the extra ``vision``."""

from __future__ import annotations

import subprocess
import sys

from support.clocks.polling import CEILING_S

_LOAD = """
import sys
from pathlib import Path
import os
from machd.engine.protocol.progress import SilentProgress
from machd.user_directories import user_cache_directory
from machd.engine.loading.source import resolve_model
from machd.engine.open import engine_loader
from machd.settings.model import Settings
cache_directory = user_cache_directory(os.environ)
load = engine_loader(
    Settings(),
    cache_directory=cache_directory,
    environ={},
    progress=SilentProgress(),
)
engine = load(resolve_model(None, offline=True, cache_directory=cache_directory))
assert engine.media is None
engine.close()
print(sorted({"mlx_vlm", "cv2"} & set(sys.modules)))
"""


def test_text_model_imports_no_vision_module() -> None:
    """The embedded model is loaded without mlx-vlm or OpenCV, which are installed here."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=True,
    )
    assert done.stdout.strip().endswith("[]"), done.stdout
