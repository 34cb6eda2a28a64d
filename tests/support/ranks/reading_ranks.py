"""One rank of a group on loopback: loads its shard of a checkpoint, and counts the bytes it reads.

``python -m support.ranks.reading_ranks CHECKPOINT`` prints a JSON line on each rank. Linux counts the bytes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.loader import load_model
from machd.engine.loading.placing.sharding import Sharding
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.ranks.joining import join, rank_place

READING = "loading the weights"


def read_bytes() -> int:
    """Return the bytes that this process has read so far, from files and sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


class CountedProgress:
    """Progress that counts what is read while the weights are loaded."""

    def __init__(self) -> None:
        """Begin before the weights."""
        self.first: int | None = None
        self.last = 0
        self.shard_bytes = 0

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin to count at the stage that loads weights."""
        if name == READING:
            self.first, self.shard_bytes = read_bytes(), total_bytes or 0

    def advance(self, _done_bytes: int) -> None:
        """Note what has been read by now."""
        self.last = read_bytes()


def main() -> None:
    """Load, and print the bytes that were read and those that this rank keeps."""
    place = rank_place(os.environ)
    assert place is not None, "mlx.launch starts this"
    import_mlx_lm()
    group = join(place)
    assert group is not None, "there are several ranks"
    progress = CountedProgress()
    load_model(
        ModelSource(SourceKind.DIRECTORY, Path(sys.argv[1]), "tiny"),
        dtype="float32",
        progress=progress,
        sharding=Sharding(group.group, "tensor"),
    )
    assert progress.first is not None, "the weights have a stage of their own"
    print(  # noqa: T201 - what the test reads
        json.dumps(
            {
                "rank": group.rank,
                "read_bytes": progress.last - progress.first,
                "shard_bytes": progress.shard_bytes,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
