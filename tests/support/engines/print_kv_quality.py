"""Prints what ``kv_quality`` measures of the embedded model: ``PYTHONPATH=tests python -m support.engines.print_kv_quality``."""

from __future__ import annotations

from machd.engine.backend.blas import choose_blas

if __name__ == "__main__":
    choose_blas("auto")

    from support.engines import kv_quality  # imports mlx, so after the BLAS is chosen

    kv_quality.main()
