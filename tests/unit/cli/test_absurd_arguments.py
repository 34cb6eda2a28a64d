"""Arguments of absurd length and files that are none: exit code 2 and a short line."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from machd.cli.commands import run
from machd.cli.ctl_client import AdminAddress

DIGITS = "9" * 5_000
LONG_PATH = f"/{'a' * 100_000}"
LONG_NAME = f"/{'a' * 300}"


@pytest.fixture(name="_logs_as_before", autouse=True)
def _logs_as_before_() -> Iterator[None]:
    """A command sends log lines to the standard error of its moment, which a test's capture closes."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def _scratch_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command gives mlx a scratch directory of its own, in which later tests would make their files."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", LONG_PATH),
        ("check", LONG_PATH),
        ("check", LONG_NAME),
        ("serve", "--engine-blas", LONG_PATH),
        ("serve", "--cache-disk-dir", LONG_PATH),
        ("serve", "--auth-api-keys-file", LONG_PATH),
        ("serve", "--admin-listen", f"unix:{LONG_PATH}"),
        ("config", "show", "--config", LONG_PATH),
        ("config", "show", "--server-port", DIGITS),
        ("config", "check", LONG_NAME),
        ("config", "init", LONG_PATH),
        ("ctl", "status", "--address", f"unix:{LONG_PATH}"),
        ("ctl", "status", "--address", f"127.0.0.1:{DIGITS}"),
        ("ctl", "cache", "warm", LONG_PATH),
    ],
    ids=lambda arguments: f"{' '.join(one[:30] for one in arguments)} ({len(arguments[-1])})",
)
def test_absurd_argument_is_a_short_line_and_exit_code_2(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback, no code 70, and no line of 100,000 characters."""
    monkeypatch.setattr(sys, "argv", ["machd", *arguments])

    assert run() == 2

    stderr = capsys.readouterr().err
    assert stderr
    assert len(stderr) < 1500


@pytest.mark.parametrize("command", [("config", "check"), ("ctl", "cache", "warm")])
@pytest.mark.parametrize("kind", ["pipe", "endless device"])
def test_commands_do_not_wait_for_a_file_without_an_end(
    command: tuple[str, ...],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pipe without a writer and /dev/zero are refused with a line that says why."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    file = str(path) if kind == "pipe" else "/dev/zero"
    monkeypatch.setattr(sys, "argv", ["machd", *command, file])

    assert run() == 2

    assert "it is not a regular file" in capsys.readouterr().err


def test_endless_line_of_prompts_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard input without a line end is read no further than the daemon takes a body."""
    monkeypatch.setattr("machd.cli.ctl_cache.MAX_WARM_BODY_BYTES", 100)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(1000))))
    monkeypatch.setattr(sys, "argv", ["machd", "ctl", "cache", "warm", "-"])

    assert run() == 2

    assert "a line is longer than 100 bytes" in capsys.readouterr().err


def test_port_of_5000_digits_is_no_address() -> None:
    """The refusal is the one for any other wrong port."""
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        AdminAddress.of(f"127.0.0.1:{DIGITS}")
