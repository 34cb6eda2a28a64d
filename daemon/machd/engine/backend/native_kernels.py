"""machd's own kernels for the CPU: the package machd-native (``native/`` in the repository), where it is installed.

``make setup`` builds it where there is a compiler. Without it mlx computes everything.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx

from machd.engine.backend.cpu_threads import usable_cpus

_ADVICE = (
    "this CPU computes without machd's own kernels, which are several times as fast: in a checkout install a C++ "
    "compiler (Debian, Ubuntu: apt install g++ python3-dev) and run `make setup` or `scripts/native`, elsewhere install "
    "the package machd-native, and restart; they need AVX2 on x86-64"
)

_OUTDATED = (
    "the installed package machd-native is older than machd and computes no adapters: in a checkout run `scripts/native`, "
    "elsewhere install the package of the same release as machd, and restart"
)


def native_kernels() -> Any:  # noqa: ANN401 - a package that may be absent
    """Return the package; None where it is not installed, this processor has no instructions for it, or a GPU computes."""
    return _package() if mx.default_device().type is mx.cpu else None


def missing_kernels_advice() -> str | None:
    """Say how to get the kernels; None where they compute, on a GPU, and on other systems than Linux."""
    is_linux_cpu = sys.platform == "linux" and mx.default_device().type is mx.cpu
    return _ADVICE if is_linux_cpu and _package() is None else None


def outdated_kernels_advice() -> str | None:
    """Say how to get kernels that compute adapters where the installed package is older than machd; None elsewhere."""
    native = native_kernels()
    if native is None or hasattr(getattr(native, "LowRank", None), "Piece"):
        return None
    return _OUTDATED


@cache
def _package() -> Any:  # noqa: ANN401 - a package that may be absent
    try:
        native = import_module("machd_native")
    except ImportError:
        return None
    native.set_thread_count(usable_cpus())
    return native if native.instruction_set() else None
