"""The import of mlx-lm changes nothing else in the process."""

from __future__ import annotations

import json
import subprocess
import sys

from support.clocks.polling import CEILING_S


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    """mlx-lm lowers the hard limit for the whole process; a daemon keeps what it was given."""
    program = (
        "import json, resource\n"
        "from machd.engine.backend.mlx_lm_import import import_mlx_lm\n"
        "given = (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, given)\n"
        "setter = resource.setrlimit\n"
        "import_mlx_lm()\n"
        "assert resource.setrlimit is setter\n"
        "print(json.dumps([given, resource.getrlimit(resource.RLIMIT_NOFILE)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
    )
    given, kept = json.loads(done.stdout)
    assert kept == given
