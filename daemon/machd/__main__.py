"""``python -m machd``."""

from machd.cli.main import main

main()
