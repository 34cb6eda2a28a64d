"""Tests of the verdict on several ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from machd.capabilities.distributed import COMPARED_ARCHITECTURES, distributed
from machd.capabilities.verdict import Support

_PAGE = Path(__file__).parents[3] / "docs" / "operating" / "ranks.md"


@pytest.mark.parametrize(
    ("architecture", "modes", "has_vision", "support", "said"),
    [
        ("llama", ("tensor",), False, Support.SUPPORTED, "by tensor"),
        ("qwen2", ("tensor", "pipeline"), False, Support.SUPPORTED, "by tensor and by pipeline"),
        ("qwen3_next", ("pipeline",), False, Support.UNKNOWN, "were not compared"),
        ("mamba", (), False, Support.BLOCKED, "cannot cut mamba"),
        ("qwen3_5", ("tensor",), True, Support.BLOCKED, "with vision"),
    ],
)
def test_verdict_follows_the_ways_that_the_code_knows(
    architecture: str, modes: tuple[str, ...], *, has_vision: bool, support: Support, said: str
) -> None:
    """Blocked without a way to cut, unknown where no rank was compared with one process."""
    verdict = distributed(architecture, modes, has_vision=has_vision)

    assert verdict.support is support
    assert said in verdict.reason


def test_the_page_lists_the_architectures_that_were_compared() -> None:
    """The page about ranks promises what the verdict says."""
    for mode, names in COMPARED_ARCHITECTURES.items():
        row = next(
            line for line in _PAGE.read_text().splitlines() if line.startswith(f"| `{mode}`")
        )
        listed = row.split("|")[3].replace("(and mistral)", "")
        assert set(re.findall(r"\w+", listed)) == names
