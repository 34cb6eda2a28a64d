"""Open a model's files, whatever their format."""

from __future__ import annotations

from contextlib import nullcontext

from machd.engine.loading.formats.directory import open_directory
from machd.engine.loading.formats.gguf import open_gguf
from machd.engine.loading.formats.opened import Bounds, Opened, OwnCode
from machd.engine.loading.source import ModelSource, SourceKind


def open_model(
    source: ModelSource, *, own_code: OwnCode, bounds: Bounds = lambda _what: nullcontext()
) -> Opened:
    """Read and check what lies around the weights, which are not read.

    Args:
        source: The model's files; mlx-lm has been imported.
        own_code: What becomes of Python code that a checkpoint brings.
        bounds: Limits of what trusts numbers of the files; none unless given.

    Raises:
        ModelError: One of its kinds, about the files.
    """
    if source.kind is SourceKind.GGUF:
        return open_gguf(source, bounds)
    return open_directory(source, own_code, bounds)
