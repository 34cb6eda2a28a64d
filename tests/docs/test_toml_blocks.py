"""Every settings example on a page is one that machd takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.programs.shown_sessions import fenced_blocks

from machd.errors import SettingsError
from machd.settings.sources import SettingsSources

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("systemd/*.md")])
_NOT_SETTINGS = re.compile(r"<!-- not settings: [^>]+ -->\s*\Z")

BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{line}")
    for page in PAGES
    for line, before, block in fenced_blocks(page, "toml")
    if not _NOT_SETTINGS.search(before)
]


def load(folder: Path, text: str) -> None:
    """Read a text as a settings file, without any variable or flag."""
    file = folder / "machd.toml"
    file.write_text(text, "utf-8")
    SettingsSources(file, {}, {}).load()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_settings_example_is_valid(block: str, tmp_path: Path) -> None:
    """A block of TOML loads as it stands."""
    load(tmp_path, block)


def test_there_are_examples() -> None:
    """The search finds the pages' blocks."""
    assert len(BLOCKS) >= 3


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    """A key that does not exist fails."""
    with pytest.raises(SettingsError):
        load(tmp_path, "[server]\nprot = 1\n")
