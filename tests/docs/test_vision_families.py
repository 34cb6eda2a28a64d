"""The page of images lists the families that the daemon serves and those that it refuses."""

from __future__ import annotations

import re
from pathlib import Path

from machd.engine.vision.families import (
    COMPARED_FAMILIES,
    REFUSED_FAMILIES,
    VIDEO_FAMILIES,
    why_refused,
)

_PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "vision.md"


def _tables() -> list[list[str]]:
    """Rows of the two tables of families."""
    section = _PAGE.read_text("utf-8").partition("## Families")[2]
    _, served, refused = re.split(r"^[|-]+$", section, flags=re.MULTILINE)
    return [re.findall(r"^\| `.*$", one, re.MULTILINE) for one in (served, refused)]


def test_the_page_lists_the_families_that_take_images_and_videos() -> None:
    """Each row of the first table is a family of the list, and says video where the daemon takes any."""
    served, _ = _tables()
    rows = {row.split("`")[1]: row.split("|")[2] for row in served}
    assert rows.keys() == COMPARED_FAMILIES
    assert {name for name, takes in rows.items() if "video" in takes} == VIDEO_FAMILIES


def test_the_page_gives_the_reason_of_each_refusal() -> None:
    """The second table has the reasons that the log gives."""
    _, refused = _tables()
    listed = {name for row in refused for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed >= REFUSED_FAMILIES.keys()
    assert not REFUSED_FAMILIES.keys() & COMPARED_FAMILIES
    for name, reason in REFUSED_FAMILIES.items():
        row = next(row for row in refused if f"`{name}`" in row)
        assert reason[1:] in row
        assert why_refused({"model_type": name}) == reason
