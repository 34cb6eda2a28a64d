"""``machd ctl`` as operators and scripts use it: the real command against a running daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon, kept_logging
from support.daemon.forked_commands import run_machd
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.step_gate import StepGate, at_decode

from machd.admin.status import AdminState, AdminStatus
from machd.cli.ctl_client import AdminAddress, AdminClient
from machd.engine.protocol.engine import ModelDescription
from machd.errors import NoDaemonError, UnavailableError

_CHAT = "/v1/chat/completions"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """An empty settings file."""
    path = tmp_path / "machd.toml"
    path.write_text("")
    return path


@pytest.fixture
def gate() -> StepGate:
    """Holds the engine at every token."""
    return StepGate(at_decode)


@pytest.fixture
def daemon(tmp_path: Path, config_path: Path, gate: StepGate) -> Iterator[AdminDaemon]:
    """One whose token is where it belongs."""
    with (
        kept_logging(),
        AdminDaemon(
            tmp_path,
            lambda: FakeEngine(told, before_step=gate, context_tokens=10_000),
            config_path=config_path,
        ) as running,
        gate,
    ):
        yield running


def _ctl(
    daemon: AdminDaemon, *arguments: str, code: int = 0, environ: Mapping[str, str] | None = None
) -> str:
    """Return what the command prints, and what it complains of where it fails."""
    address = daemon.admin_url.removeprefix("http://")
    done = run_machd(
        ["ctl", "--address", address, *arguments], {**daemon.environ, **(environ or {})}
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert str(daemon.token) not in done.stdout + done.stderr
    if code:
        assert all(line.startswith("machd: ") for line in done.stderr.splitlines())
        return done.stderr
    return done.stdout


@contextmanager
def _stream(daemon: AdminDaemon, text: str, request_id: str = "r-1") -> Iterator[RawClient]:
    with RawClient(daemon.daemon.url) as client:
        body = json.dumps(chat(f"say {text}", stream=True)).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        client.request("POST", _CHAT, body, headers)
        client.read_until(f'"content":"{text[0]}"'.encode())
        yield client


def test_the_status_reads_well_and_as_json(daemon: AdminDaemon) -> None:
    """At 80 columns without colour in a pipe; and the daemon's own answer for a program."""
    table = _ctl(daemon, "status")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "\x1b" not in table
    assert table.splitlines()[0].split() == ["state", "ready"]
    assert "decode mode" in table
    status = json.loads(_ctl(daemon, "status", "--json"))
    assert status.keys() == daemon.status.keys()


_HOSTILE = "llama[/4bit][bold]:smile:\x1b[31m\x9b2J\n"


class _Hostile(FakeEngine):
    """A model whose name means something to rich and to a terminal."""

    @property
    def model(self) -> ModelDescription:
        return replace(super().model, model_id=_HOSTILE)


def test_text_of_the_daemon_s_is_only_text(tmp_path: Path, config_path: Path) -> None:
    """Markup is shown as it is, and no control character reaches the terminal, in JSON either."""
    with kept_logging(), AdminDaemon(tmp_path, _Hostile, config_path=config_path) as daemon:
        table = _ctl(daemon, "status")
        assert "llama[/4bit][bold]:smile:\ufffd[31m\ufffd2J\ufffd" in table
        text = _ctl(daemon, "status", "--json")
        assert json.loads(text)["model"] == _HOSTILE
        config_path.write_text('[limits]\n"[/x]\\u001b[31m" = 1\n')
        complaint = _ctl(daemon, "reload", code=1)
        refused = _ctl(daemon, "status")
        assert "[/x]" in "".join(refused.split())
    for shown in (table, text, complaint, refused):
        assert all(letter.isprintable() or letter == "\n" for letter in shown)


