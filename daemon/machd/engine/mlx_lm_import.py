"""Import mlx-lm without what it does to the process.

``mlx_lm.utils`` sets the limit of open files to (2048, 4096) when it is imported: it takes files
away from a daemon that was given more, forbids an unprivileged process to ask for them again, and
fails the import where the hard limit is lower. mlx-lm 0.32.2; the limit is the operator's.
"""

from __future__ import annotations

import resource
import sys

__all__ = ["import_mlx_lm"]


def import_mlx_lm() -> None:
    """Import mlx-lm and leave the limit of open files alone. Call it before any other import of it.

    It imports mlx too, so a BLAS and a scratch directory are chosen before. Takes about 1.5 s, and
    nothing the second time.
    """
    if "mlx_lm.utils" in sys.modules:
        return
    set_limit = resource.setrlimit
    resource.setrlimit = _keep_limit
    try:
        import mlx_lm.utils  # noqa: F401, PLC0415 - this is the one place
    finally:
        resource.setrlimit = set_limit


def _keep_limit(_which: int, _limits: tuple[int, int], /) -> None:
    """Stands in for ``resource.setrlimit`` during the import."""
