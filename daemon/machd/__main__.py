"""``python -m machd``."""

import sys

if not sys.flags.safe_path:
    # Python puts the working directory in front of the installed packages: Python files of a checkpoint
    # in which ``machd serve .`` is called would take their place.
    del sys.path[0]

from machd.cli.main import main

main()