def test_requests_are_listed_and_aborted(daemon: AdminDaemon, gate: StepGate) -> None:
    """By the id that the list shows; its client is told, and the id is unknown afterwards."""
    assert _ctl(daemon, "requests") == "no open requests\n"
    with _stream(daemon, "hello") as stream:
        table = _ctl(daemon, "requests")
        assert all(len(line) <= 80 for line in table.splitlines())
        listed = json.loads(_ctl(daemon, "requests", "--json"))["requests"][0]
        head, figures, *whose, counts = table.splitlines()
        assert head.split() == ["PHASE", "AGE", "TTFT", "PROMPT", "LEFT", "DONE", "TOKENS/S"]
        assert figures.split()[0] == "decode"
        assert whose == [f"  {listed['id']}", "  chat_completions, anonymous, r-1, single"]
        assert counts == "1 open: 1 running, 0 waiting"
        assert counts in _ctl(daemon, "status")
        assert listed["id"] in _ctl(daemon, "abort", f"{listed['id']}/0")
        gate.open()
        assert sse_data(stream.read_answer().body)[-1]["error"]["code"] == "operator_abort"
    assert "no open request" in _ctl(daemon, "abort", listed["id"], code=1)


def test_draining_waits_and_resuming_goes_on(daemon: AdminDaemon, gate: StepGate) -> None:
    """``--wait`` returns when the last answer is given, and says meanwhile what it waits for."""
    with _stream(daemon, "hello") as stream:
        address = daemon.admin_url.removeprefix("http://")
        waiter = subprocess.Popen(
            [sys.executable, "-m", "machd", "ctl", "drain", "--wait", "--address", address],
            env={**os.environ, **daemon.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert waiter.stderr is not None
        assert waiter.stderr.readline() == "draining: 1 request open\n"
        assert waiter.poll() is None
        gate.open()
        assert sse_text(stream.read_answer().body) == "hello"
        out, _ = waiter.communicate(timeout=CEILING_S)
        assert (waiter.returncode, out) == (0, "draining, 0 requests open\n")
    assert daemon.status["state"] == "draining"
    held = _ctl(daemon, "status").splitlines()[0]
    assert held.split(maxsplit=1)[1] == "draining (by an operator; machd ctl resume ends it)"
    assert _ctl(daemon, "resume") == "ready\n"
    assert daemon.status["state"] == "ready"


def test_the_mode_is_switched(daemon: AdminDaemon) -> None:
    """``--wait`` returns when it is in force; there are no other modes; without one, it is shown."""
    assert _ctl(daemon, "mode") == "decode mode single\n"
    assert json.loads(_ctl(daemon, "mode", "--json"))["active"] == "single"
    assert _ctl(daemon, "mode", "batched", "--wait") == "decode mode batched\n"
    assert daemon.status["decode_mode"]["active"] == "batched"
    address = daemon.admin_url.removeprefix("http://")
    assert run_machd(["ctl", "mode", "fast", "--address", address], daemon.environ).returncode == 2


@pytest.mark.parametrize("flags", [[], ["--wait"]])
def test_a_switch_that_failed_is_said(tmp_path: Path, flags: list[str]) -> None:
    """1: the wait ends although the mode that was asked for never comes."""
    faults = FakeFaults(reset_error=RuntimeError("planted"))
    with AdminDaemon(tmp_path, lambda: FakeEngine(faults=faults)) as daemon:
        _ctl(daemon, "mode", "batched", "--wait", code=1)
        complaint = _ctl(daemon, "mode", "batched", *flags, code=1)
        assert daemon.status["state"] == "ready"
    assert "the mode is single and not batched: the switch has failed" in complaint


# A daemon that goes away


class _Scripted:
    """Answers one connection after the other as a daemon would, and then is gone or says nothing."""

    def __init__(self, *answers: dict[str, Any], is_silent: bool = False) -> None:
        self._answers = answers
        self._is_silent = is_silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> _Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(CEILING_S)
        self._listener.close()

    def _answer(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection:
                _read_request(connection)
                body = json.dumps(answer).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
        if not self._is_silent:
            self._listener.close()


def _read_request(connection: socket.socket) -> None:
    with connection.makefile("rb") as request:
        length = 0
        while (line := request.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        request.read(length)


@pytest.mark.parametrize(
    ("end", "code", "complaint"),
    [({}, 69, "no daemon answers"), ({"state": "failed", "reason": "planted"}, 70, "planted")],
)
@pytest.mark.parametrize("arguments", [["mode", "batched"], ["drain"]])
def test_a_wait_ends_with_the_daemon(
    daemon: AdminDaemon, arguments: list[str], end: dict[str, Any], code: int, complaint: str
) -> None:
    """When it goes away or fails, however much was still to be waited for."""
    busy = daemon.status | {"state": "draining", "open_requests": 1}
    busy["decode_mode"] |= {"requested": "batched", "is_switching": True}
    first = busy["decode_mode"] if arguments[0] == "mode" else busy
    answers = [first, busy, busy, *([busy | end] if end else [])]
    with _Scripted(*answers) as scripted:
        target = ["--address", scripted.address, "--token-file", str(daemon.token_file)]
        done = run_machd(["ctl", *arguments, "--wait", *target], daemon.environ)
    assert (done.returncode, done.stdout) == (code, "")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_that_is_late_is_not_one_that_is_missing() -> None:
    """1 and not 69; where something was to be done, with how to find out whether it was."""
    with _Scripted(is_silent=True) as scripted:
        client = AdminClient(AdminAddress.of(scripted.address), "token", timeout_s=0.1)
        with pytest.raises(UnavailableError) as told:
            client.ask("POST", "/admin/drain", AdminState)
        with pytest.raises(UnavailableError) as asked:
            client.ask("GET", "/admin/status", AdminStatus)
    assert told.value.exit_code == asked.value.exit_code == 1
    assert "not known, machd ctl status shows it" in told.value.message
    assert "did not answer in time" in asked.value.message
    assert "not known" not in asked.value.message


def test_a_daemon_that_breaks_off_is_gone() -> None:
    """69, and whether what it was told was done is left open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: _hang_up(listener))
        thread.start()
        address = AdminAddress.of(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(NoDaemonError) as told:
            AdminClient(address, "token").ask("POST", "/admin/drain", AdminState)
        thread.join(CEILING_S)
    assert "not known" in told.value.message


def _hang_up(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        _read_request(connection)


def test_a_reload_is_made_or_its_problems_are_shown(daemon: AdminDaemon, config_path: Path) -> None:
    """Every problem in a line of its own, and exit code 1."""
    assert _ctl(daemon, "reload") == "nothing has changed\n"
    config_path.write_text("[limits]\nmax_n = 2\n")
    assert _ctl(daemon, "reload") == "changed limits.max_n\n"
    config_path.write_text("[limits]\nmax_n = 0\nmax_m = 1\n")
    complaints = _ctl(daemon, "reload", code=1).splitlines()
    assert len(complaints) == 2
    assert all(str(config_path) in line for line in complaints)
    config_path.write_text("[server]\nport = 1\n[engine]\nblas = 'off'\n")
    assert "engine.blas" in _ctl(daemon, "reload", code=1)


def test_settings_are_read_and_changed(daemon: AdminDaemon) -> None:
    """Values are written as in the file; what cannot be is refused with every problem."""
    assert _ctl(daemon, "config", "get", "limits.max_n") == "8\n"
    assert _ctl(daemon, "config", "set", "limits.max_n=3", "logging.level=error") == (
        "changed limits.max_n, logging.level\n"
    )
    assert _ctl(daemon, "config", "get", "limits.max_n") == "3\n"
    overrides = next(
        line for line in _ctl(daemon, "status").splitlines() if line.startswith("overrides")
    )
    assert "limits.max_n, logging.level" in overrides
    shown = json.loads(_ctl(daemon, "config", "get", "--json"))
    assert shown["origins"]["limits.max_n"]["kind"] == "admin"
    assert _ctl(daemon, "config", "unset", "limits.max_n") == "changed limits.max_n\n"
    refused = _ctl(daemon, "config", "set", "limits.max_n=x", "limits.nothing=1", code=1)
    assert len(refused.splitlines()) == 2
    assert "server.port" in _ctl(daemon, "config", "set", "server.port=1", code=1)


def test_a_setting_answers_to_its_earlier_name(daemon: AdminDaemon) -> None:
    """A key that was renamed is read, changed and put back under either name."""
    earlier, now = "limits.stall_timeout_s", "limits.client_stall_timeout_s"
    assert _ctl(daemon, "config", "set", f"{earlier}=7") == f"changed {now}\n"
    assert _ctl(daemon, "config", "get", earlier) == _ctl(daemon, "config", "get", now) == "7.0\n"
    assert _ctl(daemon, "config", "unset", earlier) == f"changed {now}\n"
    assert _ctl(daemon, "config", "get", earlier) == "30.0\n"


def test_a_models_table_is_read_and_changed(tmp_path: Path, config_path: Path) -> None:
    """A name that TOML wants in quotes is written so; a table can be set, asked for and taken away whole."""
    config_path.write_text('[models.a]\npath = "/m/a"\n')
    with kept_logging(), AdminDaemon(tmp_path, FakeEngine, config_path=config_path) as daemon:
        table = 'models."qwen3:8b"'
        assert _ctl(
            daemon, "config", "set", f'{table}.path="/m/qwen"', f"{table}.cache.prefix=false"
        ) == (f"changed {table}\n")
        assert _ctl(daemon, "config", "get", f"{table}.cache.prefix") == "false\n"
        shown = json.loads(_ctl(daemon, "config", "get", "models.'qwen3:8b'"))
        assert shown["path"] == "/m/qwen"
        assert f"\n[{table}.cache]\nprefix = false  # admin" in _ctl(daemon, "config", "get")
        assert _ctl(daemon, "config", "unset", table) == f"changed {table}\n"
        assert "did you mean" in _ctl(daemon, "config", "unset", table, code=1)
        assert _ctl(daemon, "config", "set", 'models.b={path="/m/b"}') == "changed models.b\n"


def test_all_settings_are_shown_as_a_file(daemon: AdminDaemon, config_path: Path) -> None:
    """The TOML says the same as the daemon's JSON, with the origin of each value."""
    _ctl(daemon, "config", "set", "limits.max_n=3")
    text = _ctl(daemon, "config", "get")
    assert text.startswith(f"# Settings file: {config_path}\n")
    told = json.loads(_ctl(daemon, "config", "get", "--json"))["settings"]
    said = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in told.items()
    }
    assert tomllib.loads(text) == said
    changed = [line for line in text.splitlines() if line.endswith("# admin the admin API")]
    assert [line.split()[:3] for line in changed] == [["max_n", "=", "3"]]


@pytest.mark.parametrize("key", ["limits.max_m", "max_n", "server.max_n"])
def test_a_setting_that_is_not_there_is_nearly_one_that_is(daemon: AdminDaemon, key: str) -> None:
    """Usage, with the likeliest key."""
    target = ["--address", daemon.admin_url.removeprefix("http://")]
    done = run_machd(["ctl", "config", "get", key, *target], daemon.environ)
    assert done.returncode == 2
    assert "did you mean limits.max_n?" in done.stderr


def test_the_log_level_is_changed_and_shown(daemon: AdminDaemon) -> None:
    """It is shown as a setting is."""
    assert _ctl(daemon, "log-level", "warning") == "changed logging.level\n"
    assert _ctl(daemon, "log-level") == "warning\n"


def test_events_are_shown_until_they_end(daemon: AdminDaemon, gate: StepGate) -> None:
    """A line each, JSON where that is wanted; Ctrl-C ends it without a traceback."""
    gate.open()
    address = daemon.admin_url.removeprefix("http://")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "machd", "ctl", "events", "--json", "--address", address],
        env={**os.environ, **daemon.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["type"] == "state"
    daemon.http.post(_CHAT, json=chat("say hi"))
    assert json.loads(watcher.stdout.readline())["type"] == "queued"
    watcher.send_signal(signal.SIGINT)
    _, complaint = watcher.communicate(timeout=CEILING_S)
    assert (watcher.returncode, complaint.strip()) == (130, "")


@pytest.mark.parametrize("flags", [[], ["--steps"]])
def test_steps_are_shown_to_whoever_wants_them(
    daemon: AdminDaemon, gate: StepGate, flags: list[str]
) -> None:
    """A token's step is no news, a request's end is; the request's id is what is shown of it."""
    gate.open()
    address = daemon.admin_url.removeprefix("http://")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "machd", "ctl", "events", *flags, "--address", address],
        env={**os.environ, **daemon.environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline().split()[1] == "state"
    answer = daemon.http.post(_CHAT, json=chat("say hi")).json()
    seen: dict[str, str] = {}
    while "finished" not in seen:
        line = watcher.stdout.readline()
        seen.setdefault(line.split()[1], line)
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=CEILING_S)
    assert ("step" in seen) == bool(flags)
    assert f"request_id={answer['id']} " in seen["finished"]


def test_nobody_answers(tmp_path: Path) -> None:
    """69: nothing listens there, or nothing says where."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    token = tmp_path / "token"
    token.write_text("some-token-0123456789")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        target = ["--address", f"127.0.0.1:{port}", "--token-file", str(token)]
        cases = {
            f"no daemon answers at 127.0.0.1:{port}": target,
            f"no daemon answers at 127.0.0.1:{port}:": target[:2],
            "--address names another place": target[:2],
            "cannot read": [*target[:3], str(tmp_path / "nothing")],
            "No such file": ["--address", f"unix:{tmp_path}/nothing"],
        }
        for complaint, options in cases.items():
            done = run_machd(["ctl", "status", *options], environ)
            assert (done.returncode, done.stdout) == (69, "")
            assert complaint in done.stderr
            assert len(done.stderr.splitlines()) == 1
    for listen, complaint in (("off", "is off"), ("127.0.0.1:0", "any free one")):
        done = run_machd(["ctl", "status"], {**environ, "LME_ADMIN_LISTEN": listen})
        assert done.returncode == 69
        assert complaint in done.stderr


def test_a_token_is_missed_where_something_answers(tmp_path: Path) -> None:
    """69, and only then with a word of tokens."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run_machd(["ctl", "status", "--address", address], environ)
    assert done.returncode == 69
    assert f"something answers at {address}, but no daemon of this user" in done.stderr
    assert "--token-file" in done.stderr


def test_a_service_is_found_by_its_socket(tmp_path: Path) -> None:
    """The shipped user unit's, without options; one that is gone is named with the port's refusal."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    (tmp_path / "machd").mkdir(mode=0o700)
    path = tmp_path / "machd" / "admin.sock"
    with RunningDaemon(flags={"admin.listen": f"unix:{path}"}):
        done = run_machd(["ctl", "status", "--json"], environ)
        assert json.loads(done.stdout)["state"] == "ready"
        told = run_machd(["ctl", "status"], {**environ, "LME_ADMIN_LISTEN": "127.0.0.1:1"})
        assert (told.returncode, len(told.stderr.splitlines())) == (69, 1)
        named = tmp_path / "mine.toml"
        named.write_text("")
        other = run_machd(["ctl", "drain", "--config", str(named)], environ)
        assert other.returncode == 69, "whoever names a daemon's settings means no other daemon"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    done = run_machd(["ctl", "status"], environ)
    assert done.returncode == 69
    assert "127.0.0.1:8081" in done.stderr
    assert f"no daemon answers at unix:{path}: Connection refused" in done.stderr


def test_another_token_opens_nothing(daemon: AdminDaemon, tmp_path: Path) -> None:
    """69, with what to do, and without the token."""
    token = tmp_path / "token"
    token.write_text("stranger-token-0123456789")
    complaint = _ctl(daemon, "status", "--token-file", str(token), code=69)
    assert "--token-file" in complaint
    assert "stranger" not in complaint


@pytest.mark.parametrize("address", ["192.0.2.1:8081", "example.org:80", "nonsense", "127.0.0.1:x"])
def test_the_token_does_not_leave_the_machine(address: str) -> None:
    """Usage: only loopback is asked."""
    assert run_machd(["ctl", "status", "--address", address]).returncode == 2


def test_broken_settings_are_told_with_a_way_around(tmp_path: Path) -> None:
    """With a broken settings file the daemon can still be reached by its address."""
    broken = tmp_path / "broken.toml"
    broken.write_text("[limits\n")
    done = run_machd(["ctl", "status", "--config", str(broken)])
    assert done.returncode == 2
    assert str(broken) in done.stderr
    assert "--address" in done.stderr
    with AdminDaemon(tmp_path) as daemon:
        assert "ready" in _ctl(daemon, "status", "--config", str(broken))


def test_a_unix_socket_is_found_by_the_settings(tmp_path: Path) -> None:
    """No token, no option: the same settings are enough."""
    listen = f"unix:{tmp_path}/admin.sock"
    with RunningDaemon(flags={"admin.listen": listen}):
        done = run_machd(["ctl", "status", "--json"], {"LME_ADMIN_LISTEN": listen})
        assert json.loads(done.stdout)["state"] == "ready"
        done = run_machd(["ctl", "status", "--address", listen])
        assert done.returncode == 0
    wait_until(lambda: not (tmp_path / "admin.sock").exists(), "the socket is gone")
