"""Changes of the decode mode while requests run and wait, over HTTP: no request gets an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import completion, sse_text
from support.engines.fake_engine import FakeEngine, lettered
from support.engines.step_gate import StepGate, at_decode

from machd.engine.protocol.engine import Engine
from machd.request.generation import SamplingParams

if TYPE_CHECKING:
    from machd.engine.loading.loader import LoadedModel  # imports mlx

_PATH = "/v1/completions"
_TOKENS = 30
_LONG_TOKENS = 300
"""A step is let go every few milliseconds while others are on their way."""


class _Live:
    """A daemon and its admin API."""

    def __init__(self, daemon: RunningDaemon, token: str) -> None:
        """Keep both."""
        self.url = daemon.url
        assert daemon.admin_url is not None, "operators are answered"
        self._config_url = f"{daemon.admin_url}/admin/config"
        self._headers = {"Authorization": f"Bearer {token}"}

    def switch(self, section: Mapping[str, object]) -> None:
        """Ask for other values of ``continuous_batching``; they are in force a little later."""
        self._patch({"continuous_batching": section})

    def set_limits(self, section: Mapping[str, object]) -> None:
        """Ask for other values of ``limits``."""
        self._patch({"limits": section})

    def wait_for(self, mode: str, slots: int) -> None:
        """Wait until it decodes like that."""
        wait_until(lambda: self._is_decoding(mode, slots), f"{slots} slots, {mode}")

    def step_until_there(self, gate: StepGate, count: int) -> None:
        """Let steps go until so many requests run or wait: counts are looked at with each step."""
        gate.step_until(
            lambda: (
                scrape(self.url, "machd_requests_running")
                + scrape(self.url, "machd_requests_waiting")
                == count
            ),
            f"{count} requests are there",
        )

    def _patch(self, changes: Mapping[str, object]) -> None:
        answer = httpx.patch(
            self._config_url, json=changes, headers=self._headers, timeout=CEILING_S
        )
        assert answer.status_code == 200, answer.text

    def _is_decoding(self, mode: str, slots: int) -> bool:
        free = scrape(self.url, "machd_slots", state="free")
        occupied = scrape(self.url, "machd_slots", state="occupied")
        return (
            bool(scrape(self.url, "machd_decode_mode_active", mode=mode))
            and free + occupied == slots
        )


@contextmanager
def _live(
    tmp_path: Path, make_engine: Callable[[], Engine] = FakeEngine, flags: Mapping[str, object] = {}
) -> Iterator[_Live]:
    token = "t" * 40
    token_file = tmp_path / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    settings: dict[str, object] = {
        "admin.listen": "127.0.0.1:0",
        "auth.admin_token_file": str(token_file),
        "continuous_batching.window_ms": 0,
        "continuous_batching.max_b": 4,
        **flags,
    }
    with RunningDaemon(make_engine, settings) as daemon:
        yield _Live(daemon, token)


def _body(prompt: str, **fields: object) -> dict[str, object]:
    defaults = {"temperature": 0, "max_tokens": _TOKENS, "stream": True}
    return completion(prompt, **(defaults | fields))


def _alone(prompt: str, tokens: int = _TOKENS) -> str:
    """Return the scripted engine's answer to a prompt, which does not depend on other rows."""
    sampling = SamplingParams(temperature=0.0)
    return "".join(chr(lettered(tuple(prompt.encode()), sampling, at)) for at in range(tokens))


def _read(client: RawClient) -> tuple[str, str]:
    """A stream's decode mode and text, once it has ended well."""
    client.read_until(b"data: [DONE]\n\n")
    head = client.received.partition(b"\r\n\r\n")[0].decode("latin-1").lower()
    assert head.startswith("http/1.1 200"), head
    mode = next(
        line.partition(":")[2].strip()
        for line in head.split("\r\n")
        if line.startswith("x-decode-mode:")
    )
    client.read_until(b"\r\n0\r\n\r\n")
    return mode, sse_text(client.body)


@contextmanager
def _clients(url: str, count: int) -> Iterator[list[RawClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RawClient(url)) for _ in range(count)]


