"""Processes that write blocks until they are killed in the middle of it.

As a program it is their parent: it imports what they need once and forks one for each line that it
reads, so that two hundred of them cost little. Calls to the operating system that change files are
counted, and a child is killed within one of them, so that no speed of a disk matters. Usage::

    python tests/support/engines/block_writing.py DIRECTORY {whole,torn}
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from machd.engine.prefix_blocks import directory as block_directory
from machd.engine.prefix_blocks.directory import KeyDirectory
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.encoding import BlockContent
from machd.engine.protocol.blocks import SavedBlock
from support import module_command
from support.engines.block_samples import chain, content_of

KEY = b"the key of many"
_TEXT_BLOCKS = 8
_AHEAD_BLOCKS = 16


class BlockWriters:
    """A parent of processes that write, one at a time, and are killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Take over the parent."""
        self._process = process

    def write_and_die(self, calls: int, seed: int) -> None:
        """Let a process write until it is killed within ``calls`` calls that change files."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"%d %d\n" % (calls, seed))
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the parent lives"
        assert os.WTERMSIG(int(line)) == signal.SIGKILL, "it wrote until it was killed"


@contextmanager
def block_writers(directory: Path, *, is_torn: bool = False) -> Iterator[BlockWriters]:
    """Start the parent of processes that write to a directory.

    Args:
        directory: The directory.
        is_torn: Whether they write to the files themselves, instead of renaming whole ones.
    """
    command = module_command("support.engines.block_writing")
    command += (str(directory), "torn" if is_torn else "whole")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield BlockWriters(process)
        assert process.stdin is not None
        process.stdin.close()


class _TornDirectory(KeyDirectory):
    """A directory without the rename: pages come to the file one after the other."""

    def write(self, digest: bytes, pieces: Iterable[memoryview], used_unix_s: float) -> int:
        del used_unix_s
        whole = b"".join(pieces)
        fd = os.open(f"{digest.hex()}.safetensors", os.O_WRONLY | os.O_CREAT, dir_fd=self._fd)
        os.ftruncate(fd, len(whole))  # of the right length from the start, which is worse
        for at in range(0, len(whole), 4096):
            os.pwrite(fd, whole[at : at + 4096], at)
        os.close(fd)
        return len(whole)


def block_content(saved: SavedBlock) -> BlockContent:
    """Make the content of a block that they write: some have a page, some have many."""
    return content_of(saved, 4 << 10 if saved.digest[0] % 2 else 256 << 10)


def _kill_within(calls: int) -> None:
    """Kill this process within one of the next calls that change files: what it writes is cut in half."""
    left = count(calls, -1)

    def deadly(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 1:
                if name in {"write", "pwrite"}:
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("write", "pwrite", "fsync", "replace", "unlink"):
        setattr(os, name, deadly(name))


def _write(directory: Path, seed: int) -> None:
    """Save, forget and save again, as fast as blocks are written."""
    dice = random.Random(seed)
    files = DiskTier(directory, KEY)
    present: list[SavedBlock] = []
    for number in count(seed * 1000):
        for saved in chain(number, _TEXT_BLOCKS):
            files.save(saved, block_content(saved))
            present.append(saved)
            match dice.randrange(10):
                case 0:  # the last ones, so that nothing is left that follows them
                    files.forget(one.digest for one in present[-2:])
                    del present[-2:]
                    break
                case 1:
                    again = replace(dice.choice(present), has_state=True)
                    files.save(again, block_content(again))
                case _:
                    pass
            while len(files._writer._queue) > _AHEAD_BLOCKS:
                time.sleep(0.0005)


def _main(directory: Path, *, is_torn: bool) -> None:
    # Standard output is for numbers alone.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if is_torn:
        vars(block_directory)["KeyDirectory"] = _TornDirectory
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                calls, seed = map(int, line.split())
                _kill_within(calls)
                _write(directory, seed)
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), is_torn=sys.argv[2] == "torn")
