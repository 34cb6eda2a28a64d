"""The start-up guard over HTTP: what is measured decides, is told in four places, and kept."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from dialogue import completion, told
from polling import CEILING_S
from running_daemon import RunningDaemon
from scraping import scrape
from serve_process import ServeProcess
from structlog.testing import capture_logs
from tiny_models import TinyKind, tiny_model

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.cli.serve import mode_lines
from machd.daemon import Daemon
from machd.engine.fake import FakeEngine, FakeFaults
from machd.engine.mlx_engine import MlxEngine
from machd.engine.protocol import (
    DecodeRow,
    Engine,
    ModelDescription,
    PrefillChunk,
    SamplingParams,
    StepPlan,
)
from machd.errors import EngineFaultError
from machd.scheduler.events import DecodeMode
from machd.serving.decode_mode import DecodeModeDecision
from machd.serving.startup_guard import Measure, Measures, nothing_known
from machd_probes.startup import startup_measure, startup_recall

_PATH = "/v1/completions"
_KV = LayerCacheFacts("KVCache")
_STATE = LayerCacheFacts("ArraysCache", owner="Mamba", trimmable=False)
_CHUNKED = LayerCacheFacts("ChunkedKVCache", mergeable=False)
_UNKNOWN = (_STATE, _KV)
_FEATURES = (
    "continuous_batching",
    "batched_specdec",
    "speculation",
    "prefix_cache",
    "kv_quantization",
    "chunked_prefill",
)
_FIGURES = Evidence(token_mismatches=0, max_logprob_diff=1.2e-5, noise_floor=1.1e-5, cases=12)
_PASSED = (ProbeResult("batch_parity", Outcome.PASSED, "", _FIGURES),)
_FAILED = (
    ProbeResult("batch_parity", Outcome.FAILED, "4 tokens differ", replace(_FIGURES, cases=3)),
)


class _Model(FakeEngine):
    """A fake engine with other caches."""

    def __init__(self, *layers: LayerCacheFacts, faults: FakeFaults | None = None) -> None:
        super().__init__(told, faults=faults)
        self._layers = layers

    @property
    def model(self) -> ModelDescription:
        return replace(super().model, cache=CacheFacts(self._layers, 1024, 0))


class _GuardedDaemon(RunningDaemon):
    """A daemon that can measure."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        measure: Measure = nothing_known,
        recall: Measure = nothing_known,
        *,
        is_batching_asked: bool = True,
        on_start: str | None = None,
        wait_until_ready: bool = True,
    ) -> None:
        """Prepare it; ``on_start`` is ``probe.on_start``, where it is not the default."""
        flags: dict[str, object] = {"continuous_batching.enabled": is_batching_asked}
        if on_start is not None:
            flags["probe.on_start"] = on_start
        super().__init__(make_engine, flags, wait_until_ready=wait_until_ready)
        self._measure = measure
        self._recall = recall

    async def _main(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._daemon = Daemon(
            self._sources,
            self._loaded,
            self._make_engine,
            on_ready=lambda _url, _engine: self._ready.set(),
            measures=Measures(self._measure, self._recall, self._measure),
        )
        self.url = self._daemon.url
        if not self._wait_until_ready:
            self._ready.set()
        await self._daemon.run()

    @property
    def decision(self) -> DecodeModeDecision:
        """What the start-up screen is given."""
        assert self._daemon is not None
        assert self._daemon.decode_mode is not None
        return self._daemon.decode_mode


class _Counted:
    """A measurement with a fixed outcome, counted."""

    def __init__(self, results: tuple[ProbeResult, ...]) -> None:
        self.results = results
        self.count = 0

    def __call__(self, _engine: Engine) -> tuple[ProbeResult, ...]:
        self.count += 1
        return self.results


def _capabilities(daemon: RunningDaemon) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{daemon.url}/v1/capabilities").json()
    return answer


def _ask(daemon: RunningDaemon, prompt: str = "say hello", **fields: object) -> httpx.Response:
    body = completion(prompt, **({"temperature": 0, "max_tokens": 20} | fields))
    return httpx.post(f"{daemon.url}{_PATH}", json=body, timeout=CEILING_S)


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _line(lines: list[Any], event: str) -> dict[str, Any]:
    (line,) = (one for one in lines if one["event"] == event)
    found: dict[str, Any] = line
    return found


# --- what decides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "results", "mode", "verdict", "source"),
    [
        (_UNKNOWN, _PASSED, "batched", "supported", "measured"),
        (_UNKNOWN, _FAILED, "single", "blocked", "measured"),
        (_UNKNOWN, (), "single", "unknown", "rule"),
        ((_CHUNKED, _KV), _PASSED, "single", "blocked", "rule"),
        ((_KV,), _FAILED, "single", "blocked", "measured"),
        ((_KV,), _PASSED, "batched", "supported", "measured"),
    ],
    ids=["passed", "failed", "nothing", "blocked", "wrong", "proven"],
)
def test_what_is_measured_decides_and_is_told_in_four_places(
    layers: tuple[LayerCacheFacts, ...],
    results: tuple[ProbeResult, ...],
    mode: str,
    verdict: str,
    source: str,
) -> None:
    """Log, capabilities, metrics, and screen with headers agree, and the answer is right anyway."""
    with (
        capture_logs() as lines,
        _GuardedDaemon(
            lambda: _Model(*layers), lambda _engine: results, on_start="measure"
        ) as daemon,
    ):
        capabilities = _capabilities(daemon)
        answer = _ask(daemon)
        infos = {
            feature: scrape(daemon.url, "machd_capability_info", feature=feature)
            for feature in _FEATURES
        }
        info = scrape(
            daemon.url,
            "machd_capability_info",
            feature="continuous_batching",
            verdict=verdict,
            source=source,
        )
        screen = mode_lines(daemon.decision)

    is_measured = source == "measured"
    line = _line(lines, "decode_mode.decided")
    told_verdict = capabilities["continuous_batching"]
    assert (line["active"], line["verdict"], line["source"]) == (mode, verdict, source)
    assert line["log_level"] == ("info" if mode == "batched" else "warning")
    assert (line["evidence"] is not None) == is_measured
    assert told_verdict["verdict"] == verdict
    assert told_verdict["source"] == source
    assert ("evidence" in told_verdict) == is_measured
    if is_measured:
        assert told_verdict["evidence"] == line["evidence"]
        assert told_verdict["evidence"]["cases"] == results[0].evidence.cases
    assert capabilities["decode_mode"]["active"] == mode
    assert capabilities["decode_mode"]["reason"] == told_verdict["reason"] == line["reason"]
    assert infos == dict.fromkeys(_FEATURES, 1)
    assert info == 1
    assert f"decode mode      {mode}" in screen
    if mode == "single":
        assert "not batched" in screen
        assert "one at a time" in " ".join(screen.split())
    assert answer.headers["x-decode-mode"] == mode
    assert _text(answer) == "hello"


