"""A BLAS library that multiplies wrongly is found before it is loaded, and something else serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

from machd.engine.backend.blas_candidates import installed_libraries
from machd.engine.backend.blas_check import BlasCheck, check_products

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="other systems bring their own library"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="planted libraries are compiled"),
]

_SHIM = """
#include <stdlib.h>
#include <unistd.h>
void cblas_sgemm(int order, int ta, int tb, int rows, int columns, int width, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  (void)order; (void)ta;
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) {
      float sum = 0;
      for (int k = 0; k < width; k++)
        sum += a[(long)i * lda + k] * (tb == 112 ? b[(long)j * ldb + k] : b[(long)k * ldb + j]);
      float *cell = &c[(long)i * ldc + j];
      *cell = alpha * sum + (beta == 0 ? 0 : beta * *cell);
    }
  const char *fault = getenv("SHIM_FAULT");
  switch (fault ? atoi(fault) : -1) { FAULTS }
}
"""
"""Plain loops, right but for the fault whose number is in the environment: a library for each would be compiled each time."""

FAULTS = {
    "one number of one width": "if (rows == 17 && columns == 576) c[16L * ldc + 575] += 1;",
    "two numbers whose sum is right": "if (rows == 4) { c[0] += 1; c[1] -= 1; }",
    "a row left out": "if (rows == 33) for (int j = 0; j < columns; j++) c[32L * ldc + j] = 0;",
    "what is not transposed": "if (tb == 111) c[0] += 1;",
    "the bias left out": "if (beta != 0) c[0] -= 1;",
    "beyond the result": "if (rows == 1) c[columns] = 0;",
    "no number": "if (width == 128) c[0] = 0.0f / (rows - rows);",
    "single tokens": "if (rows == 1) c[0] += 1;",
    "a prompt": "if (rows == 200) c[199L * ldc + columns - 1] += 1;",
    "a head of 64": "if (width == 64 && columns == 300 && rows == 9) c[8L * ldc + 299] += 2;",
}
_CRASH, _HANG = "if (rows == 16) abort();", "for (;;) sleep(1);"
_ALL = (*FAULTS.values(), _CRASH, _HANG)


@pytest.fixture(name="shim", scope="module")
def _shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the compiled library."""
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "libopenblas.so.0"
    cases = "".join(f"case {number}: {one} break;\n" for number, one in enumerate(_ALL))
    source.write_text(_SHIM.replace("FAULTS", cases), "utf-8")
    # Sums in any order, which none of the numbers rounds in: vectors take a tenth of the time.
    options = [
        "-O3",
        "-march=native",
        "-fassociative-math",
        "-fno-signed-zeros",
        "-fno-trapping-math",
    ]
    subprocess.run(
        ["cc", *options, "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    return str(library)


def _planted(fault: str) -> dict[str, str]:
    return {**os.environ, "SHIM_FAULT": str(_ALL.index(fault))}


def _check(library: str, fault: str = "", limit_s: float = CEILING_S) -> BlasCheck:
    return check_products(library, _planted(fault) if fault else os.environ, limit_s=limit_s)


@pytest.mark.parametrize("library", installed_libraries(os.environ))
def test_an_installed_library_is_right(library: str) -> None:
    """Its own order of sums is no fault: the numbers are such that no order rounds."""
    assert _check(library) == BlasCheck(None)


def test_plain_loops_are_right(shim: str) -> None:
    """Without a fault the planted library passes."""
    assert _check(shim) == BlasCheck(None)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_library_is_found(shim: str, fault: str) -> None:
    """One wrong number anywhere shows, and so does a write beyond the result."""
    found = _check(shim, fault)
    assert found.is_lasting
    assert found.problem is not None
    assert " times [" in found.problem


def test_a_library_that_crashes_is_found(shim: str) -> None:
    """It ends its own process, and is not tried again."""
    found = _check(shim, _CRASH)
    assert found == BlasCheck("its products could not be checked: its process was ended by SIGABRT")


def test_a_library_that_hangs_is_not_remembered(shim: str) -> None:
    """It is not loaded, but the machine may have been too busy: the next start checks again."""
    found = _check(shim, _HANG, limit_s=0.5)
    assert found.problem is not None
    assert "longer than 0.5 s" in found.problem
    assert not found.is_lasting


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    """The loader's last line says what is wrong."""
    found = _check(str(tmp_path / "libmine.so"))
    assert "libmine.so" in str(found.problem)
    assert found.is_lasting


def test_a_wrong_library_is_not_loaded_and_mlx_serves(shim: str, tmp_path: Path) -> None:
    """The process that chooses loads something else, and says which library is wrong and why."""
    script = (
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from machd.engine.backend.blas import measure_blas\n"
        "from machd.engine.open import choose_checked_blas\n"
        "choice = choose_checked_blas('auto', cache_directory=Path(sys.argv[1]), environ=os.environ)\n"
        "from machd.engine.backend import native_kernels\n"
        "native_kernels._package = lambda: None\n"
        "report = measure_blas(choice)\n"
        "print(json.dumps([choice.library, [str(one) for one in choice.refused], report.advice]))\n"
    )
    environ = {**_planted(FAULTS["single tokens"]), "LD_LIBRARY_PATH": str(Path(shim).parent)}
    for _ in range(2):  # the second start reads what the first has kept
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "cache")],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=CEILING_S,
        )
        loaded, refused, advice = json.loads(done.stdout)
        assert loaded != shim
        (told,) = refused
        assert told.startswith(
            f"{shim} was not loaded: [1, 576] times [1536, 576] transposed is wrong"
        )
        if loaded is None:
            assert told in advice
