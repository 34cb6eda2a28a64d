"""The clients on the pages of ``docs/clients/``, and an environment in which their blocks are run as they stand.

A client has a page, or a section of a page of several. Its steps are its Python programs and those
of its console blocks that a comment leaves to ``tests/integration/clients``. They run as
subprocesses, in the page's order, with variables and a home directory of their own, and reach no
host but this one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.programs.shown_sessions import (
    Session,
    Step,
    Terminal,
    fenced_blocks,
    reason_not_run,
    sessions,
)

ROOT = Path(__file__).resolve().parents[3]
CLIENT_PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
PAGES_OF_SEVERAL = ("agents", "front-ends", "libraries", "tools")
"""Pages with a section for each client; any other page but the overview is one client's."""

CLIENT_PROGRAMS = ROOT / ".venv-clients" / "bin"

_RUN_HERE = "tests/integration/clients runs it"
_NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there: a client that calls another host through this proxy fails at once."""


@dataclass(frozen=True, slots=True)
class Client:
    """What a reader needs of one client.

    Attributes:
        name: The page's name, or the section's anchor.
        page: The page that it is on.
        target: Of a link from the overview.
        lines: Of the page, those that are about it, the first one 1.
        text: Those lines.
    """

    name: str
    page: Path
    target: str
    lines: range
    text: str


def clients() -> list[Client]:
    """Return every client that has a page or a section, in the order of the pages."""
    pages = [page for page in CLIENT_PAGES if page.stem != "README"]
    return [client for page in pages for client in _clients(page)]


def needs_clients() -> pytest.MarkDecorator:
    """Skip a test where ``make clients`` has not run; on CI it fails, because a skip proves nothing."""
    return pytest.mark.skipif(
        not (CLIENT_PROGRAMS / "python").exists() and "CI" not in os.environ,
        reason=".venv-clients is missing: `make clients` makes it",
    )


def client_steps(client: Client) -> list[Step]:
    """Return the commands and programs of a client that are run, each with the output it shows."""
    return list(_steps(client))


def client_terminal(folder: Path, url: str, programs: Path = CLIENT_PROGRAMS) -> Terminal:
    """Open a shell whose programs are those of one environment, with the daemon at ``url``.

    Args:
        folder: The working directory and the home directory.
        url: What stands behind the pages' 127.0.0.1:8080.
        programs: The environment's ``bin``.
    """
    # A key or an address in a developer's own shell changes nothing here.
    return Terminal(
        folder,
        stand_ins={"127.0.0.1:8080": urlsplit(url).netloc},
        variables={
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _NOWHERE),
            "NO_PROXY": "127.0.0.1",
        },
    )


def own_programs() -> Path:
    """Return the ``bin`` of the environment that the tests run in."""
    return Path(sys.executable).parent


def _clients(page: Path) -> Iterator[Client]:
    lines = page.read_text("utf-8").splitlines()
    end = len(lines) + 1
    if page.stem not in PAGES_OF_SEVERAL:
        yield Client(page.stem, page, page.name, range(1, end), "\n".join(lines))
        return
    starts = [number for number, line in enumerate(lines, 1) if line.startswith("## ")]
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        anchor = re.sub(r"[^\w\- ]", "", lines[start - 1][3:].lower()).replace(" ", "-")
        text = "\n".join(lines[start - 1 : stop - 1])
        yield Client(anchor, page, f"{page.name}#{anchor}", range(start, stop), text)


def _steps(client: Client) -> Iterator[Step]:
    page = client.page
    sessions_run = {
        one.line: one for one in sessions(page) if one.line in client.lines and _is_run_here(one)
    }
    programs = {
        line: block
        for line, before, block in fenced_blocks(page, "python")
        if line in client.lines and reason_not_run(before) is None
    }
    outputs = {
        line: block.strip()
        for line, _, block in fenced_blocks(page, "text")
        if line in client.lines
    }
    lines = sorted([*sessions_run, *programs, *outputs])
    for line, next_line in zip_longest(lines, lines[1:]):
        if line in sessions_run:
            yield from sessions_run[line].steps
        elif line in programs:  # the text block after a program is what it prints
            yield Step(_python(programs[line]), outputs.get(next_line or 0, ""))


def _is_run_here(session: Session) -> bool:
    return session.not_run is not None and session.not_run.startswith(_RUN_HERE)


def _python(program: str) -> str:
    return f"python - <<'END_OF_PROGRAM'\n{program}END_OF_PROGRAM"
