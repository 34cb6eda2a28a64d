"""The library that multiplies matrices on a Linux CPU: chosen before mlx is imported, then measured.

The ``mlx-cpu`` wheel links the reference BLAS, whose cost grows with every row of a batch. A
library loaded with ``RTLD_GLOBAL`` before mlx answers mlx's ``cblas_sgemm`` in its place, without
``LD_PRELOAD`` and without starting the process again. :func:`choose_blas` loads it and must run
before anything imports mlx; :func:`measure_blas` imports mlx and shows what it got. Where machd's own
kernels compute, the library multiplies only what they do not, and is not measured.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machd.clock import Clock, SystemClock
from machd.engine.backend.blas_candidates import SONAMES, installed_libraries
from machd.errors import StartupError
from machd.installed import installed_version
from machd.settings.problems import shortened

_AUTO = "auto"
_OFF = "off"

_MKL_VERSION_BYTES = 256
_PRODUCT_ROWS = 16
_PRODUCT_WIDTH = 2048
_REPEATS = 5

_REFERENCE_RATIO = 5.0
"""Sixteen rows cost 16 times one row with the reference BLAS and 1.5 times with OpenBLAS.

The geometric middle of the two leaves a factor of three for a busy machine on either side.
"""

_ADVICE = (
    "this CPU multiplies with the reference BLAS: install OpenBLAS (Debian, Ubuntu: apt install "
    "libopenblas0-pthread; Fedora: dnf install openblas; Arch: pacman -S openblas) and restart: "
    "prompts are then read about 15 times faster and tokens come about twice as fast"
)
"""Measured with mlx 0.32.4 on two cores: a product of 16 rows takes 1.5 ms instead of 22, one of a
4096 x 4096 matrix and one row 6.1 instead of 14.2."""

_ADVICE_LOADED = (
    "was loaded and took several times as long for 16 rows as for one: on a busy machine its threads "
    "wait for a core; if `machd version` shows it on an idle machine too, name another library in "
    "engine.blas"
)

_ADVICE_REFUSED = "install another version of it, or another library, and restart"

Check = Callable[[str], str | None]
"""Says what is wrong with the products of the library at a path; None if nothing is."""


@dataclass(frozen=True, slots=True)
class RefusedLibrary:
    """A library that was not loaded because it multiplies wrongly, and which product is wrong or how the check ended."""

    library: str
    reason: str

    def __str__(self) -> str:
        return f"{self.library} was not loaded: {self.reason}"


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """The outcome of :func:`choose_blas`.

    Attributes:
        requested: ``auto``, ``off`` or the path that was asked for.
        library: The file that was loaded; None when mlx keeps its own.
        reason: Why, in a few words for the start-up log.
        refused: Libraries that multiply wrongly on this machine, of those that were tried.
    """

    requested: str
    library: str | None
    reason: str
    refused: tuple[RefusedLibrary, ...] = ()

    @property
    def for_other_processes(self) -> str:
        """The value of ``engine.blas`` with which another process computes with the same library."""
        return self.library or (_OFF if self.refused else self.requested)


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What multiplies matrices; without machd's own kernels also what a 2048 x 2048 float32 product takes through mlx.

    Attributes:
        backend: ``cpu``, ``metal`` or ``cuda``.
        name: Library and version, such as ``OpenBLAS 0.3.21``, behind machd's own kernels where they compute
            (``machd-native 0.1.0, OpenBLAS 0.3.21``); None off the CPU.
        one_row_ms: Best of five for 1 row; None where nothing was measured.
        sixteen_rows_ms: The same for 16 rows.
        is_reference: Whether 16 rows cost so much more than one that batching gains nothing.
        advice: What to do about it; None when nothing needs doing.
    """

    backend: str
    name: str | None
    one_row_ms: float | None = None
    sixteen_rows_ms: float | None = None
    is_reference: bool = False
    advice: str | None = None

    @property
    def ratio(self) -> float | None:
        """Cost of sixteen rows over that of one; None where nothing was measured."""
        if self.one_row_ms is None or self.sixteen_rows_ms is None:
            return None
        return self.sixteen_rows_ms / max(self.one_row_ms, 1e-6)


