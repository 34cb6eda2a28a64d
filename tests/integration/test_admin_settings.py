"""Settings changed while the daemon runs: reload, PATCH with an ETag, the log level."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.admin_daemon import AdminDaemon, kept_logging
from support.engines.dialogue import chat

from machd.settings.explain import MASK

_CHAT = "/v1/chat/completions"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A settings file that can be changed."""
    path = tmp_path / "machd.toml"
    path.write_text("[limits]\nmax_n = 3\n")
    return path


@pytest.fixture
def daemon(tmp_path: Path, config_path: Path) -> Iterator[AdminDaemon]:
    """One that reads that file."""
    with kept_logging(), AdminDaemon(tmp_path, config_path=config_path) as running:
        yield running


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminDaemon]:
    """One whose settings no test changes."""
    with kept_logging(), AdminDaemon(tmp_path_factory.mktemp("unchanged")) as running:
        yield running


def _max_n(daemon: AdminDaemon) -> int:
    """Return what requests are held against, not what is shown."""
    answer = daemon.http.post(_CHAT, json=chat(n=99, max_tokens=1))
    assert answer.status_code == 400
    return int(answer.json()["error"]["message"].rpartition(" ")[2])


def _error(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = dict(answer.json()["error"])
    assert error["code"] == code
    return error


def test_the_settings_are_shown_with_their_origins(daemon: AdminDaemon, config_path: Path) -> None:
    """Values, where each came from, and which can be changed now."""
    answer = daemon.admin.get("/admin/config")
    config = answer.json()
    assert answer.headers["etag"].strip('"')
    assert config["config_file"] == str(config_path)
    assert config["settings"]["limits"]["max_n"] == 3
    assert config["origins"]["limits.max_n"] == {"kind": "file", "detail": str(config_path)}
    assert config["origins"]["admin.listen"]["kind"] == "flag"
    assert "limits.max_n" in config["live_keys"]
    assert "server.port" not in config["live_keys"]
    assert MASK == "********"


def test_a_patch_is_in_force_at_once_until_the_reload(daemon: AdminDaemon) -> None:
    """The next request is held against it; a reload runs what a restart would run."""
    etag = daemon.admin.get("/admin/config").headers["etag"]
    answer = daemon.admin.patch(
        "/admin/config", json={"limits": {"max_n": 2}}, headers={"If-Match": etag}
    )
    assert answer.status_code == 200
    assert answer.json() == {"etag": answer.headers["etag"], "changed": ["limits.max_n"]}
    assert answer.headers["etag"] != etag
    assert _max_n(daemon) == 2
    config = daemon.admin.get("/admin/config")
    assert config.headers["etag"] == answer.headers["etag"]
    assert config.json()["origins"]["limits.max_n"]["kind"] == "admin"
    assert daemon.status["config"]["changed"] == ["limits.max_n"]
    assert daemon.admin.post("/admin/reload").json()["changed"] == ["limits.max_n"]
    assert _max_n(daemon) == 3


def test_null_takes_a_patch_back(daemon: AdminDaemon) -> None:
    """The sources' value counts again."""
    daemon.admin.patch("/admin/config", json={"limits": {"max_n": 2, "max_queue": 5}})
    answer = daemon.admin.patch("/admin/config", json={"limits": {"max_n": None}})
    assert answer.json()["changed"] == ["limits.max_n"]
    assert _max_n(daemon) == 3
    assert daemon.admin.get("/admin/config").json()["settings"]["limits"]["max_queue"] == 5


def test_of_two_writers_one_is_told(daemon: AdminDaemon) -> None:
    """Two changes for the same state of the settings: one is made, the other gets 412."""
    etag = daemon.admin.get("/admin/config").headers["etag"]
    barrier = threading.Barrier(2)
    answers: dict[int, httpx.Response] = {}

    def write(max_n: int) -> None:
        with httpx.Client(base_url=daemon.admin_url, headers=daemon.admin.headers) as client:
            barrier.wait(CEILING_S)
            answers[max_n] = client.patch(
                "/admin/config", json={"limits": {"max_n": max_n}}, headers={"If-Match": etag}
            )

    writers = [threading.Thread(target=write, args=(max_n,)) for max_n in (5, 6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(CEILING_S)
    by_status = {answer.status_code: max_n for max_n, answer in answers.items()}
    assert by_status.keys() == {200, 412}
    _error(answers[by_status[412]], 412, "settings_changed")
    assert _max_n(daemon) == by_status[200]


def test_a_restart_key_is_refused_and_named(daemon: AdminDaemon) -> None:
    """Nothing of such a change is made, not even what could be."""
    change = {"server": {"port": 9999}, "limits": {"max_n": 7}, "admin": {"listen": "off"}}
    error = _error(daemon.admin.patch("/admin/config", json=change), 409, "restart_required")
    assert error["keys"] == ["server.port", "admin.listen"]
    assert _max_n(daemon) == 3
    assert not daemon.status["config"]["ok"]


def test_every_problem_of_a_patch_is_told(daemon: AdminDaemon) -> None:
    """Bad values and unknown names together, and nothing is changed."""
    change = {
        "limits": {"max_n": "many", "max_queue": -1, "max_queues": 4},
        "limit": {"max_n": 4},
        "streaming": {"interval": 2},
    }
    error = _error(daemon.admin.patch("/admin/config", json=change), 400, "invalid_settings")
    assert len(error["problems"]) == 4
    assert {line.partition(":")[0] for line in error["problems"]} == {
        "limits.max_n",
        "limits.max_queue",
        "limits.max_queues",
        "limit",
    }
    assert daemon.admin.get("/admin/config").json()["settings"]["streaming"]["interval"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"limits": 3}',
        b'{"limits": {"max_n": {}}}',
        b'{"limits": {"max_n": {"a": 1}}}',
        b'{"limits": null}',
        b"\xff",
    ],
)
def test_a_patch_of_another_shape_is_refused(unchanged: AdminDaemon, body: bytes) -> None:
    """A patch of another shape gets 400 before settings are checked."""
    answer = unchanged.admin.patch(
        "/admin/config", content=body, headers={"Content-Type": "application/json"}
    )
    _error(answer, 400, "invalid_request")


@pytest.fixture
def several(tmp_path: Path) -> Iterator[AdminDaemon]:
    """A daemon with a table for its model, so that there may be others."""
    path = tmp_path / "machd.toml"
    path.write_text('[models.other]\npath = "/m/Other"\n')
    with kept_logging(), AdminDaemon(tmp_path, config_path=path) as running:
        yield running


def test_a_table_beside_the_only_model_needs_a_restart(daemon: AdminDaemon) -> None:
    """A daemon that lives as its model does cannot become one of several models."""
    answer = daemon.admin.patch("/admin/config", json={"models": {"coder": {"path": "/m/Coder"}}})
    error = _error(answer, 409, "restart_required")
    assert "models.coder can only be changed by a restart" in error["message"]
    assert "coder" not in daemon.admin.get("/admin/config").json()["settings"]["models"]


def test_the_last_table_cannot_be_taken_away(several: AdminDaemon, tmp_path: Path) -> None:
    """Several models cannot become one whose end is the daemon's."""
    (tmp_path / "machd.toml").write_text("")
    error = _error(several.admin.post("/admin/reload"), 409, "restart_required")
    assert "models.other can only be changed by a restart" in error["message"]


def test_keys_that_a_load_reads_are_live_with_several_models(
    several: AdminDaemon, daemon: AdminDaemon
) -> None:
    """Each of several models can be loaded anew; the only one cannot."""
    assert "model.dtype" in several.admin.get("/admin/config").json()["live_keys"]
    assert "model.dtype" not in daemon.admin.get("/admin/config").json()["live_keys"]
    assert "server.port" not in several.admin.get("/admin/config").json()["live_keys"]


def test_a_models_table_is_patched_and_taken_away(several: AdminDaemon) -> None:
    """It is shown as a file has it, with origins of what was given; null takes all of it away."""
    daemon = several
    table = {"path": "/m/Coder", "cache": {"prefix": False}}
    answer = daemon.admin.patch("/admin/config", json={"models": {"coder": table}})
    assert answer.json()["changed"] == ["models.coder"]
    config = daemon.admin.get("/admin/config")
    assert config.headers["etag"] == answer.headers["etag"]
    shown = config.json()["settings"]["models"]["coder"]
    assert shown == {"aliases": [], "pin": False, "ttl_s": None, **table}
    origins = config.json()["origins"]
    given = [one for one in origins if one.startswith("models.coder")]
    assert given == ["models.coder.path", "models.coder.cache.prefix"]
    assert daemon.status["config"]["overrides"] == given
    refused = daemon.admin.patch("/admin/config", json={"models": {"coder": {"pin": 1}}})
    _error(refused, 400, "invalid_settings")
    daemon.admin.patch("/admin/config", json={"models": {"coder": None}})
    assert "coder" not in daemon.admin.get("/admin/config").json()["settings"]["models"]


def test_a_broken_file_changes_nothing(daemon: AdminDaemon, config_path: Path) -> None:
    """A reload lists every problem; the daemon serves on, and a mended file is taken on."""
    config_path.write_text("[limits]\nmax_n = 0\nmax_quee = 3\n[streaming]\ninterval = 'x'\n")
    error = _error(daemon.admin.post("/admin/reload"), 400, "invalid_settings")
    assert len(error["problems"]) == 3
    assert all(str(config_path) in line for line in error["problems"])
    config_path.write_text("[limits\n")
    error = _error(daemon.admin.post("/admin/reload"), 400, "invalid_settings")
    assert len(error["problems"]) == 1
    assert _max_n(daemon) == 3
    shown = daemon.status["config"]
    assert (shown["kind"], shown["ok"], shown["changed"]) == ("reload", False, [])
    assert shown["problems"] == error["problems"]
    config_path.write_text("[limits]\nmax_n = 4\n")
    assert daemon.admin.post("/admin/reload").json()["changed"] == ["limits.max_n"]
    assert _max_n(daemon) == 4
    assert daemon.status["config"]["ok"]


def test_a_reload_that_needs_a_restart_says_so(daemon: AdminDaemon, config_path: Path) -> None:
    """The same answer as a change over the admin API gets."""
    config_path.write_text("[limits]\nmax_n = 5\n[engine]\nblas = 'off'\n")
    error = _error(daemon.admin.post("/admin/reload"), 409, "restart_required")
    assert error["keys"] == ["engine.blas"]
    assert _max_n(daemon) == 3


def test_the_log_level_is_changed(daemon: AdminDaemon) -> None:
    """PUT changes the level of everything that is logged; another word is refused."""
    answer = daemon.admin.put("/admin/log-level", json={"level": "error"})
    assert answer.json()["changed"] == ["logging.level"]
    assert logging.getLogger().level == logging.ERROR
    error = _error(
        daemon.admin.put("/admin/log-level", json={"level": "x"}), 400, "invalid_request"
    )
    assert error["param"] == "level"
    daemon.admin.put("/admin/log-level", json={"level": "info"})
    assert logging.getLogger().level == logging.INFO