def test_a_measurement_that_raises_leaves_the_rule_and_the_daemon() -> None:
    """It is logged with advice, its rows are forgotten, and requests are served one at a time."""

    def broken(engine: Engine) -> tuple[ProbeResult, ...]:
        chunk = PrefillChunk(
            0, (1, 2, 3), 0, is_last=True, sampling=SamplingParams(), reserved_tokens=9
        )
        engine.run(StepPlan(prefill=(chunk,), decode=(DecodeRow(0),)))
        raise RuntimeError("the probe is broken")

    with (
        capture_logs() as lines,
        _GuardedDaemon(lambda: _Model(*_UNKNOWN), broken) as daemon,
    ):
        capabilities = _capabilities(daemon)
        answer = _ask(daemon)
        left_bytes = scrape(daemon.url, "machd_kv_cache_bytes", state="used")

    line = _line(lines, "probe.failed")
    assert line["log_level"] == "error"
    assert "probe.on_start" in line["advice"]
    assert capabilities["continuous_batching"]["verdict"] == "unknown"
    assert capabilities["decode_mode"]["active"] == "single"
    assert _text(answer) == "hello"
    assert left_bytes == 0


def test_code_of_a_model_that_exits_does_not_end_the_daemon() -> None:
    """An architecture that calls ``sys.exit`` is measured as nothing."""

    def leave(_engine: Engine) -> tuple[ProbeResult, ...]:
        raise SystemExit(3)

    with _GuardedDaemon(lambda: _Model(*_UNKNOWN), leave) as daemon:
        assert _ask(daemon).headers["x-decode-mode"] == "single"