def test_streams_end_as_they_began_and_those_that_wait_go_on_in_the_new_mode(
    tmp_path: Path,
) -> None:
    """Single to batched and back: all texts are whole, and requests admitted afterwards show the new mode."""
    gate = StepGate(at_decode)
    with (
        _live(tmp_path, lambda: FakeEngine(before_step=gate)) as live,
        _clients(live.url, 6) as clients,
        gate,
    ):
        prompts = [f"prompt {number}" for number in range(6)]
        clients[0].post_json(_PATH, _body(prompts[0], max_tokens=_LONG_TOKENS))
        gate.wait_until_held()
        for client, prompt in zip(clients[1:3], prompts[1:3], strict=True):
            client.post_json(_PATH, _body(prompt, max_tokens=_LONG_TOKENS))
        live.step_until_there(gate, 3)
        live.switch({"enabled": True})
        gate.step_until(
            lambda: scrape(live.url, "machd_requests_running") == 3, "all three run together"
        )
        live.switch({"enabled": False})
        for client, prompt in zip(clients[3:], prompts[3:], strict=True):
            client.post_json(_PATH, _body(prompt, max_tokens=_LONG_TOKENS))
        live.step_until_there(gate, 6)
        gate.open()
        answers = [_read(client) for client in clients]
        live.wait_for("single", 1)
    assert answers == [
        (mode, _alone(prompt, _LONG_TOKENS))
        for mode, prompt in zip(["single"] + ["batched"] * 2 + ["single"] * 3, prompts, strict=True)
    ]


def test_more_slots_while_requests_run_and_wait(tmp_path: Path) -> None:
    """Two run, three wait; with four slots four run together, and all end well."""
    gate = StepGate(at_decode)
    flags: dict[str, object] = {
        "continuous_batching.enabled": True,
        "continuous_batching.max_b": 2,
    }
    with (
        _live(tmp_path, lambda: FakeEngine(before_step=gate), flags) as live,
        _clients(live.url, 5) as clients,
        gate,
    ):
        for number, client in enumerate(clients):
            client.post_json(_PATH, _body(f"prompt {number}", max_tokens=_LONG_TOKENS))
        gate.step_until(lambda: scrape(live.url, "machd_requests_running") == 2, "two run")
        live.step_until_there(gate, 5)
        live.switch({"max_b": 4})
        gate.step_until(lambda: scrape(live.url, "machd_requests_running") == 4, "four run")
        assert scrape(live.url, "machd_requests_waiting") == 1
        gate.open()
        answers = [_read(client) for client in clients]
    assert answers == [("batched", _alone(f"prompt {number}", _LONG_TOKENS)) for number in range(5)]


def test_a_change_that_is_taken_back_holds_nobody_up(tmp_path: Path) -> None:
    """While one stream goes on, slots become fewer and then as before: the next one joins it."""
    gate = StepGate(at_decode)
    flags: dict[str, object] = {"continuous_batching.enabled": True}
    with (
        _live(tmp_path, lambda: FakeEngine(before_step=gate), flags) as live,
        _clients(live.url, 2) as (running, waiting),
        gate,
    ):
        running.post_json(_PATH, _body("prompt 0", max_tokens=_LONG_TOKENS))
        gate.wait_until_held()
        live.switch({"max_b": 1})
        waiting.post_json(_PATH, _body("prompt 1", max_tokens=_LONG_TOKENS))
        gate.step_until(lambda: scrape(live.url, "machd_requests_waiting") == 1, "one has to wait")
        live.switch({"max_b": None})
        gate.step_until(lambda: scrape(live.url, "machd_requests_running") == 2, "both run")
        assert not is_idle(live.url)
        gate.open()
        answers = [_read(running), _read(waiting)]
    assert answers == [("batched", _alone(f"prompt {number}", _LONG_TOKENS)) for number in (0, 1)]


def test_smaller_limits_turn_nobody_away_who_waits(tmp_path: Path) -> None:
    """Three wait when the queue shrinks to one: they are served, and the next one is refused."""
    gate = StepGate(at_decode)
    with (
        _live(tmp_path, lambda: FakeEngine(before_step=gate)) as live,
        _clients(live.url, 4) as clients,
        gate,
    ):
        clients[0].post_json(_PATH, _body("prompt 0", max_tokens=_LONG_TOKENS))
        gate.wait_until_held()
        for number, client in enumerate(clients[1:], start=1):
            client.post_json(_PATH, _body(f"prompt {number}", max_tokens=_LONG_TOKENS))
        live.step_until_there(gate, 4)
        live.set_limits({"max_queue": 1})
        gate.let()
        refused = _refused(live.url, gate)
        live.switch({"enabled": True})
        gate.open()
        answers = [_read(client) for client in clients]
    assert refused == 429
    assert [text for _, text in answers] == [
        _alone(f"prompt {number}", _LONG_TOKENS) for number in range(4)
    ]


