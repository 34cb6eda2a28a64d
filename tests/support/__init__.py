"""Helpers of the tests, by subject; tests import them as ``support.<subject>.<module>``."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1])


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package as a program; arguments follow it."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {_TESTS!r}); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return (sys.executable, "-c", code)
