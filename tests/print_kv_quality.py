"""Prints what ``kv_quality`` measures of the embedded model: ``python tests/print_kv_quality.py``."""

from __future__ import annotations

from machd.engine.backend.blas import choose_blas

if __name__ == "__main__":
    choose_blas("auto")

    import kv_quality  # imports mlx, so after the BLAS is chosen

    kv_quality.main()
