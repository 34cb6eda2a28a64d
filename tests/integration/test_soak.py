"""Half an hour of mixed load with disconnects on a real daemon, which must not grow by it.

Part of ``make test-long``. ``MACHD_SOAK_MINUTES`` sets how long the load lasts.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from support import module_command
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import wait_until
from support.daemon.engine_processes import engine_of
from support.daemon.observed_daemon import LEAK_VARIABLE, ask
from support.daemon.scraping import is_idle, read_page
from support.daemon.serve_process import ServeProcess
from support.daemon.soak_load import RoundOutcome, SoakLoad
from support.daemon.soak_samples import Sample, problems, report_table, rss_growth, write_report

from machd.clock import SystemClock

_MINUTES = float(os.environ.get("MACHD_SOAK_MINUTES", "30"))
_LEAK_MINUTES = min(_MINUTES, 3.0)
_LEAK_COPIES = 192
_GRACE_S = 600
"""Beyond the load's time: starting, learning the right answers, the last round, stopping."""

_ROUND_REQUESTS = 200
_CLIENTS = 24
_SAMPLE_INTERVAL_S = 5.0
_PROGRESS_INTERVAL_S = 30.0
_SETTLE_S = 0.5
"""After the last answer, until connections and tasks that end with it are gone."""

_REST_S = 3.0
_REST_ROUNDS = 8
"""Every so many rounds the daemon rests, long enough for its heap to be trimmed."""

_MAX_SHOWN_MISTAKES = 5
_ARGUMENTS = (
    "--continuous-batching",
    "--continuous-batching-max-b", "8",
    "--cache-memory-mb", "32",
    "--limits-max-stored-responses", "64",
    "--limits-max-body-bytes", "200000",
)  # fmt: skip
_REPORT = Path(__file__).parents[2] / "bench-results" / "soak"

pytestmark = pytest.mark.longest


@dataclass
class _Soak:
    """Samples of a daemon under load, and how its requests ended."""

    samples: list[Sample] = field(default_factory=list)
    answered: int = 0
    refused: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)
    faults: float = 0.0
    broken_invariants: float = 0.0

    def count(self, outcome: RoundOutcome) -> None:
        """Add a round."""
        self.answered += outcome.answered
        self.refused += outcome.refused
        self.left += outcome.left
        self.wrong += outcome.wrong

    @property
    def progress(self) -> str:
        """Print a line of progress."""
        last = self.samples[-1]
        return (
            f"soak {last.at_s / 60:5.1f} min: RSS {last.rss_bytes / 1e6:.0f} MB, "
            f"{last.descriptors} descriptors, {last.threads} threads, {last.tasks} tasks; "
            f"{self.answered} answered, {self.refused} refused, {self.left} left, "
            f"{len(self.wrong)} wrong, {len(self.bad_lines)} errors logged"
        )

    @property
    def summary(self) -> dict[str, object]:
        """The figures, for the report."""
        return {
            "rss_growth": rss_growth(self.samples),
            "answered": self.answered,
            "refused": self.refused,
            "left": self.left,
            "wrong": self.wrong,
            "bad_lines": self.bad_lines,
            "faults": self.faults,
            "broken_invariants": self.broken_invariants,
        }


