"""The BLAS is chosen before mlx and proved by measuring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S
from support.engines.native import without_kernels

from machd.engine.backend import blas, native_kernels
from machd.engine.backend.blas import (
    BlasChoice,
    BlasReport,
    RefusedLibrary,
    choose_blas,
    measure_blas,
)
from machd.errors import StartupError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="chosen on Linux only")


def _in_fresh_process(program: str) -> dict[str, object]:
    """Run a program that prints one JSON object, in a process that has not imported mlx."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=CEILING_S,
    )
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@linux_only
def test_choosing_does_not_import_mlx() -> None:
    """A BLAS can only be put in front of mlx's own while mlx is not there yet."""
    answer = _in_fresh_process(
        "import json, sys\n"
        "from machd.engine.backend.blas import choose_blas\n"
        "choice = choose_blas('auto')\n"
        "print(json.dumps({'mlx': 'mlx.core' in sys.modules, 'library': choice.library}))"
    )
    assert answer["mlx"] is False


@linux_only
def test_a_chosen_library_is_the_one_that_multiplies() -> None:
    """With a library found, sixteen rows cost far less than sixteen times one; without, they do.

    A measurement of 20 ms beside other programs may say anything, so one of twenty has to say it.
    """
    program = (
        "import json\n"
        "from machd.engine.backend.blas import choose_blas, measure_blas\n"
        "choice = choose_blas({choice!r})\n"
        "from machd.engine.backend import native_kernels\n"
        "native_kernels._package = lambda: None\n"
        "report = measure_blas(choice)\n"
        "print(json.dumps({{'library': choice.library, 'backend': report.backend,\n"
        " 'reference': report.is_reference, 'advice': report.advice, 'name': report.name}}))"
    )

    def measured(choice: str, *, is_reference: bool) -> dict[str, object]:
        reports = (_in_fresh_process(program.format(choice=choice)) for _ in range(20))
        report: dict[str, object] = {}
        for report in reports:
            if report["reference"] is is_reference:
                break
        return report

    found = measured("auto", is_reference=False)
    plain = measured("off", is_reference=True)
    if found["library"] is None or found["backend"] != "cpu":
        pytest.skip("no optimised BLAS on this machine, or a GPU")
    assert found["reference"] is False
    assert found["advice"] is None
    assert plain["reference"] is True
    assert "libopenblas0-pthread" in str(plain["advice"])


@linux_only
@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_path_that_cannot_be_loaded_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """A path is a wish: it is never passed over in silence, and the message says what to give."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    path = tmp_path / "libmine.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match="cblas interface"):
        choose_blas(str(path))


@linux_only
def test_a_library_without_cblas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that could not answer mlx is not put in front of it."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    libc = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
        if "libc.so" in line
    )
    with pytest.raises(StartupError, match="no cblas_sgemm"):
        choose_blas(libc)


def test_off_loads_nothing() -> None:
    """``off`` leaves mlx its own library."""
    assert choose_blas("off") == BlasChoice("off", None, "switched off")


@linux_only
def test_too_late_is_said_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """After mlx is imported nothing is loaded, and the reason says so."""
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    monkeypatch.setattr(blas, "installed_libraries", lambda _environ: ("/nowhere/libblas.so",))
    choice = choose_blas("auto")
    assert choice.library is None
    assert "imported before" in choice.reason


@linux_only
def test_an_earlier_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call in a process names the library that computes: evidence is kept under its name."""
    libc = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
        if "libc.so" in line
    )
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    monkeypatch.setattr(blas, "installed_libraries", lambda _environ: ("/nowhere/a.so", libc))
    assert choose_blas("auto").library == libc


@pytest.fixture(name="loaded")
def _loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three libraries are installed, mlx is not imported, and what is loaded is only listed."""
    loaded: list[str] = []
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(blas, "_expects_cuda", lambda: False)
    monkeypatch.setattr(blas, "installed_libraries", lambda _environ: ("a", "b", "c"))
    monkeypatch.setattr(blas, "_load", loaded.append)
    return loaded


@linux_only
def test_the_first_library_in_a_fixed_order_is_loaded(loaded: list[str]) -> None:
    """Ranks, probe workers and later starts choose alike; the libraries behind it are not even checked."""
    checked: list[str] = []
    choice = choose_blas("auto", check=checked.append)
    assert (choice.library, choice.reason) == ("a", "the first found")
    assert choice.for_other_processes == "a"
    assert (checked, loaded) == (["a"], ["a"])


@linux_only
def test_a_library_that_multiplies_wrongly_is_left_out(loaded: list[str]) -> None:
    """The next one in the order serves, and the choice says which was refused and why."""
    choice = choose_blas("auto", check=lambda library: "wrong" if library == "a" else None)
    assert choice.library == "b"
    assert [str(one) for one in choice.refused] == ["a was not loaded: wrong"]
    assert loaded == ["b"]


@linux_only
def test_a_library_that_is_asked_for_and_wrong_stops_the_start(
    loaded: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path is a wish: another library is not loaded in its place."""
    path = tmp_path / "libmine.so"
    path.touch()
    monkeypatch.setattr(blas, "_cannot_load", lambda _library: None)
    with pytest.raises(StartupError, match=r"libmine.so: .* is wrong in row 3"):
        choose_blas(str(path), check=lambda _library: "[4, 2] times [2, 2] is wrong in row 3")
    assert loaded == []


