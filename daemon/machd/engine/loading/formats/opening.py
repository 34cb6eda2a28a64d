"""Open a model's files, whatever their format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.formats.directory import open_directory
from machd.engine.loading.formats.gguf import open_gguf
from machd.engine.loading.formats.opened import Bounds, Opened, OwnCode
from machd.engine.loading.source import ModelSource, SourceKind


def open_model(
    source: ModelSource,
    *,
    own_code: OwnCode,
    bounds: Bounds = lambda _what: nullcontext(),
    import_for_text: Callable[[], None] = import_mlx_lm,
) -> Opened:
    """Read and check what lies around the weights, which are not read.

    Raises:
        ModelError: One of its kinds, about the files.
    """
    if source.kind is SourceKind.GGUF:
        import_for_text()
        return open_gguf(source, bounds)
    return open_directory(source, own_code, bounds, import_for_text)
