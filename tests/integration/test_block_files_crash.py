"""A process that is killed while it writes blocks leaves no file that is read as another block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.engines.block_samples import ROOT, files_in, is_same_content
from support.engines.block_writing import KEY, block_content, block_writers

from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.protocol.blocks import SavedBlock

MAX_CALLS = 60
"""Calls of the operating system that change files: a block takes three, and one for each piece."""

KEPT_BLOCKS = 24
"""What a trial leaves to the next one, so that looking at all of it stays quick."""


@dataclass(frozen=True)
class Trial:
    """Counts of the files that a killed writer left: temporary ones, good blocks and damaged ones."""

    temporaries: int
    good: int
    damaged: int


def _temporaries(root: Path) -> list[str]:
    return [name for name in files_in(root, KEY) if name.endswith(".tmp")]


def _check(root: Path, files: DiskTier) -> list[SavedBlock]:
    """Load all blocks that were found and compare their content; returns those that can be loaded."""
    ends = {ROOT: 0}
    good: list[SavedBlock] = []
    for saved in files.saved():
        assert ends[saved.parent] == saved.start, "what a block follows was found before it"
        ends[saved.digest] = saved.start + len(saved.token_ids)
        content = files.load(saved)
        if content is not None:
            assert is_same_content(content, block_content(saved)), "content is that of the digest"
            good.append(saved)
    assert not _temporaries(root)
    return good


def _trials(root: Path, count: int, *, is_torn: bool) -> Iterator[Trial]:
    """Kill a writer within a call that changes files, and look at its files, over and over."""
    dice = random.Random(11)
    with block_writers(root, is_torn=is_torn) as writers:
        for seed in range(1, count + 1):
            writers.write_and_die(dice.randint(1, MAX_CALLS), seed)
            temporaries = len(_temporaries(root))
            files = DiskTier(root, KEY)
            good = _check(root, files)
            # Last ones first: what follows what is gone would be gone with the next start.
            files.forget(one.digest for one in good[KEPT_BLOCKS:])
            files.close(10)
            reading = files.reading()
            assert reading.bytes == sum(files_in(root, KEY).values()), (
                "bytes are those of the files"
            )
            yield Trial(temporaries, len(good), reading.damaged)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])
def test_killed_writer_leaves_whole_blocks(tmp_path: Path, count: int) -> None:
    """Every file that is found is whole, and is the block that it is named by."""
    trials = list(_trials(tmp_path / "blocks", count, is_torn=False))
    assert len(trials) == count
    assert sum(one.damaged for one in trials) == 0, "a file has its name only when it is whole"
    killed_writing = sum(one.temporaries > 0 for one in trials)
    assert killed_writing >= count // 10, "writers were killed in the middle of a block"
    assert sum(one.good for one in trials) > count * KEPT_BLOCKS // 4


@pytest.mark.parametrize("count", [10, pytest.param(40, marks=pytest.mark.long)])
def test_torn_files_are_noticed_when_a_writer_does_not_rename(tmp_path: Path, count: int) -> None:
    """They have the right length, and are all counted as damaged."""
    trials = list(_trials(tmp_path / "blocks", count, is_torn=True))
    assert any(one.damaged for one in trials)
