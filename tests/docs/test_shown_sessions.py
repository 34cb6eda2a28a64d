"""Command lines on pages are run, and answer as the pages show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.clocks.polling import CEILING_S
from support.daemon.forked_shells import forked_in_shells
from support.daemon.serve_process import ServeProcess
from support.programs.checkout import Checkout, text_on_terminal
from support.programs.shown_sessions import Session, Terminal, fenced_blocks, is_as_shown, sessions

from machd.user_directories import user_cache_directory

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("systemd/*.md")])
SHOWN = {page: [one for one in sessions(page) if one.not_run is None] for page in PAGES}
MAKES = "make serve"
"""Runs until Ctrl-C, in a checkout and an environment of its own."""
SERVES = "machd serve"
"""Runs until Ctrl-C, where machd is on the path."""
INSTALLS = "uv tool install "
"""The README's first command. No test downloads packages: it has to be the line of the page that says how to install."""
RUN = {
    page: [
        one
        for one in shown
        if one.steps[0].command not in {MAKES, SERVES}
        and not (page.name == "README.md" and one.steps[0].command.startswith(INSTALLS))
    ]
    for page, shown in SHOWN.items()
}
PAGES_WITH_SESSIONS = [page for page, run in RUN.items() if run]


RUNNABLE = {"machd", "curl", "printf", "chmod", "mkdir"}
"""What a page may have a test run; anything else is marked as not run."""

_ASSIGNMENTS = re.compile(r"(?:[A-Z_]+=(?:\$\([^)]*\)|[^\s;]*)(?:;? |$))*")


def name_of(path: Path) -> str:
    """A page as a failing test names it."""
    return str(path.relative_to(ROOT))


@pytest.fixture(name="token_file", scope="module")
def _token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token of the admin API, readable by its owner alone."""
    path = tmp_path_factory.mktemp("admin") / "admin-token"
    path.write_text("a-token-of-the-tests-0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.fixture(name="daemon", scope="module")
def _daemon(token_file: Path, embedded_model_path: Path) -> Iterator[ServeProcess]:
    """The real daemon, as ``machd serve`` starts it, with the embedded default."""
    assert embedded_model_path.is_file()
    config = token_file.with_name("machd.toml")
    config.write_text("")
    with ServeProcess(
        "--config", str(config), "--admin-listen", "127.0.0.1:0",
        "--auth-admin-token-file", str(token_file),
    ) as process:  # fmt: skip
        yield process


@pytest.fixture(name="terminal")
def _terminal(daemon: ServeProcess, token_file: Path, tmp_path: Path) -> Terminal:
    """A reader's shell in a folder with nothing but the admin token."""
    shutil.copy2(token_file, tmp_path / "admin-token")
    listening = next(one for one in daemon.events if one["event"] == "daemon.listening")
    admin_address = urlsplit(str(listening["admin_url"])).netloc
    return Terminal(
        tmp_path,
        stand_ins={
            "127.0.0.1:8080": urlsplit(daemon.url).netloc,
            "127.0.0.1:8081": admin_address,
            "~/.cache/machd/run/admin-8081.token": str(token_file),
        },
        environ={"LME_ADMIN_LISTEN": admin_address, "LME_AUTH_ADMIN_TOKEN_FILE": str(token_file)},
    )


@pytest.mark.parametrize("page", PAGES_WITH_SESSIONS, ids=name_of)
def test_a_pages_commands_answer_as_it_shows(page: Path, terminal: Terminal) -> None:
    """Commands of a page, one after the other in one folder, print what stands below them."""
    for session in RUN[page]:
        for step in session.steps:
            assert is_harmless(step.command), step.command
            status, output = terminal.run(step.command)
            where = f"{name_of(page)}:{session.line}\n$ {step.command}\n"
            if step.shown:
                assert is_as_shown(step.shown, output), f"{where}{output}"
            else:
                assert status == 0, f"{where}{output}"


def test_make_serve_shows_what_the_start_page_shows(
    tmp_path: Path, embedded_model_path: Path
) -> None:
    """From a fresh checkout to the last line of the banner, on a terminal."""
    assert embedded_model_path.is_file()
    shown = Checkout(ROOT, tmp_path).on_terminal(MAKES, "stops.", **served_variables())

    assert_shown_where_it_begins(MAKES, {"start.md"}, shown)


def test_machd_serve_shows_what_the_readme_shows(tmp_path: Path, embedded_model_path: Path) -> None:
    """An installed machd prints the banner of the README, on a terminal."""
    assert embedded_model_path.is_file()
    outer = {name: one for name, one in os.environ.items() if not name.startswith("LME_")}
    programs, descriptors = forked_in_shells()
    path = f"{programs}:{Path(sys.executable).parent}:{outer.get('PATH', '')}"
    shown = text_on_terminal(
        SERVES,
        "stops.",
        folder=tmp_path,
        environ={**outer, "PATH": path, **served_variables()},
        descriptors=descriptors,
    )

    assert_shown_where_it_begins(SERVES, {"README.md"}, shown)


