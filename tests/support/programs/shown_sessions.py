"""Command lines on pages, and the answers that the pages show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.clocks.polling import CEILING_S
from support.daemon.forked_shells import forked_in_shells

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")
_QUOTED = re.compile(r"""'[^']*'|"[^"$`\\]*\"""")
_MAY_GO_ON = re.compile(r"""['"`(){}\\<]|[|&]\s*$|\b(?:if|for|while|until|case|select|do|then)\b""")
_SHELLS = {"console", "sh", "bash", "shell"}


@dataclass(frozen=True, slots=True)
class Step:
    """One command line, and the output shown below it; empty where none is shown."""

    command: str
    shown: str


@dataclass(frozen=True, slots=True)
class Session:
    """A fenced block of commands.

    Attributes:
        line: Of the page, where the block begins.
        not_run: Why no test runs it, in the page's own comment; None for one that is run.
    """

    line: int
    steps: tuple[Step, ...]
    not_run: str | None


class Terminal:
    """A shell of a reader: a folder and variables that last, a daemon at the addresses of the pages."""

    def __init__(
        self,
        folder: Path,
        *,
        stand_ins: Mapping[str, str],
        environ: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Use a daemon that runs.

        Args:
            folder: Where commands begin.
            stand_ins: What a command gets for an address or a path that pages name.
            environ: What ``machd ctl`` needs to find the daemon.
            variables: Every variable that commands get; None for those of this process, without
                machd's own, and with this environment's programs first in PATH.
        """
        self._folder = folder
        self._stand_ins = stand_ins
        self._environ = environ or {}
        self._own_variables = variables

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and both streams, with what pages name in place of what stood in for it."""
        for shown, real in self._stand_ins.items():
            command = command.replace(shown, real)
        kept = shlex.quote(str(self._folder.with_suffix(".variables")))
        keep = f"{{ export -p | grep -v LME_; printf 'cd %q\\n' \"$PWD\"; }} > {kept}"
        script = f". {kept} 2>&-; set -a\n{command}\nstatus=$?; {keep}; exit $status"
        folder, inherited = forked_in_shells()
        result = subprocess.run(
            ["bash", "-c", script],
            cwd=self._folder,
            pass_fds=inherited,
            env=self._variables(folder, "machd ctl" in command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CEILING_S,
            check=False,
        )
        output = result.stdout
        for shown, real in self._stand_ins.items():
            output = output.replace(real, shown)
        return result.returncode, output

    def _variables(self, folder: Path, needs_daemon: bool) -> dict[str, str]:  # noqa: FBT001 - read one line above
        if self._own_variables is not None:
            return dict(self._own_variables)
        outer = {name: one for name, one in os.environ.items() if not name.startswith("LME_")}
        path = os.pathsep.join(
            map(str, (folder, Path(sys.executable).parent, outer.get("PATH", "")))
        )
        return {**outer, "PATH": path, "COLUMNS": "120", **(self._environ if needs_daemon else {})}


def fenced_blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """The fenced blocks of some languages: line, the text before the block, what is in it."""
    text = page.read_text("utf-8")
    for fence in _FENCE.finditer(text):
        if fence[2] in languages:
            yield text.count("\n", 0, fence.start()) + 1, text[: fence.start()], fence[3]


def reason_not_run(before: str) -> str | None:
    """Return why the block behind a text is not run; None where the text does not say so."""
    mark = _NOT_RUN.search(before)
    return None if mark is None else mark[1]


def sessions(page: Path) -> Iterator[Session]:
    """Every block of commands on a page."""
    for line, before, block in fenced_blocks(page, *_SHELLS):
        yield Session(line, tuple(_steps(block)), reason_not_run(before))


def is_as_shown(shown: str, output: str) -> bool:
    """Return whether an output is what the page shows.

    Spaces and line breaks are free, numbers, durations, dates and ids are any, ``…`` stands for
    anything.
    """
    pattern = ".*?".join(re.escape(part) for part in _plain(shown).split("…"))
    return re.fullmatch(pattern, _plain(output), re.DOTALL) is not None


def _steps(block: str) -> Iterator[Step]:
    """Commands with what follows them; without a prompt the block is one script."""
    if not re.search(r"^\$ ", block, re.MULTILINE):
        yield Step(block, "")
        return
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = 1
        while length < len(lines) and not _is_whole("\n".join(lines[:length])):
            length += 1
        yield Step("\n".join(lines[:length]), "\n".join(lines[length:]).strip())


def _is_whole(command: str) -> bool:
    """Return whether the shell would not wait for more."""
    if command.endswith("\\"):
        return False
    if not _MAY_GO_ON.search(_QUOTED.sub("_", command)):
        return True
    result = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return result.returncode == 0 and b"here-document" not in result.stderr


def _plain(text: str) -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    text = re.sub(r"(?:\d+ min )?\d+(?:\.\d+)? m?s\b", "0 s", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"[0-9a-f]{16,}", "0", text)
    return re.sub(r"\d+(?:[.,:]\d+)*", "0", text)