class _Sampler:
    """Looks at a daemon at any time, and every few seconds by itself."""

    def __init__(self, server: ServeProcess, socket_path: Path, soak: _Soak) -> None:
        self._server = server
        self._socket_path = socket_path
        self._soak = soak
        self._process = psutil.Process(server.process.pid)
        self._engine = engine_of(server.process.pid)
        self._clock = SystemClock()
        self._start_s = self._clock.monotonic_s()
        self._lock = threading.Lock()

    @property
    def at_s(self) -> float:
        """Seconds since the load began."""
        return self._clock.monotonic_s() - self._start_s

    def look(self, *, idle: bool) -> None:
        """Add a sample, and keep the log lines that should not be there."""
        with self._lock:
            counts = ask(self._socket_path)
            page = read_page(self._server.url)
            self._soak.samples.append(
                Sample(
                    at_s=self.at_s,
                    rss_bytes=self._process.memory_info().rss + self._engine.memory_info().rss,
                    heap_used_bytes=counts.get("heap_used_bytes", 0),
                    heap_free_bytes=counts.get("heap_free_bytes", 0),
                    mlx_bytes=counts.get("mlx_active_bytes", 0) + counts.get("mlx_cache_bytes", 0),
                    prefix_bytes=int(page.value("machd_prefix_cache_bytes") or 0),
                    stored_response_bytes=int(page.value("machd_stored_response_bytes") or 0),
                    descriptors=self._process.num_fds(),
                    threads=self._process.num_threads(),
                    tasks=counts["tasks"],
                    is_idle=idle,
                )
            )
            self._soak.faults = sum(page.series("machd_faults_total").values())
            self._soak.broken_invariants = page.value("machd_invariant_violations_total") or 0
            self._soak.bad_lines += filter(_is_bad, self._server.take_lines())

    @contextmanager
    def sampling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Look every few seconds, and tell how it goes every half minute."""
        stop = threading.Event()

        def run() -> None:
            told_s = 0.0
            while not stop.wait(_SAMPLE_INTERVAL_S):
                self.look(idle=False)
                if self.at_s - told_s >= _PROGRESS_INTERVAL_S:
                    told_s = self.at_s
                    tell(self._soak.progress)

        thread = threading.Thread(target=run, name="sampler")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture(name="tiny_llama", scope="module")
def _tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the usual vocabulary."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(name="tell")
def _tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Show a line at once, whatever pytest captures."""

    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201 - for a person who watches half an hour

    return tell


@pytest.mark.timeout(_MINUTES * 60 + _GRACE_S)
def test_daemon_does_not_grow_under_mixed_load_with_disconnects(
    tiny_llama: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Memory, descriptors, threads and tasks stay level; every answer is right or expected."""
    soak = _run(tiny_llama, tmp_path, tell, minutes=_MINUTES)
    write_report(soak.samples, soak.summary, _REPORT)
    tell(f"{soak.progress}; RSS growth {rss_growth(soak.samples):+.2%}; {_REPORT}.json")
    assert not soak.wrong, "\n".join(soak.wrong[:_MAX_SHOWN_MISTAKES])
    assert not soak.bad_lines, "".join(soak.bad_lines[:_MAX_SHOWN_MISTAKES])
    assert soak.faults == 0
    assert soak.broken_invariants == 0
    assert soak.answered > soak.left > 0
    assert soak.refused > 0
    grown = problems(soak.samples)
    assert not grown, "\n".join([*grown, report_table(soak.samples)])


@pytest.mark.timeout(_LEAK_MINUTES * 60 + _GRACE_S)
def test_soak_finds_a_leak_when_bodies_of_responses_are_kept(
    tiny_llama: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """A planted list of response bodies makes the verdict on memory fail, by more than warm-up does."""
    environ = {LEAK_VARIABLE: str(_LEAK_COPIES)}
    soak = _run(tiny_llama, tmp_path, tell, minutes=_LEAK_MINUTES, environ=environ)
    write_report(soak.samples, soak.summary, tmp_path / "leak")
    tell(f"{soak.progress}; RSS growth {rss_growth(soak.samples):+.2%} with a planted leak")
    assert any(one.startswith("RSS grew") for one in problems(soak.samples))
    assert rss_growth(soak.samples) > 0.25, report_table(soak.samples)


def _run(
    model: Path,
    directory: Path,
    tell: Callable[[str], None],
    *,
    minutes: float,
    environ: dict[str, str] | None = None,
) -> _Soak:
    """Put a daemon under load for so long."""
    soak = _Soak()
    socket_path = directory / "observer.sock"
    program = (
        *module_command("support.daemon.observed_daemon"),
        str(socket_path),
    )
    with ServeProcess(str(model), *_ARGUMENTS, environ=environ, program=program) as server:
        load = SoakLoad(server.url, model.name, seed=20)
        load.learn_answers()
        sampler = _Sampler(server, socket_path, soak)
        with sampler.sampling(tell):
            for number in itertools.count(1):
                soak.count(load.run_round(_ROUND_REQUESTS, max_clients=_CLIENTS))
                wait_until(lambda: is_idle(server.url), "nothing runs or waits")
                is_resting = number % _REST_ROUNDS == 0
                threading.Event().wait(_REST_S if is_resting else _SETTLE_S)
                sampler.look(idle=True)
                if sampler.at_s >= minutes * 60:
                    break
    return soak


def _is_bad(line: str) -> bool:
    """Return whether a log line says that something failed."""
    if not line.startswith("{"):
        return "Traceback" in line
    event = json.loads(line)
    return event["level"] in ("error", "critical") or event["event"] == "scheduler.invariant_broken"
