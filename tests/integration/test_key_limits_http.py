"""Keys while the daemon runs: their limits, and their rotation."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import Page
from support.daemon.serve_process import ServeProcess
from support.engines.dialogue import chat, completion, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

NOISY = "k-noisy-0123456789abcdef"
QUIET = "k-quiet-0123456789abcdef"
NEW = "k-new-0123456789abcdef"
TOKEN = "t-0123456789abcdef0123456789abcdef"
KEYS = f"noisy:{NOISY}\nquiet:{QUIET}\n"

DIALECTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": chat("say ok", max_tokens=8),
    "/v1/completions": completion("say ok", max_tokens=8),
    "/v1/responses": {"model": "fake", "input": "say ok", "max_output_tokens": 16},
    "/v1/messages": {
        "model": "fake",
        "messages": [{"role": "user", "content": "say ok"}],
        "max_tokens": 8,
    },
}


def _key_file(tmp_path: Path, text: str = KEYS) -> Path:
    path = tmp_path / "api-keys"
    path.write_text(text, "utf-8")
    path.chmod(0o600)
    return path


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def _limited(tmp_path: Path, gate: StepGate | None = None, **limits: int) -> Iterator[httpx.Client]:
    flags: dict[str, object] = {f"limits.{name}": value for name, value in limits.items()}
    flags["auth.api_keys_file"] = str(_key_file(tmp_path))
    with (
        RunningDaemon(
            lambda: FakeEngine(told, before_step=gate or StepGate(_never)), flags
        ) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
        gate or StepGate(_never),
    ):
        yield client


def _never(_plan: object) -> bool:
    return False


def _metric(client: httpx.Client, name: str, **labels: str) -> float:
    page = Page(client.get("/metrics", headers=_as(QUIET)).text)
    return page.value(name, **labels) or 0.0


def _wait_until_full(client: httpx.Client) -> None:
    """Until the noisy key is at its limit; what is asked is too much for the queue as well, and never counts."""
    body = completion("hi", n=128)
    wait_until(
        lambda: _code(client.post("/v1/completions", json=body, headers=_as(NOISY))) == "key_limit",
        "the key is at its limit",
    )


def _code(answer: httpx.Response) -> str:
    body: dict[str, Any] = answer.json()
    return str(body["error"].get("code", body["error"]["type"]))


# Limits


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_dialect_refuses_in_its_own_words(tmp_path: Path, path: str, *, stream: bool) -> None:
    """429 with Retry-After before anything is streamed, in the envelope of the path's clients."""
    body = {**DIALECTS[path], "stream": stream}
    with _limited(tmp_path, max_tokens_per_minute_per_key=1) as client:
        first = client.post(path, json=body, headers=_as(NOISY))
        refused = client.post(path, json=body, headers=_as(NOISY))
        other = client.post(path, json=body, headers=_as(QUIET))
        counted = _metric(client, "machd_rejections_total", reason="key_limit")

    assert (first.status_code, refused.status_code, other.status_code) == (200, 429, 200)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "limits.max_tokens_per_minute_per_key" in refused.json()["error"]["message"]
    assert NOISY not in refused.text
    assert counted == 1


def test_counting_tokens_and_looking_around_are_not_limited(tmp_path: Path) -> None:
    """A client in debt may still do what uses no tokens of the model's."""
    with _limited(tmp_path, max_tokens_per_minute_per_key=1) as client:
        client.headers.update(_as(NOISY))
        client.post("/v1/completions", json=completion()).raise_for_status()
        body = {key: DIALECTS["/v1/messages"][key] for key in ("model", "messages")}
        assert client.post("/v1/messages/count_tokens", json=body).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert client.get("/v1/models").status_code == 200


