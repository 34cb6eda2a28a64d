"""Facts of this installation: versions, extras, how machd is called. Asked of the packages' own records."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as distribution_version
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_SETUP = _CHECKOUT / "scripts" / "setup"


@cache
def installed_version(distribution: str) -> str | None:
    """The version of a distribution, which is not imported; None where it is not installed."""
    try:
        return distribution_version(distribution)
    except PackageNotFoundError:
        return None


def command_name() -> str:
    """Return the word that starts this machd in a shell: ``machd`` where that is on the path, else its path."""
    program = Path(sys.executable).parent / "machd"
    found = shutil.which("machd")
    if found is not None and Path(found).resolve() == program.resolve():
        return "machd"
    if program.is_file():
        return _shown(program)
    return f"{_shown(Path(sys.executable))} -m machd"


def how_to_install(extra: str) -> str:
    """The command that installs an extra of machd into this environment.

    In a checkout's own environment that is ``scripts/setup``, where it knows the extra. Elsewhere the extra's packages
    are named: that works too where machd was installed from a file and its index does not know it.
    """
    has_pins = (_CHECKOUT / "requirements" / f"{extra}.txt").is_file()
    is_own = Path(sys.prefix).resolve() == (_CHECKOUT / ".venv").resolve()
    if has_pins and is_own and _SETUP.is_file():
        return f"{_shown(_SETUP)} --{extra}"
    python = _shown(Path(sys.executable))
    has_pip = importlib.util.find_spec("pip") is not None
    pip = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return " ".join((pip, *(shlex.quote(one) for one in _packages(extra))))


def _packages(extra: str) -> list[str]:
    """The requirements of an extra, without their markers; machd with the extra where no record is."""
    try:
        lines = requires("machd") or []
    except PackageNotFoundError:
        lines = []
    parts = [line.partition(";") for line in lines]
    mark = f"extra == '{extra}'"
    found = [name.strip() for name, _, marker in parts if mark in marker.replace('"', "'")]
    return found or [f"machd[{extra}]"]


def _shown(path: Path) -> str:
    """A path as it is typed here: relative where it lies below the current directory."""
    here = Path.cwd()
    is_below = path.is_relative_to(here) and here != here.parent
    return shlex.quote(str(path.relative_to(here) if is_below else path))
