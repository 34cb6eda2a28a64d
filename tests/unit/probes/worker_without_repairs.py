"""The prober's worker whose process repairs no model of mlx-lm's."""

from __future__ import annotations

from support import module_command

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd_probes import worker

COMMAND = module_command("unit.probes.worker_without_repairs")


def main() -> None:
    """Forget the repairs, and be the worker."""
    import_mlx_lm()
    from machd.engine.kernels import batchable  # noqa: PLC0415 - imports mlx

    batchable._MENDED.clear()
    worker.main()


if __name__ == "__main__":
    main()
