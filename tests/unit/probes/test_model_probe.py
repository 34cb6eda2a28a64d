"""A worker process measures a small model for unknown code, and later starts find the results."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S, wait_until
from unit.probes import worker_without_repairs

from machd.capabilities.evidence import MeasuredOn, Outcome
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.engine.assembly import make_engine
from machd.engine.kernels import batchable
from machd_probes import evidence_store, model_probe
from machd_probes.catalogue import BATCHING_CHECKS, STAND_IN_CHECKS
from machd_probes.matrix_file import KeptMatrix, kept_matrix
from machd_probes.model_probe import ModelProbe
from machd_probes.prober import tiny_loaded
from machd_probes.runner import WORKER_COMMAND
from machd_probes.versions import probe_basis

BATCHING = {"batch_parity", "window_overflow", "rope_positions", "sampling_isolation"}


@pytest.fixture(autouse=True)
def _nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as for an architecture without evidence, on a machine of any speed."""
    monkeypatch.setattr(evidence_store, "kept_matrix", lambda: None)
    monkeypatch.setattr(model_probe, "_START_S", CEILING_S)


MakeProbe = Callable[..., ModelProbe]


@pytest.fixture(name="make_probe")
def _make_probe(tmp_path: Path) -> Iterator[MakeProbe]:
    """Makes probes of one directory; at the end none of their workers measures on."""
    with ExitStack() as stack:

        def make(command: tuple[str, ...] = WORKER_COMMAND) -> ModelProbe:
            path = str(tmp_path / "nowhere")
            probe = ModelProbe(tmp_path, model_path=path, worker_command=command)
            stack.callback(probe.close)
            return probe

        yield make


def test_unknown_code_is_measured_and_remembered(make_probe: MakeProbe) -> None:
    """Batching first, then the rest while the daemon serves; the next start measures nothing."""
    engine = make_engine(tiny_loaded("llama"))
    probe = make_probe()
    assert probe.recall(engine) == ()

    found = probe.measure(engine) or ()
    assert {one.probe for one in found} >= BATCHING
    assert {one.measured_on for one in found} == {MeasuredOn.STAND_IN}
    assert judge(engine.model.cache, found).continuous_batching.support is Support.SUPPORTED

    wait_until(lambda: not probe.is_measuring, "the rest is measured")
    rest = probe.measure_next(engine) or ()
    assert {one.probe for one in rest} == set(STAND_IN_CHECKS)
    assert probe.measure_next(engine) is None
    again = make_probe(("false",))
    assert {one.probe for one in again.measure(engine) or ()} == set(STAND_IN_CHECKS)
    assert again.measure_next(engine) is None


_TELLS_BLAS = """
import os, pathlib, sys, time

seen, may_end = map(pathlib.Path, sys.argv[1:3])
seen.write_text(os.environ["LME_BLAS"])
while not may_end.exists():
    time.sleep(0.01)
"""


def test_a_small_model_is_measured_with_the_library_of_the_daemon(tmp_path: Path) -> None:
    """The worker is told which BLAS to load: its results are kept as that library's."""
    seen, may_end = tmp_path / "seen", tmp_path / "may end"
    probe = ModelProbe(
        tmp_path,
        model_path=str(tmp_path / "nowhere"),
        blas="/lib/libmine.so",
        environ={"LME_BLAS": "auto"},
        worker_command=(sys.executable, "-c", _TELLS_BLAS, str(seen), str(may_end)),
    )
    found = probe.measure_next(make_engine(tiny_loaded("llama"))) or ()
    assert {one.outcome for one in found} == {Outcome.MEASURING}
    may_end.touch()
    wait_until(lambda: not probe.is_measuring, "the worker has ended")
    assert seen.read_text("utf-8") == "/lib/libmine.so"


