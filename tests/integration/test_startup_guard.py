"""The start-up guard over HTTP: what is measured decides, is told in four places, and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import completion, told
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.tiny_models import TinyKind, tiny_model

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult, Results
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.cli.serve import mode_lines
from machd.engine.assembly import make_engine
from machd.engine.protocol.engine import Engine, ModelDescription
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan
from machd.engine_process.startup_guard import Measure, Measures, nothing_known
from machd.errors import EngineFaultError
from machd.link.decode_mode import DecodeModeDecision
from machd.request.generation import SamplingParams
from machd.scheduler.events import DecodeMode
from machd_probes.startup import startup_measures

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
    ProbeResult(
        "batch_parity",
        Outcome.FAILED,
        "4 tokens differ",
        msgspec.structs.replace(_FIGURES, cases=3),
    ),
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
        flags: dict[str, object] = {
            "continuous_batching.enabled": is_batching_asked,
            "cache.memory_mb": 100,
        }
        if on_start is not None:
            flags["probe.on_start"] = on_start
        super().__init__(make_engine, flags, wait_until_ready=wait_until_ready)
        self._measure = measure
        self._recall = recall

    def _measures(self) -> Measures:
        return Measures(
            measure=self._measure,
            recall=self._recall,
            measure_weights=self._measure,
            measure_anew=self._measure,
        )

    @property
    def decision(self) -> DecodeModeDecision:
        """Return what the start-up screen is given."""
        assert self._daemon is not None
        assert self._daemon.decode_mode is not None
        return self._daemon.decode_mode


class _Counted:
    """A measurement with a fixed outcome, counted."""

    def __init__(self, results: tuple[ProbeResult, ...]) -> None:
        self.results = results
        self.count = 0

    def __call__(self, _engine: Engine) -> Results:
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
        ((_KV,), (), "single", "unknown", "rule"),
    ],
    ids=["passed", "failed", "nothing", "blocked", "wrong", "proven", "unproven"],
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


def test_a_model_that_could_not_be_measured_is_not_batched_by_its_rule() -> None:
    """Standard caches say nothing of the code that fills them."""

    def broken(_engine: Engine) -> Results:
        raise RuntimeError("the probe is broken")

    with _GuardedDaemon(lambda: _Model(_KV), broken, on_start="measure") as daemon:
        verdict = _capabilities(daemon)["continuous_batching"]
        answer = _ask(daemon)

    assert (verdict["verdict"], verdict["source"]) == ("unknown", "rule")
    assert "has not been measured" in verdict["reason"]
    assert answer.headers["x-decode-mode"] == "single"


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
    """Rows without an owner would never be freed: that is an engine fault, not a verdict."""
    faults = FakeFaults(reset_error=RuntimeError("no reset"))
    daemon = _GuardedDaemon(lambda: _Model(*_UNKNOWN, faults=faults), nothing_known)

    with pytest.raises(EngineFaultError), daemon:
        pass


# --- when it is measured ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_start", "layers", "is_asked", "known", "measured", "recalled"),
    [
        (None, _UNKNOWN, True, (), 1, 1),
        ("auto", _UNKNOWN, True, (), 1, 1),
        ("auto", (_KV,), True, (), 1, 1),
        ("auto", _UNKNOWN, True, _PASSED, 0, 1),
        ("auto", (_KV,), True, _FAILED, 0, 1),
        ("auto", (_CHUNKED,), True, (), 0, 1),
        ("auto", _UNKNOWN, False, (), 0, 1),
        ("measure", (_KV,), True, _PASSED, 1, 0),
        ("measure", _UNKNOWN, False, (), 0, 1),
        ("facts", _UNKNOWN, True, (), 0, 1),
        ("off", _UNKNOWN, True, _PASSED, 0, 0),
    ],
)
def test_a_model_is_measured_when_the_settings_ask_and_the_answer_matters(
    on_start: str | None,
    layers: tuple[LayerCacheFacts, ...],
    is_asked: bool,  # noqa: FBT001
    known: tuple[ProbeResult, ...],
    measured: int,
    recalled: int,
) -> None:
    """By default where nothing is known, whatever the kind of cache; what is known counts unless off."""
    measure, recall = _Counted(_PASSED), _Counted(known)
    with _GuardedDaemon(
        lambda: _Model(*layers), measure, recall, on_start=on_start, is_batching_asked=is_asked
    ) as daemon:
        source = _capabilities(daemon)["continuous_batching"]["source"]

    assert (measure.count, recall.count) == (measured, recalled)
    is_known = measured or (known and on_start != "off")
    assert source == ("measured" if is_known and layers != (_CHUNKED,) else "rule")


def test_without_evidence_a_rule_alone_may_be_asked_for() -> None:
    """``off`` batches what has standard caches, as the operator wishes, and says that it is a rule."""
    with _GuardedDaemon(lambda: _Model(_KV), on_start="off") as daemon:
        verdict = _capabilities(daemon)["continuous_batching"]
        assert _ask(daemon).headers["x-decode-mode"] == "batched"
    assert (verdict["verdict"], verdict["source"]) == ("supported", "rule")


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


# --- beside the daemon --------------------------------------------------------------------------


_REUSED = ProbeResult("cache_reuse", Outcome.PASSED, "", _FIGURES)
_CUT = ProbeResult("trim", Outcome.PASSED, "", _FIGURES)


class _LaterDaemon(_GuardedDaemon):
    """A daemon whose model turns out to do more, or less, while it is idle."""

    def __init__(self, *news: tuple[ProbeResult, ...], on_start: str | None = None) -> None:
        super().__init__(lambda: _Model(_LISTED), recall=lambda _engine: (), on_start=on_start)
        self._news = list(news)

    def _measures(self) -> Measures:
        return Measures(
            recall=lambda _engine: (),
            measure=lambda _engine: (),
            measure_next=lambda _engine: self._news.pop(0) if self._news else None,
        )


_LISTED = LayerCacheFacts("CacheList", nested=(_KV,))


def test_what_is_found_beside_the_daemon_is_switched_on() -> None:
    """Batching and the prefix cache begin when they are known to be right, with a line and an event."""
    prompt = "a prompt that is long enough to be kept by the prefix cache of the daemon"
    with capture_logs() as lines, _LaterDaemon((*_PASSED, _REUSED, _CUT)) as daemon:
        before = _capabilities(daemon)
        wait_until(
            lambda: _capabilities(daemon)["decode_mode"]["active"] == "batched",
            "what was measured is taken up",
        )
        wait_until(lambda: bool(_changes(lines)), "it is told")
        after = _capabilities(daemon)
        first, second = (_ask(daemon, prompt) for _ in range(2))

    assert before["continuous_batching"]["verdict"] == "unknown"
    assert before["prefix_cache"]["active"] is False
    assert after["prefix_cache"]["verdict"] == "supported"
    assert after["prefix_cache"]["active"] is True
    assert first.headers["x-decode-mode"] == "batched"
    assert [_cached(one) > 0 for one in (first, second)] == [False, True]
    assert _changes(lines)["continuous_batching"] == ("unknown", "supported")
    assert _changes(lines)["prefix_cache"] == ("unknown", "supported")


def test_a_prefix_cache_that_turns_out_wrong_keeps_nothing() -> None:
    """Blocks are dropped, prompts are computed anew, and answers go on."""
    prompt = "a prompt that is long enough to be kept by the prefix cache of the daemon"
    wrong = replace(_REUSED, outcome=Outcome.FAILED)
    right = (*_PASSED, _REUSED, _CUT)
    released = threading.Event()

    class _Turning(_LaterDaemon):
        def _measures(self) -> Measures:
            def measure_next(_engine: Engine) -> Results:
                return (*_PASSED, wrong, _CUT) if released.is_set() else right

            return Measures(recall=lambda _engine: right, measure_next=measure_next)

    with _Turning() as daemon:
        first, second = (_ask(daemon, prompt) for _ in range(2))
        assert [_cached(one) > 0 for one in (first, second)] == [False, True]
        released.set()
        wait_until(lambda: not _capabilities(daemon)["prefix_cache"]["active"], "it is off")
        third, fourth = (_ask(daemon, prompt) for _ in range(2))
        assert [_cached(one) for one in (third, fourth)] == [0, 0]
        assert third.headers["x-decode-mode"] == "batched"
        assert scrape(daemon.url, "machd_kv_cache_bytes", state="used") == 0


def test_what_is_found_to_be_wrong_is_switched_off() -> None:
    """A daemon that batched by what it knew stops when a probe fails, at a moment without requests."""
    with capture_logs() as lines, _LaterDaemon(_PASSED, _FAILED) as daemon:
        wait_until(lambda: "continuous_batching" in _changes(lines, "blocked"), "it is found wrong")
        assert _ask(daemon).headers["x-decode-mode"] == "single"


def test_what_is_found_beside_a_busy_daemon_is_switched_on() -> None:
    """With a request always running and others waiting, batching begins after the running ones."""
    known = threading.Event()

    class _Busy(_LaterDaemon):
        def _measures(self) -> Measures:
            def measure_next(_engine: Engine) -> Results:
                return _PASSED if known.is_set() else _MEASURING

            return Measures(
                recall=lambda _engine: (),
                measure=lambda _engine: _MEASURING,
                measure_next=measure_next,
            )

    stopped = threading.Event()

    def keep_busy(daemon: RunningDaemon) -> list[str]:
        modes = []
        while not stopped.is_set():
            answer = _ask(daemon)
            assert answer.status_code == 200
            modes.append(answer.headers["x-decode-mode"])
        return modes

    with _Busy() as daemon, ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(keep_busy, daemon) for _ in range(3)]
        before = _capabilities(daemon)
        known.set()
        try:
            wait_until(
                lambda: _capabilities(daemon)["decode_mode"]["active"] == "batched",
                "what was measured is taken up",
            )
            _ask(daemon)
        finally:
            stopped.set()
        modes = [mode for one in asked for mode in one.result()]

    assert before["continuous_batching"]["verdict"] == "unknown"
    assert (
        "has been measured (running since 2026-01-02 03:04:05 UTC)"
        in (before["continuous_batching"]["reason"])
    )
    assert set(modes) <= {"single", "batched"}


_MEASURING = (
    ProbeResult("batch_parity", Outcome.MEASURING, "running since 2026-01-02 03:04:05 UTC"),
)


@pytest.mark.parametrize("on_start", ["off", "facts"])
def test_nothing_is_measured_beside_a_daemon_that_is_not_to_measure(on_start: str) -> None:
    """If measuring is switched off, nothing is measured later either."""
    daemon = _LaterDaemon((*_PASSED, _REUSED), on_start=on_start)
    with daemon:
        assert _ask(daemon).headers["x-decode-mode"] == "single"
    assert len(daemon._news) == 1


def _changes(lines: list[Any], verdict: str = "") -> dict[str, tuple[str, str]]:
    return {
        line["feature"]: (line["previous"], line["verdict"])
        for line in lines
        if line["event"] == "capability.changed" and line["verdict"].startswith(verdict)
    }


def _cached(answer: httpx.Response) -> int:
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


# --- real models --------------------------------------------------------------------------------


class _RealDaemon(_GuardedDaemon):
    """A daemon that measures as ``serve`` does."""

    def __init__(self, make_engine: Callable[[], Engine], cache: Path) -> None:
        super().__init__(make_engine)
        self._cache = cache

    def _measures(self) -> Measures:
        return startup_measures(self._cache)


def test_a_hybrid_model_is_measured_and_then_batched(tmp_path: Path) -> None:
    """Its rule does not know; the probes find it right, and rows together answer as one alone."""
    prompts = [f"prompt {number} " * (number + 1) for number in range(4)]

    def make() -> Engine:
        return make_engine(tiny_model(TinyKind.HYBRID))

    with _GuardedDaemon(make, is_batching_asked=False) as daemon:
        alone = [_text(_ask(daemon, prompt, model="tiny-lfm2")) for prompt in prompts]
    with _RealDaemon(make, tmp_path) as daemon:
        wait_until(
            lambda: _capabilities(daemon)["decode_mode"]["active"] == "batched",
            "on a busy machine the start does not wait for the measurement",
        )
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
        return make_engine(tiny_loaded("llama4"))

    prompts = ["once upon a time", "twice"]
    with _GuardedDaemon(make, is_batching_asked=False) as daemon:
        alone = [_text(_ask(daemon, prompt, model="tiny-llama4")) for prompt in prompts]
    with (
        capture_logs() as lines,
        _RealDaemon(make, tmp_path) as daemon,
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
