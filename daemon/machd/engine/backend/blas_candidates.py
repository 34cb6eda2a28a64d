"""Finds the BLAS libraries that are installed, as files, without loading any of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SONAMES = (
    "libopenblas.so.0",
    "libopenblasp.so.0",  # Fedora's pthreads build
    "libopenblaso.so.0",  # Fedora's OpenMP build
    "libmkl_rt.so.3",
    "libmkl_rt.so.2",
    "libblis.so.4",
    "libflexiblas.so.3",
)
"""Shared libraries that export an optimised ``cblas_sgemm``, in the order of preference.

``libblas.so.3`` and ``libcblas.so.3`` are left out: on a plain machine they are the reference BLAS.
"""

_LOADER_CACHE = Path("/etc/ld.so.cache")


def installed_libraries(
    environ: Mapping[str, str], *, loader_cache: Path = _LOADER_CACHE
) -> tuple[str, ...]:
    """Return the libraries that are installed, each file once, in order of preference; ``LD_LIBRARY_PATH`` comes first."""
    folders = [Path(one) for one in environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    folders += [Path(prefix) / "lib" for prefix in dict.fromkeys((sys.prefix, sys.base_prefix))]
    listed = _listed_libraries(loader_cache)
    found: dict[Path, str] = {}
    for soname in SONAMES:
        paths = [folder / soname for folder in folders]
        paths += [path for path in listed if path.name == soname]
        first = next((path for path in paths if path.is_file()), None)
        if first is not None:
            found.setdefault(Path(os.path.realpath(first)), str(first))
    return tuple(found.values())


def _listed_libraries(loader_cache: Path) -> list[Path]:
    """Read the paths out of ``ldconfig``'s list, whose entries are strings that end with a NUL."""
    try:
        entries = loader_cache.read_bytes().split(b"\0")
    except OSError:
        return []
    sonames = tuple(f"/{soname}".encode() for soname in SONAMES)
    return [Path(os.fsdecode(one)) for one in entries if one.endswith(sonames) and one[0:1] == b"/"]
