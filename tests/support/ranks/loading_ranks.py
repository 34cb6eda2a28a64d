"""One rank of a group on loopback: pretends to load its shard, with as many tensors as no other rank has.

``python -m support.ranks.loading_ranks FAILING_RANK`` prints a JSON line on each rank; -1 lets every rank load.
"""

from __future__ import annotations

import json
import os
import sys

from machd.engine.ranks.joining import join, rank_place
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
    """Load, or fail at the third tensor."""
    place = rank_place(os.environ)
    assert place is not None, "mlx.launch starts this"
    group = join(place)
    assert group is not None, "there are several ranks"
    progress = ShownProgress()
    loading = SharedLoading(group, progress)
    tensors = _TENSORS * (1 + group.rank)

    def load() -> str:
        loading.stage("reading the tokenizer", None)
        loading.stage("loading the weights", tensors * _TENSOR_BYTES)
        for tensor in range(tensors):
            if group.rank == int(sys.argv[1]) and tensor == 2:
                raise ModelFormatError("a file is damaged")
            loading.advance(_TENSOR_BYTES)
        loading.stage("trying the model", None)
        return "loaded"

    try:
        ended = loading.load(load)
    except MachdError as error:
        ended = error.message
    print(  # noqa: T201 - what the test reads
        json.dumps({"rank": group.rank, "ended": ended, "loaded_bytes": progress.loaded_bytes}),
        flush=True,
    )


if __name__ == "__main__":
    main()