def served_variables() -> dict[str, str]:
    """What a daemon gets that takes free ports, and the cache with the default model."""
    return {
        "XDG_CACHE_HOME": str(user_cache_directory(os.environ)),
        "LME_SERVER_PORT": "0",
        "LME_ADMIN_LISTEN": "127.0.0.1:0",
    }


def assert_shown_where_it_begins(command: str, pages: set[str], output: str) -> None:
    """Assert that the pages with a block of this command are those, and show this output."""
    served = [
        (page, one.steps[0], one.line)
        for page, shown in SHOWN.items()
        for one in shown
        if one.steps[0].command == command
    ]
    assert {page.name for page, _, _ in served} == pages
    for page, step, line in served:
        assert is_as_shown(step.shown, output), f"{name_of(page)}:{line}\n{output}"


def test_the_readme_installs_with_a_line_of_the_install_page() -> None:
    """The README's line to install is on the page that explains it, with an extra that the package has."""
    (line,) = [
        step.command
        for one in SHOWN[ROOT / "README.md"]
        for step in one.steps
        if step.command.startswith(INSTALLS)
    ]
    explained = {
        step.command
        for one in sessions(ROOT / "docs" / "operating" / "install.md")
        for step in one.steps
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.fullmatch(r'uv tool install "([\w-]+)\[([\w-]+)\]"', line)

    assert line in explained
    assert named is not None
    assert named[1] == project["name"]
    assert named[2] in project["optional-dependencies"]


def test_every_block_of_the_readme_is_run() -> None:
    """No block of the README is left out: each is run, but for the line to install."""
    blocks = list(sessions(ROOT / "README.md"))

    assert [one.line for one in blocks if one.not_run is not None] == []
    assert len(blocks) - len(RUN[ROOT / "README.md"]) == len([INSTALLS, SERVES])


@pytest.mark.parametrize("page", PAGES_WITH_SESSIONS, ids=name_of)
def test_what_is_run_is_harmless(page: Path) -> None:
    """A block that installs, serves or stops something is marked as not run."""
    commands = [step.command for session in RUN[page] for step in session.steps]
    harmful = [one for one in commands if not is_harmless(one)]

    assert harmful == [], "put <!-- not run: REASON --> on the line above the block"


def is_harmless(command: str) -> bool:
    """Return whether a command begins with one that may be run, after its variables, and ends by itself."""
    rest = _ASSIGNMENTS.sub("", command, count=1).split()
    return not rest or (rest[0] in RUNNABLE and rest[:2] != ["machd", "serve"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_says_why(page: Path) -> None:
    """A block that no test runs has a comment above it with a reason in words."""
    reasons = [one.not_run for one in sessions(page) if one.not_run is not None]

    assert [one for one in reasons if len(one.split()) < 3] == []


def test_only_what_a_test_cannot_run_is_left_out() -> None:
    """Commands that need nothing but the daemon are run: a block that is left out needs more."""
    harmless = re.compile(r"^(?:curl -s|machd ctl|machd config|machd version)")
    left_out = [
        f"{name_of(page)}:{session.line}"
        for page in PAGES
        for session in sessions(page)
        if session.not_run is not None
        and all(harmless.match(step.command) for step in session.steps)
        and not needs_more(session)
    ]

    assert left_out == []


def needs_more(session: Session) -> bool:
    """Return whether a block's reason is one of those that commands without side effects may have."""
    return any(
        word in (session.not_run or "") for word in ("stands for", "another host", "a key", "root")
    )


def test_a_wrong_output_is_noticed() -> None:
    """Numbers and spaces are free, words are not, and an ellipsis is one only where it stands."""
    assert is_as_shown('{"a": 1, …}', '{"a":25,\n "b": "x"}')
    assert is_as_shown("2026-11-22T01:02:03Z ready", "2025-01-01T00:00:00Z  ready\n")
    assert is_as_shown("up 8 s, 1 slot", "up 1 min 41 s, 1 slot")
    assert not is_as_shown('{"a": 1}', '{"b":1}')
    assert not is_as_shown("ready", "ready, but more")
    assert not is_as_shown("… done", "failed")


def test_the_python_of_the_start_page_runs(daemon: ServeProcess, tmp_path: Path) -> None:
    """The start page's program, as it stands there, prints what the page says it prints."""
    blocks = [block for _, _, block in fenced_blocks(ROOT / "docs" / "start.md", "python")]
    program = tmp_path / "start.py"
    text = "\n".join(blocks).replace("127.0.0.1:8080", urlsplit(daemon.url).netloc)
    program.write_text(text, "utf-8")

    result = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )

    lines = result.stdout.splitlines()
    assert lines[:2] == ["The capital of France is Paris."] * 2, result.stderr
    assert lines[2] == "name='Paris' country='France'"