def _refused(url: str, gate: StepGate) -> int:
    with RawClient(url) as late:
        late.post_json(_PATH, _body("late", stream=False))
        gate.step_until(lambda: late.is_answered, "the late one is answered")
        return late.read_answer().status


def _has_gone_on(ended: list[int], talks: list[Future[set[str]]], count: int) -> bool:
    return len(ended) >= count or any(one.done() for one in talks)


@pytest.mark.parametrize("coalesce", [False, pytest.param(True, marks=pytest.mark.long)])
def test_twenty_clients_notice_nothing_of_six_switches(
    tmp_path: Path,
    coalesce: bool,  # noqa: FBT001
) -> None:
    """Each sends request after request while modes change: every text is what it is alone."""
    switches: list[dict[str, object]] = [
        {"enabled": True},
        {"max_b": 8},
        {"enabled": False},
        {"enabled": True, "max_b": 3, "coalesce": not coalesce},
        {"max_b": 8, "coalesce": coalesce},
        {"enabled": False},
    ]
    ended: list[int] = []
    flags: dict[str, object] = {"continuous_batching.coalesce": coalesce}
    with _live(tmp_path, flags=flags) as live, ThreadPoolExecutor(20) as pool:
        is_over = False

        def converse(client_number: int) -> set[str]:
            modes: set[str] = set()
            with httpx.Client(base_url=live.url, timeout=CEILING_S) as client:
                while not is_over:
                    prompt = f"prompt {client_number % 7} {len(ended) % 3}"
                    answer = client.post(_PATH, json=_body(prompt))
                    assert answer.status_code == 200, answer.text
                    assert sse_text(answer.content) == _alone(prompt)
                    modes.add(answer.headers["x-decode-mode"])
                    ended.append(client_number)
            return modes

        talks = [pool.submit(converse, number) for number in range(20)]
        try:
            for section in switches:
                wait_until(
                    partial(_has_gone_on, ended, talks, len(ended) + 20),
                    "clients are served",
                )
                live.switch(section)
            live.wait_for("single", 1)
        finally:
            is_over = True
        seen = {mode for talk in talks for mode in talk.result(CEILING_S)}
        wait_until(lambda: is_idle(live.url), "nothing is left")
        assert scrape(live.url, "machd_kv_cache_bytes", state="used") == 0
    assert seen == {"single", "batched"}


@pytest.mark.long
def test_a_real_model_says_the_same_across_switches(
    tmp_path: Path, embedded_model: LoadedModel
) -> None:
    """Greedy texts of the embedded model, before, between and after two switches, are its solo ones."""
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx

    prompts = ["The capital of France is", "Once upon a time", "2 + 2 =", "The sea is"]

    def ask(url: str, prompt: str) -> tuple[str, str]:
        body = _body(prompt, model=embedded_model.description.model_id, max_tokens=12, stream=False)
        answer = httpx.post(f"{url}{_PATH}", json=body, timeout=CEILING_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers["x-decode-mode"]

    with (
        _live(tmp_path, lambda: make_engine(embedded_model)) as live,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        alone = {prompt: ask(live.url, prompt)[0] for prompt in prompts}
        modes = []
        for is_batched in (True, False):
            asked = [pool.submit(ask, live.url, prompt) for prompt in prompts]
            wait_until(lambda: scrape(live.url, "machd_requests_running") > 0, "some run")
            live.switch({"enabled": is_batched})
            asked += [pool.submit(ask, live.url, prompt) for prompt in prompts]
            answers = [one.result(CEILING_S) for one in asked]
            modes.append({mode for _, mode in answers})
            assert [text for text, _ in answers] == [alone[prompt] for prompt in prompts * 2]
    assert modes == [{"single", "batched"}, {"single", "batched"}]
