"""Loading of an encoder: its files are opened and put into memory."""

from __future__ import annotations

from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.loading.loader import MemoryShare
from machd.engine.protocol.encoder import Encoder
from machd.engine.protocol.progress import LoadProgress


def load_encoder(  # noqa: PLR0913 - one argument for each fact of settings and machine
    files: EncoderFiles,
    *,
    model_id: str,
    dtype: str,
    blas: str | None,
    blas_refused: tuple[str, ...],
    progress: LoadProgress,
    share: MemoryShare | None,
) -> Encoder:
    """Load and describe an encoder; the calling thread has to be the one that computes.

    Args:
        files: As they were read.
        model_id: The name that requests use.
        dtype: ``model.dtype``.
        blas: Name of the CPU's BLAS.
        blas_refused: Libraries that multiply wrongly.
        progress: Told of stages and bytes.
        share: Of a model among others; asked before weights are read.

    Raises:
        ModelError: One of its kinds; nothing is left in memory.
    """
    raise NotImplementedError
