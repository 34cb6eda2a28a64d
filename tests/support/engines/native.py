"""The engine as it is where machd's own kernels are not installed."""

from __future__ import annotations

import pytest

from machd.engine.backend import native_kernels


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Have mlx compute everything."""
    patch.setattr(native_kernels, "_package", lambda: None)