def choose_blas(
    choice: str,
    *,
    environ: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> BlasChoice:
    """Load a cblas of the machine, before anything imports mlx.

    Args:
        choice: ``auto`` for the first of a fixed order, ``off``, or the path of a shared library.
        environ: Says where the loader looks for libraries; this process's unless given.
        check: Compares a library's products with plain sums; one that is wrong is not loaded. Without it
            every library is trusted, as where the parent process has checked it.

    Returns:
        What was loaded and why. Never an error for ``auto``: without a better library mlx keeps
        its own, and :func:`measure_blas` says what that costs.

    Raises:
        StartupError: The path cannot be loaded, exports no ``cblas_sgemm`` or multiplies wrongly.
    """
    if choice == _OFF:
        return BlasChoice(choice, None, "switched off")
    if sys.platform != "linux":
        return BlasChoice(choice, None, "the system's own library serves")
    environ = os.environ if environ is None else environ  # noqa: TID251 - where the loader looks itself
    if "mlx.core" in sys.modules:
        return _choice_made_before(choice, installed_libraries(environ))
    check = check or (lambda _library: None)
    if choice != _AUTO:
        return BlasChoice(choice, _load_path(choice, check), "asked for")
    if _expects_cuda():
        return BlasChoice(choice, None, "mlx computes on the GPU")
    return _choose_installed(installed_libraries(environ), check)


def _choice_made_before(choice: str, libraries: Sequence[str]) -> BlasChoice:
    """Name the library that was loaded before mlx was imported, for a process that calls this again."""
    loaded = next((library for library in libraries if _is_loaded(library)), None)
    if loaded is None:
        return BlasChoice(choice, None, "mlx was imported before a library could be loaded")
    return BlasChoice(choice, loaded, "loaded before mlx was imported")


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _choose_installed(installed: Sequence[str], check: Check) -> BlasChoice:
    refused: list[RefusedLibrary] = []
    # The loader knows places that are not searched, such as those of a Python without ld.so.cache.
    for library in installed or filter(_can_load, SONAMES):
        problem = check(library)
        if problem is not None:
            refused.append(RefusedLibrary(library, problem))
        elif _load(library) is None:
            return BlasChoice(_AUTO, library, "the first found", tuple(refused))
    reason = "no optimised BLAS on this machine"
    if refused:
        reason = "no optimised BLAS on this machine multiplies rightly"
    return BlasChoice(_AUTO, None, reason, tuple(refused))


def measure_blas(choice: BlasChoice, *, clock: Clock | None = None) -> BlasReport:
    """Import mlx, multiply, and say which library did it and how well it takes a batch.

    Takes about 20 ms with an optimised library and 200 ms with the reference one. Measures
    nothing where machd's own kernels or a GPU compute, and gives no advice on macOS.
    """
    from machd.engine.backend.device import backend_name  # noqa: PLC0415 - imports mlx
    from machd.engine.backend.native_kernels import native_kernels  # noqa: PLC0415 - imports mlx

    backend = backend_name()
    if backend != "cpu":
        return BlasReport(backend, None)
    if native_kernels() is not None:
        library = _library_name(choice) or "MLX's own BLAS"
        return BlasReport(backend, f"machd-native {installed_version('machd-native')}, {library}")
    clock = clock or SystemClock()
    one_row_ms, sixteen_rows_ms = _products_ms(clock)
    is_reference = sixteen_rows_ms / max(one_row_ms, 1e-6) >= _REFERENCE_RATIO
    name = _library_name(choice) or ("reference BLAS" if is_reference else "unknown")
    advice = _ADVICE if choice.library is None else f"{name} {_ADVICE_LOADED}"
    if choice.library is None and choice.refused:
        advice = f"{'; '.join(map(str, choice.refused))}; {_ADVICE_REFUSED}"
    return BlasReport(
        backend=backend,
        name=name,
        one_row_ms=one_row_ms,
        sixteen_rows_ms=sixteen_rows_ms,
        is_reference=is_reference,
        advice=advice if is_reference and sys.platform == "linux" else None,
    )


def _load_path(path: str, check: Check) -> str:
    fix = "give the path of a BLAS library with the cblas interface, or `auto`, or `off`"
    problem = "no such file"
    if os.path.isfile(path):  # noqa: PTH113 - no error for a long name
        problem = _cannot_load(path) or check(path) or _load(path) or ""
    if problem:
        raise StartupError(f"BLAS library {shortened(path)}: {shortened(problem)}; {fix}")
    return path


def _load(name: str) -> str | None:
    """Put a library's symbols in front of those that mlx will ask for; the problem, or None.

    A first look with local symbols keeps a library without ``cblas_sgemm`` out of everyone's way.
    """
    problem = _cannot_load(name)
    if problem is None:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return problem


def _can_load(name: str) -> bool:
    return _cannot_load(name) is None


def _cannot_load(name: str) -> str | None:
    try:
        has_products = hasattr(ctypes.CDLL(name), "cblas_sgemm")
    except OSError as error:
        return str(error)
    return None if has_products else "it has no cblas_sgemm"


def _expects_cuda() -> bool:
    """Return True if mlx will compute on an NVIDIA GPU, without importing it."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return False
    for distribution in ("mlx-cuda-12", "mlx-cuda-13"):
        try:
            importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _products_ms(clock: Clock) -> tuple[float, float]:
    """Milliseconds of a float32 product with a 2048 x 2048 matrix, of 1 row and of 16 rows.

    In turns, so that a machine whose speed drifts slows both; the best of five each.
    """
    import mlx.core as mx  # noqa: PLC0415 - a BLAS is chosen before this

    right = mx.ones((_PRODUCT_WIDTH, _PRODUCT_WIDTH), dtype=mx.float32)
    lefts = [mx.ones((rows, _PRODUCT_WIDTH), dtype=mx.float32) for rows in (1, _PRODUCT_ROWS)]
    mx.eval(right, lefts, [left @ right for left in lefts])
    best_ms = [float("inf"), float("inf")]
    for _ in range(_REPEATS):
        for index, left in enumerate(lefts):
            started_s = clock.monotonic_s()
            mx.eval(left @ right)
            best_ms[index] = min(best_ms[index], (clock.monotonic_s() - started_s) * 1000.0)
    return best_ms[0], best_ms[1]


def _library_name(choice: BlasChoice) -> str | None:
    """The library's own name and version where it tells them, else its file; None for the one that mlx brings."""
    if sys.platform == "darwin":
        return "Accelerate"
    if choice.library is None:
        return None
    library = ctypes.CDLL(choice.library)
    for describe in (_openblas_name, _mkl_name, _blis_name):
        name = describe(library)
        if name is not None:
            return name
    return Path(choice.library).name


def _openblas_name(library: ctypes.CDLL) -> str | None:
    config = _text_function(library, "openblas_get_config")
    if config is None:
        return None
    # Such as "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH NO_AFFINITY Haswell MAX_THREADS=64".
    return " ".join(config().decode("ascii", "replace").split()[:2])


def _mkl_name(library: ctypes.CDLL) -> str | None:
    if not hasattr(library, "mkl_get_version_string"):
        return None
    text = ctypes.create_string_buffer(_MKL_VERSION_BYTES)
    library.mkl_get_version_string(text, len(text) - 1)
    # Such as "Intel(R) oneAPI Math Kernel Library Version 2026.2-Product Build 20260915 for …".
    found = re.search(r"Version ([\d.]+)", text.value.decode("ascii", "replace"))
    return f"Intel MKL {found[1]}" if found else "Intel MKL"


def _blis_name(library: ctypes.CDLL) -> str | None:
    version = _text_function(library, "bli_info_get_version_str")
    return None if version is None else f"BLIS {version().decode('ascii', 'replace')}"


def _text_function(library: ctypes.CDLL, name: str) -> Callable[[], bytes] | None:
    """A C function without arguments that gives a string."""
    if not hasattr(library, name):
        return None
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    function.argtypes = []
    return lambda: bytes(function() or b"")