def test_one_noisy_key_does_not_hurt_the_others(tmp_path: Path) -> None:
    """While one key fills its own limit, another's requests wait for a slot and not for it."""
    gate = StepGate(at_decode)
    with _limited(tmp_path, gate, max_requests_per_key=2, max_queue=3) as client:
        url = str(client.base_url)
        body = completion("hi", max_tokens=2, stream=True)
        with (
            client.stream("POST", "/v1/completions", json=body, headers=_as(NOISY)) as running,
            _sent(url, completion("other", max_tokens=2), NOISY) as waiting,
        ):
            _wait_until_full(client)
            refused = [
                client.post("/v1/completions", json=body, headers=_as(NOISY)) for _ in range(20)
            ]
            with _sent(url, completion("say ok"), QUIET) as quiet:
                gate.open()
                running.read()
                assert waiting.result().status_code == 200
                assert quiet.result().json()["choices"][0]["text"] == "ok"
        again = client.post("/v1/completions", json=completion("say ok"), headers=_as(NOISY))

    assert {one.status_code for one in refused} == {429}
    assert {_code(one) for one in refused} == {"key_limit"}
    assert again.status_code == 200, again.text


def test_requests_that_are_turned_away_cost_nothing(tmp_path: Path) -> None:
    """A full queue refuses a long prompt as often as it comes, and its key is never at its limit."""
    flags = {
        "limits.max_queue": 1,
        "limits.max_tokens_per_minute_per_key": 100,
        "auth.api_keys_file": str(_key_file(tmp_path)),
    }
    endless = completion("hi", max_tokens=2000, ignore_eos=True, stream=True)
    long = completion("word " * 60, max_tokens=2)
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(before_step=gate), flags) as daemon,
        gate,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
        ExitStack() as waiting,
    ):
        with client.stream("POST", "/v1/completions", json=endless, headers=_as(QUIET)):
            waiting.enter_context(_sent(daemon.url, completion("other", max_tokens=2), QUIET))
            gate.step_until(
                lambda: _metric(client, "machd_requests_waiting") == 1, "the queue is full"
            )
            asked = [waiting.enter_context(_sent(daemon.url, long, NOISY)) for _ in range(4)]
            gate.step_until(lambda: all(one.done() for one in asked), "four are refused")
            refused = [one.result() for one in asked]
        gate.open()
        wait_until(lambda: _metric(client, "machd_requests_waiting") == 0, "the queue is empty")
        again = client.post(
            "/v1/completions", json=completion("hi", max_tokens=2), headers=_as(NOISY)
        )

    assert {_code(one) for one in refused} == {"queue_full"}
    assert again.status_code == 200, again.text


@contextmanager
def _sent(url: str, body: dict[str, object], key: str) -> Iterator[Any]:
    """A request on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(
            httpx.post, f"{url}/v1/completions", json=body, headers=_as(key), timeout=CEILING_S
        )


def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    """A disconnect counts as an end, and costs what had come until then."""
    gate = StepGate(at_decode)
    with _limited(tmp_path, gate, max_requests_per_key=1) as client:
        body = completion("hi", max_tokens=500, stream=True)
        with client.stream("POST", "/v1/completions", json=body, headers=_as(NOISY)) as left:
            assert left.status_code == 200
        gate.open()
        wait_until(
            lambda: (
                client.post(
                    "/v1/completions", json=completion("say ok"), headers=_as(NOISY)
                ).is_success
            ),
            "the place is free",
        )


def test_those_who_share_a_decode_pay_for_themselves(tmp_path: Path) -> None:
    """A coalesced request counts against its client's limits like any other."""
    gate = StepGate(at_decode)
    flags = {
        "continuous_batching.enabled": True,
        "limits.max_requests_per_key": 2,
        "auth.api_keys_file": str(_key_file(tmp_path)),
    }
    body = completion("hi", max_tokens=3, temperature=0, stream=True)
    with (
        RunningDaemon(lambda: FakeEngine(before_step=gate), flags) as daemon,
        gate,
        httpx.Client(base_url=daemon.url, headers=_as(NOISY), timeout=CEILING_S) as client,
        client.stream("POST", "/v1/completions", json=body) as first,
        _sent(daemon.url, body, NOISY) as second,
    ):
        _wait_until_full(client)
        gate.open()
        first.read()
        answer = second.result()

    assert answer.status_code == 200
    assert answer.headers.get("x-coalesced") == first.headers["x-request-id"]


