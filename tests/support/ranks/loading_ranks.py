"""One rank of a group on loopback: pretends to load its shard, with as many tensors as no other rank has.

``python -m support.ranks.loading_ranks FAILING_RANK...`` loads once for each of them, and prints a JSON line on each rank and
for each load; -1 lets every rank load.
"""

from __future__ import annotations

import json
import os
import sys

from machd.engine.ranks.joining import join, rank_place
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.ranks.shared_loading import SharedLoading
from machd.errors import MachdError, ModelFormatError

_TENSOR_BYTES = 1000
_TENSORS = 7


class ShownProgress:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        """Begin with no stage."""
        self.stages: list[str] = []
        self.loaded_bytes: list[int] = []

    def stage(self, name: str, _total_bytes: int | None) -> None:
        """Note a stage."""
        self.stages.append(name)

    def advance(self, done_bytes: int) -> None:
        """Note bytes."""
        self.loaded_bytes.append(done_bytes)


def main() -> None:
    """Load, or fail at the third tensor, as often as told."""
    place = rank_place(os.environ)
    assert place is not None, "mlx.launch starts this"
    group = join(place)
    assert group is not None, "there are several ranks"
    for failing_rank in map(int, sys.argv[1:]):
        found = {"failing": failing_rank, "rank": group.rank, **_loaded(group, failing_rank)}
        print(json.dumps(found), flush=True)  # noqa: T201 - what the test reads


def _loaded(group: RankGroup, failing_rank: int) -> dict[str, object]:
    """Load once; returns how it ended, and the bytes that this rank has shown."""
    progress = ShownProgress()
    loading = SharedLoading(group, progress)
    tensors = _TENSORS * (1 + group.rank)

    def load() -> str:
        loading.stage("reading the tokenizer", None)
        loading.stage("loading the weights", tensors * _TENSOR_BYTES)
        for tensor in range(tensors):
            if group.rank == failing_rank and tensor == 2:
                raise ModelFormatError("a file is damaged")
            loading.advance(_TENSOR_BYTES)
        loading.stage("trying the model", None)
        return "loaded"

    try:
        ended = loading.load(load)
    except MachdError as error:
        ended = error.message
    return {"ended": ended, "loaded_bytes": progress.loaded_bytes}


if __name__ == "__main__":
    main()
