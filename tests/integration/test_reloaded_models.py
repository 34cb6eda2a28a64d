"""Models that are added, changed and removed while others serve: wholly or not at all, and no answer is cut."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import kept_logging
from support.daemon.scraping import families_of
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

from machd.link.port import EngineListener, EnginePort, OpenEngine
from machd.settings.model import Settings

_TEXT = "an answer that goes on while models come and go " * 6
_SIZE = 35_000_000
_SECTION = "memory_gb = 0.1\nmax_turn_s = 1.0"
_FLAGS: dict[str, object] = {
    "admin.listen": "127.0.0.1:0",
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 8,
    "cache.prefix": False,  # what is reused of a prompt is not seen by the scripted engine
}


class _Daemon(SupervisedDaemon):
    """One whose file of settings is written anew.

    Attributes:
        section: Lines of ``[models]``.
    """

    def __init__(self, directory: Path, section: str = _SECTION) -> None:
        self._directory = directory
        self._path = directory / "machd.toml"
        self.section = section
        self.write("alpha", "beta")
        environ = {"XDG_RUNTIME_DIR": str(directory), "HOME": str(directory)}
        super().__init__(_FLAGS, config_path=self._path, environ=environ)
        self.unmakable: str | None = None

    def _open_engine(self) -> OpenEngine:
        """Fail to make an engine whose path has a word in it."""
        make = super()._open_engine()

        def open_engine(settings: Settings, listener: EngineListener) -> EnginePort:
            if self.unmakable is not None and self.unmakable in (settings.model.path or ""):
                raise OSError("there is no room for another thread")
            return make(settings, listener)

        return open_engine

    def __enter__(self) -> Self:
        super().__enter__()
        assert self.admin_url is not None
        port = self.admin_url.rpartition(":")[2]
        token = (self._directory / "machd" / f"admin-{port}.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        self.admin = httpx.Client(base_url=self.admin_url, headers=headers, timeout=CEILING_S)
        return self

    def write(
        self,
        *names: str,
        tables: Mapping[str, str] | None = None,
    ) -> None:
        """Write models of one size, and tables with other lines."""
        models = dict.fromkeys(names, f'path = "fake?size={_SIZE}"') | dict(tables or {})
        lines = [
            f"[models]\n{self.section}",
            *(f"[models.{name}]\n{one}" for name, one in models.items()),
        ]
        self._path.write_text("\n".join(lines))

    def reload(self) -> httpx.Response:
        """Have the settings read again."""
        return self.admin.post("/admin/reload")

    def say(self, model: str, text: str = "hello") -> httpx.Response:
        """Ask a model for a text."""
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            json=chat(f"say {text}") | {"model": model},
            timeout=CEILING_S,
        )

    @property
    def names(self) -> list[str]:
        """The models that a request for another one is told of."""
        refused = self.say("another")
        assert refused.status_code == 404
        served, _, _ = refused.json()["error"]["message"].partition(";")
        return re.findall("'([a-z]+)'", served)

    @property
    def measured(self) -> set[str]:
        """The models on the metrics page."""
        page = families_of(httpx.get(f"{self.url}/metrics").text)
        samples = page["machd_requests_running"].samples
        assert len({str(one.labels) for one in samples}) == len(samples), "a series is there once"
        return {one.labels["model"] for one in samples}

    def state(self, name: str) -> str:
        """What a model does."""
        models = self.admin.get("/admin/models").json()["models"]
        return next(str(one["state"]) for one in models if one["name"] == name)

    def alive(self) -> int:
        """Engine processes that have not ended."""
        return sum(one.poll() is None for one in self.processes)


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[_Daemon]:
    with kept_logging(), _Daemon(tmp_path) as daemon:
        yield daemon
        daemon.admin.close()


def _asked(model: str, text: str = _TEXT) -> Asked:
    return Asked(chat(f"say {text}") | {"model": model})


def test_a_model_that_is_added_is_served(daemon: _Daemon) -> None:
    """It is listed, answers, is measured, and takes its turn for the memory."""
    assert daemon.say("gamma").status_code == 404
    daemon.write("alpha", "beta", "gamma")
    assert daemon.reload().json()["changed"] == ["models.gamma"]

    assert daemon.names == ["alpha", "beta", "gamma"]
    for name in ("alpha", "beta", "gamma"):
        assert daemon.say(name).json()["choices"][0]["message"]["content"] == "hello"
    assert daemon.measured == {"alpha", "beta", "gamma"}


def test_a_model_that_is_removed_ends_its_answers_and_goes(daemon: _Daemon) -> None:
    """New requests get 404 with the names that are left; then its process, its memory and its metrics are gone."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask_streamed, daemon.url, _asked("beta", _TEXT * 2))
        wait_until(lambda: len(daemon.processes) == 1, "it loads")
        threading.Event().wait(0.7)
        daemon.write("alpha")
        assert daemon.reload().json()["changed"] == ["models.beta"]
        refused = daemon.say("beta")

        assert not long.done()
        assert daemon.names == ["alpha"]
        assert refused.status_code == 404
        assert "serves 'alpha'" in refused.json()["error"]["message"]
        assert long.result(CEILING_S).texts == (_TEXT * 2,)
    wait_until(lambda: not daemon.alive(), "its process ends")
    wait_until(lambda: daemon.measured in (set(), {"alpha"}), "it is forgotten")
    assert daemon.say("alpha").status_code == 200


