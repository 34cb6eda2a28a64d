"""Variables of the environment that mlx reads while it is imported."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from machd.engine.backend.scratch import private_scratch_directory, use_scratch_directory

_TF32 = "MLX_ENABLE_TF32"
"""On CUDA, mlx multiplies float32 matrices in TF32 unless this is 0, but one row by a matrix in float32: a row of a
batch then differs from the same row alone by 1e-2 nats instead of 4e-6 (tiny llama, H200)."""


def set_mlx_environment(environ: MutableMapping[str, str], cache_directory: Path) -> None:
    """Have mlx compile in a private directory, and compute float32 as such. Call it before mlx is imported.

    To use TF32, set mlx's variable; a variable that is set stays.

    Raises:
        StartupError: The directory is not private, or cannot be made.
    """
    use_scratch_directory(private_scratch_directory(cache_directory / "machd"), environ)
    environ.setdefault(_TF32, "0")
