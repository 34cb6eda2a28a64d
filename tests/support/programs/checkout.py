"""A checkout whose environment is this one's: ``scripts/setup`` runs in it and nothing is installed."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.clocks.polling import CEILING_S

_UV = """#!/bin/sh
# Stands in for uv: writes down its variables, fails where a test says so, and links this environment.
env >> "$RECORD"
[ -z "$UV_FAILS" ] || { printf '%s\\n' "$UV_FAILS" >&2; exit 2; }
case "$1" in venv)
  mkdir -p .venv/bin
  for name in lib lib64 pyvenv.cfg; do ln -sfn "$ENVIRONMENT/$name" ".venv/$name"; done
  ln -sf "$ENVIRONMENT/bin/python" .venv/bin/python
  printf '#!%s\\nfrom machd.cli.main import main\\nmain()\\n' "$PWD/.venv/bin/python" > .venv/bin/machd
  chmod +x .venv/bin/machd
esac
echo "Prepared 63 packages in 13.52s" >&2
echo " + numpy==2.4.0" >&2
"""


class Checkout:
    """What ``make`` and ``scripts/setup`` read, and a uv that installs nothing."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Copy it.

        Args:
            root: The checkout that is copied.
            folder: Where to; empty.
        """
        self.folder = folder / "checkout"
        self._record = folder / "record"
        programs = folder / "programs"
        programs.mkdir()
        for name, text in (("uv", _UV), ("dpkg", "#!/bin/sh\n")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in ("scripts", "requirements"):
            shutil.copytree(root / name, self.folder / name)
        for name in ("pyproject.toml", "Makefile"):
            shutil.copy2(root / name, self.folder)
        self._variables = {
            "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "PIP_CONFIG_FILE": os.devnull,
            "RECORD": str(self._record),
            "ENVIRONMENT": sys.prefix,
        }

    def setup(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script to its end."""
        return subprocess.run(
            [self.folder / "scripts" / "setup", *arguments],
            env={**self._variables, **variables},
            capture_output=True,
            text=True,
            timeout=CEILING_S,
            check=False,
        )

    def variables_of_uv(self) -> dict[str, str]:
        """The variables of uv's last run."""
        lines = self._record.read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def on_terminal(self, command: str, last_line: str, **variables: str) -> str:
        """Run a command in the checkout on a terminal up to a line, as ``text_on_terminal`` does.

        The current machd is not on the path, as in a fresh clone.
        """
        programs = self._variables["PATH"].partition(":")[0]
        python_path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        environ = {
            **self._variables,
            **python_path,
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHON": sys.executable,
            **variables,
        }
        return text_on_terminal(command, last_line, folder=self.folder, environ=environ)


def text_on_terminal(
    command: str,
    last_line: str,
    *,
    folder: Path,
    environ: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> str:
    """Run a command on a terminal of 100 columns, end it with Ctrl-C after a line, and return the text up to it.

    Args:
        command: What bash runs.
        last_line: The end of the text that is waited for.
        folder: Where the command begins.
        environ: Every variable that it gets, but for ``TERM``.
        descriptors: What it inherits.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**environ, "TERM": "dumb"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        pass_fds=descriptors,
        start_new_session=True,
    )
    os.close(follower)
    text = ""
    try:
        while last_line not in text and (piece := _read(leader)):
            text += piece
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        while _read(leader):
            pass
        process.wait(CEILING_S)
        os.close(leader)
    assert last_line in text, text
    return text[: text.index(last_line) + len(last_line)]


def _read(leader: int) -> str:
    """The next piece of what a terminal shows; empty at its end."""
    ready, _, _ = select.select([leader], [], [], CEILING_S)
    assert ready, "nothing was shown"
    try:
        return os.read(leader, 65536).decode(errors="replace")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return ""
