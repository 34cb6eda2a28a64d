"""What answers requests imports nothing that computes."""

from __future__ import annotations

import subprocess
import sys

from support.clocks.polling import CEILING_S

_IMPORT = """
import sys
import machd.daemon
print(sorted({"mlx", "mlx.core", "mlx_lm", "transformers", "llguidance"} & set(sys.modules)))
"""


def test_the_daemon_without_an_engine_imports_no_library_of_models() -> None:
    """Neither arrays nor models, tokenizers nor grammars: those come with the engine that it is given."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=True,
    )
    assert done.stdout.strip() == "[]", done.stdout
