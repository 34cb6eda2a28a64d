"""The manual page has every command, and roff reads it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from support.clocks.polling import CEILING_S
from support.programs.installed_programs import needs_programs, path_of

from machd.cli.commands import command_line
from machd.settings.keys import setting_keys

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "man" / "machd.1"


@needs_programs("groff")
def test_roff_warns_of_nothing_and_shows_every_command_and_setting() -> None:
    """Text that looks like one of roff's own requests would be missing from what it shows."""
    command = [path_of("groff"), "-man", "-Tutf8", "-ww", str(_PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CEILING_S, check=True)
    assert done.stderr == ""
    shown = "".join(_without_styles(done.stdout).split())
    for name in command_line.list_commands(
        command_line.make_context("machd", [], resilient_parsing=True)
    ):
        assert f"machd{name}" in shown
    for key in setting_keys():
        assert key.flag_names[0] in shown, key.dotted


def _without_styles(text: str) -> str:
    """Text of a terminal without what makes it bold, and with words that were divided at the end of a line joined."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", re.sub(r".\x08", "", text))
    return plain.replace("\u2010\n", "").replace("\u2010", "-")