def test_without_its_repair_a_model_is_found_out(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt_bigcode's caches are standard ones, and its rows in a batch would answer wrongly."""
    monkeypatch.setattr(batchable, "_MENDED", {})
    engine = make_engine(tiny_loaded("gpt_bigcode"))
    assert judge(engine.model.cache).continuous_batching.support is Support.SUPPORTED

    found = make_probe(worker_without_repairs.COMMAND).measure(engine)

    verdict = judge(engine.model.cache, found).continuous_batching
    assert verdict.support is Support.BLOCKED
    assert MeasuredOn.STAND_IN.value in verdict.reason


def test_a_crash_is_a_failure_and_not_the_daemons(make_probe: MakeProbe) -> None:
    """A crash of the worker is a failed check, and the daemon goes on."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    engine = make_engine(tiny_loaded("llama"))

    found = make_probe((sys.executable, "-c", crash)).measure(engine) or ()

    (result,) = found
    assert (result.probe, result.outcome) == ("batch_parity", Outcome.FAILED)
    assert "SIGSEGV" in result.detail
    assert judge(engine.model.cache, found).continuous_batching.support is Support.BLOCKED


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("false",), id="ended"),
        pytest.param(("/nowhere/python",), id="absent", marks=pytest.mark.long),
    ],
)
def test_without_a_small_model_the_loaded_one_is_asked(
    make_probe: MakeProbe, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that cannot be started, or builds nothing, leaves the model itself."""
    # The other checks are the prober's, and take as long again.
    monkeypatch.setattr(model_probe, "FEATURE_CHECKS", BATCHING_CHECKS)
    engine = make_engine(tiny_loaded("llama"))

    found = make_probe(command).measure(engine) or ()

    assert {one.measured_on for one in found} == {MeasuredOn.WEIGHTS}
    assert judge(engine.model.cache, found).continuous_batching.support is Support.SUPPORTED
    assert engine.memory().kv_used_bytes == 0


def test_other_code_in_the_process_is_not_taken_for_the_models(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with repairs speaks for no model without: then the loaded one is asked."""
    monkeypatch.setattr(batchable, "_MENDED", {})
    monkeypatch.setattr(model_probe, "FEATURE_CHECKS", BATCHING_CHECKS)
    engine = make_engine(tiny_loaded("gpt_bigcode"))

    found = make_probe().measure(engine) or ()

    assert {one.measured_on for one in found} == {MeasuredOn.WEIGHTS}
    assert judge(engine.model.cache, found).continuous_batching.support is Support.BLOCKED


_ENDLESS = "import sys, time; sys.stdin.buffer.read(); print('{}', flush=True); time.sleep(1e6)"


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="processes have no priority here")
def test_worker_has_an_ordinary_priority_while_batching_is_unknown(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it would never end otherwise; the verdict says since when it runs."""
    engine = make_engine(tiny_loaded("llama"))
    probe = make_probe((sys.executable, "-c", _ENDLESS))
    monkeypatch.setattr(model_probe, "_START_S", 0.0)

    found = probe.measure(engine)

    verdict = judge(engine.model.cache, found).continuous_batching
    assert verdict.support is Support.UNKNOWN
    assert re.search(
        r"has been measured \(running since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)", verdict.reason
    )
    assert _priority(probe) == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="processes have no priority here")
def test_worker_yields_to_requests_once_batching_is_known(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence shipped with another BLAS decides at once; the worker measures beside the daemon."""
    loaded = tiny_loaded("llama")
    loaded = replace(loaded, description=replace(loaded.description, blas="this one"))
    engine = make_engine(loaded)
    basis = probe_basis(backend=loaded.description.backend, blas="another")
    shipped = kept_matrix()
    assert shipped is not None
    matrix = KeptMatrix(basis, {"llama": shipped.reports["llama"]})
    monkeypatch.setattr(evidence_store, "kept_matrix", lambda: matrix)
    probe = make_probe((sys.executable, "-c", _ENDLESS))

    found = probe.measure(engine) or ()
    assert {one.measured_on for one in found} == {MeasuredOn.SHIPPED_OTHER_BLAS}
    assert judge(engine.model.cache, found).continuous_batching.support is Support.SUPPORTED
    assert probe._stand_in is None, "the start waits for nothing"
    assert probe.measure_next(engine) == found
    assert _priority(probe) > os.getpriority(os.PRIO_PROCESS, 0)


def _priority(probe: ModelProbe) -> int:
    assert probe._stand_in is not None
    return os.getpriority(os.PRIO_PROCESS, probe._stand_in._process.pid)