def test_an_engine_that_cannot_forget_the_probe_does_not_serve() -> None:
    """Rows that nobody owns would stay for good: that is an engine fault, not a verdict."""
    faults = FakeFaults(reset_error=RuntimeError("no reset"))
    daemon = _GuardedDaemon(lambda: _Model(*_UNKNOWN, faults=faults), nothing_known)

    with pytest.raises(EngineFaultError), daemon:
        pass


# --- when it is measured ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_start", "layers", "is_asked", "measured", "recalled"),
    [
        (None, _UNKNOWN, True, 1, 0),
        ("auto", _UNKNOWN, True, 1, 0),
        ("auto", (_KV,), True, 0, 1),
        ("auto", (_CHUNKED,), True, 0, 1),
        ("auto", _UNKNOWN, False, 0, 1),
        ("measure", (_KV,), True, 1, 0),
        ("measure", _UNKNOWN, False, 0, 1),
        ("facts", _UNKNOWN, True, 0, 1),
        ("off", _UNKNOWN, True, 0, 0),
    ],
)
def test_a_model_is_measured_when_the_settings_ask_and_the_answer_matters(
    on_start: str | None,
    layers: tuple[LayerCacheFacts, ...],
    is_asked: bool,  # noqa: FBT001
    measured: int,
    recalled: int,
) -> None:
    """By default where the rule does not know; what was measured before counts unless it is off."""
    measure, recall = _Counted(_PASSED), _Counted(_PASSED)
    with _GuardedDaemon(
        lambda: _Model(*layers), measure, recall, on_start=on_start, is_batching_asked=is_asked
    ) as daemon:
        source = _capabilities(daemon)["continuous_batching"]["source"]

    assert (measure.count, recall.count) == (measured, recalled)
    is_blocked = layers == (_CHUNKED,)
    assert source == ("measured" if measured + recalled and not is_blocked else "rule")


def test_health_answers_and_a_stop_works_while_it_is_measured() -> None:
    """HTTP is up, work is turned away, and SIGTERM does not wait for the probe."""
    began, may_end = threading.Event(), threading.Event()

    def slow(_engine: Engine) -> tuple[ProbeResult, ...]:
        began.set()
        assert may_end.wait(CEILING_S)
        return _PASSED

    daemon = _GuardedDaemon(lambda: _Model(*_UNKNOWN), slow, wait_until_ready=False)
    try:
        with daemon:
            assert began.wait(CEILING_S)
            live = httpx.get(f"{daemon.url}/health")
            ready = httpx.get(f"{daemon.url}/health/ready")
            refused = _ask(daemon)
            daemon.stop()
            has_stopped = daemon.join(CEILING_S)
    finally:
        may_end.set()

    assert (live.status_code, live.json()["state"]) == (200, "loading")
    assert ready.status_code == refused.status_code == 503
    assert has_stopped
    assert daemon.error is None


# --- what is kept -------------------------------------------------------------------------------


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path: Path) -> Path:
    """Files as a model has them; nobody loads them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class _Prober:
    """Stands for the prober, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: tuple[ProbeResult, ...]) -> None:
        self.count = 0
        self.results = results
        # Results hold for the engine's sources, which somebody may edit while this runs.
        monkeypatch.setattr("machd_probes.versions.sources_digest", lambda: "sources")
        monkeypatch.setattr("machd_probes.prober.measure_engine", self._measure)

    def _measure(self, _engine: Engine) -> tuple[ProbeResult, ...]:
        self.count += 1
        return self.results