def test_a_model_whose_load_is_removed_leaves_no_memory(daemon: _Daemon) -> None:
    """A model that is loaded for nobody any more is ended, and the next one has the room."""
    slow = {"beta": 'path = "fake?size=90000000&load_s=60"\npin = true'}
    daemon.write("alpha", tables=slow)
    daemon.reload()
    wait_until(lambda: daemon.alive() == 1, "the pinned model loads at once")
    daemon.write("alpha")
    daemon.reload()

    assert daemon.say("alpha").status_code == 200
    assert daemon.alive() == 1


def test_a_changed_model_is_loaded_anew_once(daemon: _Daemon) -> None:
    """The answer that runs ends on the old one; a loaded model is loaded again without being asked for."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask_streamed, daemon.url, _asked("beta"))
        wait_until(lambda: len(daemon.processes) == 1, "it loads")
        threading.Event().wait(0.5)
        changed = {"beta": f'path = "fake?size={_SIZE}"\nmodel.dtype = "float16"'}
        daemon.write("alpha", tables=changed)
        assert daemon.reload().json()["changed"] == ["models.beta.model.dtype"]
        assert daemon.say("beta").status_code == 200
        assert long.result(CEILING_S).texts == (_TEXT,)

    wait_until(lambda: daemon.alive() == 1, "the old one's process ends")
    assert len(daemon.processes) == 2
    assert daemon.measured == {"alpha", "beta"}
    assert daemon.reload().json()["changed"] == []
    assert len(daemon.processes) == 2


def test_a_changed_model_takes_its_turn_with_what_it_replaces(daemon: _Daemon) -> None:
    """Where there is no memory for both, the old answers are suspended, and still end as they began."""
    large = "size=80000000"
    daemon.write("alpha", tables={"beta": f'path = "fake?{large}"'})
    daemon.reload()
    with ThreadPoolExecutor(2) as pool:
        text = _TEXT * 4
        long = pool.submit(ask_streamed, daemon.url, _asked("beta", text))
        wait_until(lambda: len(daemon.processes) == 1, "it loads")
        threading.Event().wait(0.5)
        daemon.write("alpha", tables={"beta": f'path = "fake?{large}&load_s=0.1"'})
        daemon.reload()
        assert daemon.say("beta").status_code == 200
        assert long.result(CEILING_S).texts == (text,)
    wait_until(lambda: daemon.alive() == 1, "the old one's process ends")


def test_live_keys_of_a_table_need_no_other_load(daemon: _Daemon) -> None:
    """Pins, times to live, limits and the batch change while the model serves."""
    daemon.say("beta")
    table = (
        f'path = "fake?size={_SIZE}"\npin = true\ncontinuous_batching.max_b = 2\naliases = ["b"]'
    )
    daemon.write("alpha", tables={"beta": table})
    changed = daemon.reload().json()["changed"]
    assert changed == [
        "models.beta.aliases",
        "models.beta.pin",
        "models.beta.continuous_batching.max_b",
    ]
    assert daemon.say("b").json()["model"] == "beta"
    assert len(daemon.processes) == 1


def test_keep_alive_outlasts_changes_of_others(daemon: _Daemon) -> None:
    """A time to live that a client gives holds until the settings give the model another one."""

    def left_s(name: str) -> float:
        running = httpx.get(f"{daemon.url}/api/ps").json()["models"]
        (expires_at,) = (one["expires_at"] for one in running if one["name"].startswith(name))
        return (datetime.fromisoformat(expires_at) - datetime.now(UTC)).total_seconds()

    asked = {"model": "beta", "prompt": "say yes", "stream": False, "keep_alive": "1h"}
    httpx.post(f"{daemon.url}/api/generate", json=asked, timeout=CEILING_S).raise_for_status()
    daemon.write("beta", tables={"alpha": f'path = "fake?size={_SIZE}"\nttl_s = 7.0'})
    assert daemon.reload().json()["changed"] == ["models.alpha.ttl_s"]
    assert 3_000 < left_s("beta") <= 3_600
    daemon.write("alpha", tables={"beta": f'path = "fake?size={_SIZE}"\nttl_s = 7200.0'})
    daemon.reload()
    assert 3_600 < left_s("beta") <= 7_200


def test_the_default_model_is_another_one(daemon: _Daemon) -> None:
    """A model.path that names another table makes that the default; no process is started for it."""
    daemon.say("alpha")
    daemon.write("beta", "alpha")
    daemon.reload()
    assert daemon.say("default").json()["model"] == "beta"
    daemon.write("alpha", "beta")
    daemon.reload()
    assert daemon.say("default").json()["model"] == "alpha"
    assert len(daemon.processes) == 2


def test_a_reload_that_is_refused_changes_no_model(daemon: _Daemon) -> None:
    """A table with a mistake leaves the others as they were, added and removed ones too."""
    broken = {"gamma": 'path = "fake?size=1"', "delta": 'path = "fake?size=1"\nttl_s = -1'}
    daemon.write("alpha", tables=broken)
    assert daemon.reload().status_code == 400
    assert daemon.names == ["alpha", "beta"]
    assert daemon.say("beta").status_code == 200


def test_a_model_whose_engine_cannot_be_made_changes_nothing(daemon: _Daemon) -> None:
    """Where one of two new models cannot be prepared, neither is served, and the others are as they were."""
    daemon.unmakable = "broken"
    daemon.write("alpha", "gamma", tables={"delta": 'path = "fake?size=1&broken=1"'})
    assert daemon.reload().status_code == 500
    assert daemon.names == ["alpha", "beta"]
    assert daemon.say("beta").status_code == 200
    assert daemon.measured == {"alpha", "beta"}
    daemon.unmakable = None
    assert daemon.reload().status_code == 200
    assert daemon.names == ["alpha", "delta", "gamma"]


def test_a_batch_that_is_changed_before_a_load_keeps_to_its_budget(daemon: _Daemon) -> None:
    """A model that is not loaded takes the new settings on when it is, with the KV budget that it is given."""
    table = f'path = "fake?size={_SIZE}"\ncontinuous_batching.max_b = 2'
    daemon.write("alpha", tables={"beta": table})
    daemon.reload()
    assert daemon.say("beta").status_code == 200
    page = families_of(httpx.get(f"{daemon.url}/metrics").text)

    def value(name: str, state: str) -> float:
        (sample,) = [
            one for one in page[name].samples if one.labels == {"model": "beta", "state": state}
        ]
        return sample.value

    assert value("machd_slots", "free") + value("machd_slots", "occupied") == 2
    assert value("machd_kv_cache_bytes", "budget") == 10_000 * 1024


def test_answers_of_a_suspended_model_that_can_never_fit_again_end_with_the_reason(
    daemon: _Daemon,
) -> None:
    """A reload that leaves too little memory is taken on; the answers end once the model is to be loaded again."""
    with capture_logs() as logs, ThreadPoolExecutor(1) as pool:
        body = chat(f"say {_TEXT * 8}", stream=True) | {"model": "beta"}
        url = f"{daemon.url}/v1/chat/completions"
        answer = pool.submit(httpx.post, url, json=body, timeout=CEILING_S)
        wait_until(lambda: daemon.state("beta") == "ready", "it is loaded")
        threading.Event().wait(0.5)
        unloaded = daemon.admin.post("/admin/models/beta/unload", json={"now": True})
        assert unloaded.status_code == 200
        wait_until(lambda: not daemon.alive(), "it is suspended")
        daemon.section = "memory_gb = 0.01"
        daemon.write("alpha", "beta")
        assert daemon.reload().status_code == 200
        assert not answer.done()
        load = daemon.admin.post("/admin/models/beta/load")
        text = answer.result(CEILING_S).text

    reason = "needs 0.05 GB, and models.memory_gb is 0.01"
    assert (load.status_code, reason in load.text) == (503, True)
    assert text.count("data: ") > 5, "the answer had begun"
    assert reason in text
    assert [one["log_level"] for one in logs if one["event"] == "model.failed"] == ["error"]
    assert "critical" not in {one["log_level"] for one in logs}


def test_a_directory_is_looked_through_again(tmp_path: Path) -> None:
    """A reload serves a file that has come, and no longer one that has gone, though no key has changed."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "one.gguf").write_bytes(b"GGUF")
    with (
        kept_logging(),
        _Daemon(tmp_path, f'{_SECTION}\ndirectory = "{models}"') as daemon,
        daemon.admin,
    ):
        assert daemon.names == ["alpha", "beta", "one"]
        (models / "two.gguf").write_bytes(b"GGUF")
        (models / "one.gguf").unlink()
        assert daemon.reload().json()["changed"] == []
        assert daemon.names == ["alpha", "beta", "two"]
        daemon.write("alpha")
        assert daemon.reload().status_code == 200
        assert daemon.names == ["alpha", "two"]


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.long)])
def test_no_answer_is_cut_while_models_are_added_changed_and_removed(
    daemon: _Daemon, rounds: int
) -> None:
    """Requests come all the time; each that is taken gets its whole answer, from a model of its name."""
    done = threading.Event()
    refused = list[int]()

    def ask_on(number: int) -> int:
        name = ("alpha", "beta", "gamma")[number % 3]
        count = 0
        while not done.is_set():
            answer = daemon.say(name, text := f"{number} {count} " + " ".join(["word"] * 40))
            if answer.status_code == 404 and name == "gamma":
                refused.append(number)
                threading.Event().wait(0.1)
                continue
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == text
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        counts = [pool.submit(ask_on, number) for number in range(6)]
        for number in range(rounds):
            daemon.write("alpha", "beta", "gamma")
            assert daemon.reload().status_code == 200
            threading.Event().wait(0.8)
            path = f'path = "fake?size={_SIZE}&load_s=0.0{number}"'
            daemon.write("alpha", tables={"beta": path})
            assert daemon.reload().status_code == 200
            threading.Event().wait(0.8)
        done.set()
        assert all(one.result(CEILING_S) for one in counts)

    assert refused
    wait_until(
        lambda: daemon.measured <= {"alpha", "beta"}, "what is served no longer is forgotten"
    )
    wait_until(lambda: daemon.alive() <= 2, "and has no process")