def test_without_keys_everyone_shares_the_limits() -> None:
    """Anonymous clients are one."""
    with RunningDaemon(flags={"limits.max_tokens_per_minute_per_key": 1}) as daemon:
        url = f"{daemon.url}/v1/completions"
        first = httpx.post(url, json=completion(max_tokens=1))
        second = httpx.post(url, json=completion(max_tokens=1), headers=_as(QUIET))
    assert (first.status_code, second.status_code) == (200, 429)


# Rotation


@pytest.mark.long
def test_keys_are_rotated_while_requests_run(tmp_path: Path) -> None:
    """SIGHUP: a removed key ends at its next request, on the same connection; a new one begins."""
    path = _key_file(tmp_path)
    with (
        ServeProcess("--auth-api-keys-file", str(path), "--admin-listen", "off") as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        body = completion("Once upon a time", max_tokens=24, stream=True)
        models = client.get("/v1/models", headers=_as(NOISY)).json()
        body["model"] = models["data"][0]["id"]
        with client.stream("POST", "/v1/completions", json=body, headers=_as(NOISY)) as running:
            path.write_text(f"new:{NEW}\nquiet:{QUIET}\n", "utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for("settings.changed")
            statuses = {
                key: httpx.get(f"{daemon.url}/v1/models", headers=_as(key)).status_code
                for key in (NOISY, QUIET, NEW)
            }
            text = running.read()
        same_connection = client.get("/v1/models", headers=_as(NOISY)).status_code

        path.write_text("new\n", "utf-8")
        daemon.process.send_signal(signal.SIGHUP)
        refusal = daemon.wait_for("settings.refused")
        after_refusal = client.get("/v1/models", headers=_as(NEW)).status_code
        without = client.get("/v1/models").status_code
        output = "".join(daemon.output)

    assert statuses == {NOISY: 401, QUIET: 200, NEW: 200}
    assert text.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in text
    assert same_connection == 401
    assert "line 1 is not name:key" in str(refusal["problems"])
    assert (after_refusal, without) == (200, 401)
    assert not [key for key in (NOISY, QUIET, NEW) if key in output]


def test_a_reload_cannot_open_an_exposed_daemon(tmp_path: Path) -> None:
    """Beyond loopback a reload that takes the keys away is refused, and the old keys stay."""
    path = _key_file(tmp_path)
    config = tmp_path / "machd.toml"
    config.write_text(f'[auth]\napi_keys_file = "{path}"\n', "utf-8")
    token = tmp_path / "token"
    token.write_text(TOKEN, "utf-8")
    token.chmod(0o600)
    flags = {
        "server.host": "0.0.0.0",
        "admin.listen": "127.0.0.1:0",
        "auth.admin_token_file": str(token),
    }
    with RunningDaemon(flags=flags, config_path=config) as daemon:
        url = f"http://127.0.0.1:{httpx.URL(daemon.url).port}/v1/models"
        config.write_text("", "utf-8")
        refused = httpx.post(f"{daemon.admin_url}/admin/reload", headers=_as(TOKEN))
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=_as(QUIET)).status_code == 200

        config.write_text(f'[auth]\napi_keys_file = "{path}"\n', "utf-8")
        path.write_text(f"new:{NEW}\n", "utf-8")
        taken = httpx.post(f"{daemon.admin_url}/admin/reload", headers=_as(TOKEN))
        assert httpx.get(url, headers=_as(QUIET)).status_code == 401
        assert httpx.get(url, headers=_as(NEW)).status_code == 200

    assert refused.status_code >= 400
    assert "can be reached from other machines" in refused.text
    assert taken.status_code == 200