def test_a_second_start_remembers(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files are measured once, and both starts come to the same verdict."""
    prober = _Prober(monkeypatch, _PASSED)
    told_verdicts = []
    for _ in range(2):
        measure = startup_measure(tmp_path, model_path=str(checkpoint))
        with _GuardedDaemon(lambda: _Model(*_UNKNOWN), measure) as daemon:
            told_verdicts.append(_capabilities(daemon)["continuous_batching"])
            assert _ask(daemon).headers["x-decode-mode"] == "batched"

    recall = startup_recall(tmp_path, model_path=str(checkpoint))
    assert prober.count == 1
    assert told_verdicts[0] == told_verdicts[1]
    assert recall(_Model(*_UNKNOWN)) == _PASSED


def test_other_files_are_another_model(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights, another configuration or another place are measured anew."""
    prober = _Prober(monkeypatch, _PASSED)
    engine = _Model(*_UNKNOWN)
    other = tmp_path / "other"

    def measure(path: Path) -> int:
        startup_measure(tmp_path, model_path=str(path))(engine)
        return prober.count

    assert measure(checkpoint) == measure(checkpoint) == 1
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    assert measure(checkpoint) == 2
    (checkpoint / "config.json").write_text('{"sliding_window": 8}')
    assert measure(checkpoint) == 3
    checkpoint.rename(other)
    assert measure(other) == 4
    assert measure(other) == 4


@pytest.mark.parametrize("name", ["model.py", "parts/deep/layers.py", "../elsewhere.py"])
def test_code_of_a_checkpoint_is_part_of_it(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A model that is built by Python code of its own is another one when that code changes."""
    (checkpoint / "config.json").write_text(json.dumps({"model_file": name}))
    code = checkpoint / name
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text("WINDOW = 8")
    prober = _Prober(monkeypatch, _PASSED)
    measure = startup_measure(tmp_path / "cache", model_path=str(checkpoint))
    engine = _Model(*_UNKNOWN)

    measure(engine)
    measure(engine)
    assert prober.count == 1
    code.write_text("WINDOW = 16")
    assert startup_recall(tmp_path / "cache", model_path=str(checkpoint))(engine) == ()
    measure(engine)
    assert prober.count == 2


def test_a_file_that_looks_as_old_as_before_is_another_one(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the same size whose time of writing was set back are measured anew."""
    weights = checkpoint / "model.safetensors"
    prober = _Prober(monkeypatch, _PASSED)
    measure = startup_measure(tmp_path / "cache", model_path=str(checkpoint))
    before = weights.stat()

    measure(_Model(*_UNKNOWN))
    weights.write_bytes(b"other w")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    measure(_Model(*_UNKNOWN))
    assert prober.count == 2


def test_a_folder_without_end_is_not_looked_through(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads back into the folder ends the search, and nothing is kept."""
    (checkpoint / "again").symlink_to(checkpoint)
    (checkpoint / "and again").symlink_to(checkpoint)
    prober = _Prober(monkeypatch, _PASSED)
    measure = startup_measure(tmp_path / "cache", model_path=str(checkpoint))

    for _ in range(2):
        assert measure(_Model(*_UNKNOWN)) == _PASSED
    assert prober.count == 2


_ERRORED = ProbeResult("rope_positions", Outcome.ERRORED, "out of memory")
_RAISED = ProbeResult("rope_positions", Outcome.FAILED, "raises RuntimeError: [malloc] 9 bytes")


@pytest.mark.parametrize(
    ("results", "is_there"),
    [((*_PASSED, _ERRORED), True), ((*_PASSED, _RAISED), True), (_PASSED, False)],
    ids=["errored", "raised", "no files"],
)
def test_what_cannot_be_relied_on_is_not_kept(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    results: tuple[ProbeResult, ...],
    is_there: bool,  # noqa: FBT001
) -> None:
    """Neither what ended in an error or compared nothing, nor results of files that are gone."""
    prober = _Prober(monkeypatch, results)
    path = str(checkpoint if is_there else tmp_path / "nowhere")
    engine = _Model(*_UNKNOWN)

    for _ in range(2):
        assert startup_measure(tmp_path, model_path=path)(engine) == prober.results
    assert prober.count == 2
    assert startup_recall(tmp_path, model_path=path)(engine) == ()


# --- real models --------------------------------------------------------------------------------


def test_a_hybrid_model_is_measured_and_then_batched(tmp_path: Path) -> None:
    """Its rule does not know; the probes find it right, and rows together answer as one alone."""
    prompts = [f"prompt {number} " * (number + 1) for number in range(4)]

    def make() -> Engine:
        return MlxEngine(tiny_model(TinyKind.HYBRID))

    with _GuardedDaemon(make, is_batching_asked=False) as daemon:
        alone = [_text(_ask(daemon, prompt, model="tiny-lfm2")) for prompt in prompts]
    with _GuardedDaemon(make, startup_measure(tmp_path)) as daemon:
        verdict = _capabilities(daemon)["continuous_batching"]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(
                pool.map(lambda prompt: _ask(daemon, prompt, model="tiny-lfm2"), prompts)
            )

    assert (verdict["verdict"], verdict["source"]) == ("supported", "measured")
    assert verdict["evidence"]["token_mismatches"] == 0
    assert verdict["evidence"]["cases"] > 0
    assert {answer.headers["x-decode-mode"] for answer in answers} == {"batched"}
    assert [_text(answer) for answer in answers] == alone


def test_a_blocked_architecture_is_served_one_at_a_time_and_says_why(tmp_path: Path) -> None:
    """llama4's caches cannot be merged: asked for a batch or not, its answers are the same."""
    from machd_probes.prober import tiny_loaded  # noqa: PLC0415 - imports mlx

    def make() -> Engine:
        return MlxEngine(tiny_loaded("llama4"))

    prompts = ["once upon a time", "twice"]
    with _GuardedDaemon(make, is_batching_asked=False) as daemon:
        alone = [_text(_ask(daemon, prompt, model="tiny-llama4")) for prompt in prompts]
    with (
        capture_logs() as lines,
        _GuardedDaemon(make, startup_measure(tmp_path)) as daemon,
    ):
        capabilities = _capabilities(daemon)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(
                pool.map(lambda prompt: _ask(daemon, prompt, model="tiny-llama4"), prompts)
            )
        info = scrape(
            daemon.url,
            "machd_capability_info",
            feature="continuous_batching",
            verdict="blocked",
            source="rule",
        )
        screen = mode_lines(daemon.decision)

    line = _line(lines, "decode_mode.decided")
    assert line["log_level"] == "warning"
    for text in (
        line["reason"],
        capabilities["continuous_batching"]["reason"],
        capabilities["decode_mode"]["reason"],
        screen,
    ):
        assert "ChunkedKVCache" in text
    assert info == 1
    assert {answer.headers["x-decode-mode"] for answer in answers} == {"single"}
    assert [_text(answer) for answer in answers] == alone


def test_a_signal_ends_a_process_that_measures(tmp_path: Path, embedded_model_path: Path) -> None:
    """SIGTERM while the model is probed: exit 0, no core dump, and nothing half written."""
    arguments = ("--continuous-batching", "--probe-on-start", "measure", str(embedded_model_path))
    serve = ServeProcess(*arguments, environ={"XDG_CACHE_HOME": str(tmp_path)})
    with serve.started():
        serve.wait_for("probe.started")
        serve.terminate()
        serve.process.wait(CEILING_S)

    assert serve.process.returncode == 0
    assert not [event for event in serve.events if event["event"] == "daemon.ready"]
    assert not list(tmp_path.rglob("model-*.json"))


# --- the screen ---------------------------------------------------------------------------------


def test_the_screen_fits_a_narrow_terminal() -> None:
    """A long reason is folded at 80 columns; a mode that was asked for needs none."""
    reason = "because " * 40 + "it is so"
    lines = mode_lines(DecodeModeDecision(DecodeMode.BATCHED, DecodeMode.SINGLE, reason))

    assert all(len(line) <= 80 for line in lines.splitlines())
    assert "not batched: because because" in " ".join(lines.split())
    plain = DecodeModeDecision(DecodeMode.SINGLE, DecodeMode.SINGLE, reason)
    assert mode_lines(plain) == "  decode mode      single\n"
    assert mode_lines(None) == ""