@linux_only
def test_where_every_library_is_wrong_mlx_serves(loaded: list[str]) -> None:
    """Nothing is loaded here or in a process that is told the choice, and the advice names them."""
    choice = choose_blas("auto", check=lambda library: f"wrong {library}")
    assert choice.library is None
    assert choice.for_other_processes == "off"
    assert [str(one) for one in choice.refused] == [
        f"{one} was not loaded: wrong {one}" for one in "abc"
    ]
    assert loaded == []


def test_other_processes_compute_with_the_same_library() -> None:
    """``off`` stays ``off``, and where mlx's own library serves another process may look for itself."""
    assert BlasChoice("off", None, "switched off").for_other_processes == "off"
    assert BlasChoice("auto", None, "none found").for_other_processes == "auto"


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS nothing is loaded: Accelerate serves."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert choose_blas("auto").library is None


@pytest.mark.parametrize(
    ("sixteen_rows_ms", "is_reference"), [(16.0, True), (5.0, True), (4.9, False), (1.2, False)]
)
def test_the_verdict_is_the_ratio(
    monkeypatch: pytest.MonkeyPatch, sixteen_rows_ms: float, *, is_reference: bool
) -> None:
    """Sixteen rows at five times one row or more is the reference BLAS, whatever its name."""
    without_kernels(monkeypatch)
    monkeypatch.setattr("machd.engine.backend.device.backend_name", lambda: "cpu")
    monkeypatch.setattr(blas, "_products_ms", lambda _clock: (1.0, sixteen_rows_ms))
    report = measure_blas(BlasChoice("off", None, "switched off"), clock=ManualClock())
    assert report.is_reference is is_reference
    assert report.ratio == sixteen_rows_ms


@linux_only
def test_advice_does_not_tell_to_install_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes a batch badly is named, and the advice is to measure again or name another."""
    without_kernels(monkeypatch)
    monkeypatch.setattr("machd.engine.backend.device.backend_name", lambda: "cpu")
    monkeypatch.setattr(blas, "_products_ms", lambda _clock: (1.0, 16.0))
    monkeypatch.setattr(blas, "_library_name", lambda *_, **__: "Intel MKL 2026.2")
    advice = measure_blas(BlasChoice("auto", "a", "the first found"), clock=ManualClock()).advice
    assert "Intel MKL 2026.2 was loaded" in str(advice)
    assert "apt install" not in str(advice)


@pytest.mark.parametrize(
    ("library", "name"),
    [("OpenBLAS 0.3.21", "OpenBLAS 0.3.21"), (None, "MLX's own BLAS")],
)
def test_machds_own_kernels_are_named_before_the_blas(
    monkeypatch: pytest.MonkeyPatch, library: str | None, name: str
) -> None:
    """Nothing is measured and nothing advised: the BLAS multiplies only what the kernels do not."""
    monkeypatch.setattr(native_kernels, "_package", object)
    monkeypatch.setattr("machd.engine.backend.device.backend_name", lambda: "cpu")
    monkeypatch.setattr(blas, "installed_version", {"machd-native": "0.1.0"}.__getitem__)
    monkeypatch.setattr(blas, "_products_ms", lambda _clock: pytest.fail("measured"))
    monkeypatch.setattr(blas, "_library_name", lambda _choice: library)
    report = measure_blas(BlasChoice("auto", None, "none", (RefusedLibrary("a", "wrong"),)))
    assert report == BlasReport("cpu", f"machd-native 0.1.0, {name}")
    assert report.ratio is None


def test_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's library is not measured if a GPU multiplies."""
    monkeypatch.setattr("machd.engine.backend.device.backend_name", lambda: "metal")
    report = measure_blas(BlasChoice("auto", None, "the system's own library serves"))
    assert (report.backend, report.name, report.ratio) == ("metal", None, None)
