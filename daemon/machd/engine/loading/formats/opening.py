"""Read a model's files, whatever their format, and open them to build its model. Only opening imports mlx."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.own_code import OwnCode
from machd.engine.loading.architecture import check_architecture
from machd.engine.loading.formats.checkpoint import Checkpoint, read_directory
from machd.engine.loading.formats.gguf.families.family import module_tensors
from machd.engine.loading.formats.gguf.reading import family_of, read_gguf
from machd.engine.loading.source import ModelSource, SourceKind

if TYPE_CHECKING:
    from machd.engine.loading.formats.opened import Bounds, Opened  # imports mlx


def _unbounded(_what: str) -> AbstractContextManager[None]:
    return nullcontext()


def read_checkpoint(
    source: ModelSource, own_code: OwnCode, bounds: Bounds = _unbounded
) -> Checkpoint:
    """Read and check what lies around the weights, which are not read; the arguments are those of :func:`open_model`.

    Raises:
        ModelError: One of its kinds, about the files.
    """
    if source.kind is SourceKind.GGUF:
        return read_gguf(source.path, bounds)
    return read_directory(source.path, own_code)


def open_model(
    source: ModelSource,
    *,
    own_code: OwnCode,
    bounds: Bounds = _unbounded,
    import_for_text: Callable[[], None] = import_mlx_lm,
) -> Opened:
    """Read a model's files, then import mlx-lm to build the model.

    Args:
        source: The model's files.
        own_code: Whether a checkpoint's own Python code runs.
        bounds: Limits of code that trusts numbers of the files; none unless given.
        import_for_text: Imports mlx-lm where the model takes text only.

    Raises:
        ModelError: One of its kinds, about the files.
    """
    checkpoint = read_checkpoint(source, own_code, bounds)
    # The processor of images has classes of transformers'.
    (import_mlx_lm if checkpoint.takes_images else import_for_text)()
    header = checkpoint.header
    if header is not None:
        from machd.engine.loading.formats.gguf.opened import OpenedGguf  # noqa: PLC0415 - imports mlx

        return OpenedGguf(
            checkpoint=checkpoint,
            own_code=own_code,
            bounds=bounds,
            header=header,
            family=family_of(header),
            modules=module_tensors(family_of(header), header),
        )
    from machd.engine.loading.formats.directory import OpenedDirectory  # noqa: PLC0415 - imports mlx

    if not checkpoint.has_own_model and not checkpoint.takes_images:
        check_architecture(checkpoint.config)
    return OpenedDirectory(checkpoint=checkpoint, own_code=own_code, bounds=bounds)
