"""LM Studio's web sockets, message by message: the first message, bad input, bounds, gates and ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import create_connection
from typing import Any, Self

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

_KEY = "k-0123456789abcdef"
_FORMED_KEY = "sk-lm-abcdefgh:0123456789abcdefghij"
_ENDLESS = 50_000


@pytest.fixture(autouse=True)
def _no_loose_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test makes the server log a failure of its own."""
    caplog.set_level(logging.WARNING)
    with capture_logs() as events:
        yield
    assert [one.getMessage() for one in caplog.get_records("call")] == []
    assert [one for one in events if one["log_level"] in ("error", "critical")] == []


@pytest.fixture(name="gate")
def _gate() -> Iterator[StepGate]:
    gate = StepGate(at_decode)
    yield gate
    gate.open()


def _daemon(gate: StepGate | None = None, **flags: object) -> RunningDaemon:
    settings = {name.replace("__", "."): value for name, value in flags.items()}
    open_gate = StepGate(lambda _plan: False)
    return RunningDaemon(
        lambda: FakeEngine(told, before_step=gate or open_gate, context_tokens=1_000_000), settings
    )


class _Socket:
    """A client of one namespace that has said who it is."""

    def __init__(self, url: str, namespace: str = "llm", passkey: str = "none") -> None:
        self._connecting = connect(
            f"{url.replace('http', 'ws')}/{namespace}", open_timeout=CEILING_S, max_size=None
        )
        self._passkey = passkey

    def __enter__(self) -> Self:
        self.connection: ClientConnection = self._connecting.__enter__()
        self.send(authVersion=1, clientIdentifier="tests", clientPasskey=self._passkey)
        self.greeting = self.receive()
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def send(self, **message: object) -> None:
        """Send a message."""
        self.connection.send(json.dumps(message))

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=CEILING_S))
        return message

    def call(self, endpoint: str, parameter: object = None, call_id: int = 1) -> dict[str, Any]:
        """Make a call, and return its answer."""
        self.send(type="rpcCall", endpoint=endpoint, callId=call_id, parameter=parameter)
        while (message := self.receive()).get("callId") != call_id:
            assert message["type"] == "channelSend"
        return message

    def predict(self, text: str, channel_id: int = 1, **settings: object) -> None:
        """Ask for an answer to one message."""
        fields = [{"key": f"llm.prediction.{key}", "value": one} for key, one in settings.items()]
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        stack = {"layers": [{"layerName": "apiOverride", "config": {"fields": fields}}]}
        parameter = {
            "modelSpecifier": {"type": "query", "query": {}},
            "history": {"messages": [message]},
            "predictionConfigStack": stack,
        }
        self.send(
            type="channelCreate",
            endpoint="predict",
            channelId=channel_id,
            creationParameter=parameter,
        )

    def packets(self) -> Iterator[dict[str, Any]]:
        """Return what comes over the only channel until it ends; an error comes as it is."""
        while (message := self.receive())["type"] == "channelSend":
            yield message["message"]
        if message["type"] == "channelError":
            yield message

    def is_served(self) -> bool:
        """Whether the socket answers a prediction."""
        self.predict("say yes", channel_id=99)
        fragments = [one["fragment"] for one in self.packets() if one["type"] == "fragment"]
        return "".join(one["content"] for one in fragments) == "yes"


def test_socket_needs_first_message_of_protocol() -> None:
    """A first message that is none of the protocol gets the protocol's refusal, and the end."""
    with _daemon() as daemon:
        url = f"{daemon.url.replace('http', 'ws')}/llm"
        for first in ("hello", '{"authVersion":2}', "[" * 100_000, b"\x00"):
            with connect(url) as connection:
                connection.send(first)
                answer = json.loads(connection.recv(timeout=CEILING_S))
                assert answer["success"] is False
                assert "authVersion 1" in answer["error"]
                with pytest.raises(ConnectionClosed):
                    connection.recv(timeout=CEILING_S)
        with _Socket(daemon.url) as socket:
            assert socket.greeting == {"success": True}
            assert socket.is_served()


def test_socket_takes_key_as_passkey_token_or_header(tmp_path: Path) -> None:
    """A key is good in each place where a client of LM Studio can have one, and needed where keys are set."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{_KEY}\nbob:{_FORMED_KEY}\n")
    keys.chmod(0o600)
    with _daemon(auth__api_keys_file=str(keys)) as daemon:
        assert httpx.get(f"{daemon.url}/lmstudio-greeting").json() == {"lmstudio": True}
        with _Socket(daemon.url, passkey="no key at all") as socket:
            assert socket.greeting["success"] is False
            assert "clientPasskey" in socket.greeting["error"]
        with _Socket(daemon.url, passkey=_KEY) as socket:
            assert socket.is_served()
        identifier, _, secret = _FORMED_KEY.removeprefix("sk-lm-").partition(":")
        url = daemon.url.replace("http", "ws")
        first = {"authVersion": 1, "clientIdentifier": identifier, "clientPasskey": secret}
        with connect(f"{url}/llm") as connection:
            connection.send(json.dumps(first))
            assert json.loads(connection.recv(timeout=CEILING_S)) == {"success": True}
        first["clientPasskey"] = "other"
        for headers in ({"Authorization": f"Bearer {_KEY}"}, {"X-Api-Key": _KEY}):
            with connect(f"{url}/llm", additional_headers=headers) as connection:
                connection.send(json.dumps(first))
                assert json.loads(connection.recv(timeout=CEILING_S)) == {"success": True}
        with connect(url.replace("://", f"://me:{_KEY}@") + "/llm") as connection:
            connection.send(json.dumps(first))
            assert json.loads(connection.recv(timeout=CEILING_S)) == {"success": True}


def test_socket_loses_what_its_key_loses(tmp_path: Path) -> None:
    """A key that a reload takes away is of no more use over a socket that it has opened."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{_KEY}\n")
    keys.chmod(0o600)
    flags = {"auth.api_keys_file": str(keys)}
    with (
        AdminDaemon(tmp_path, lambda: FakeEngine(told), flags) as running,
        _Socket(running.daemon.url, passkey=_KEY) as socket,
    ):
        assert socket.is_served()
        keys.write_text(f"alice:{_FORMED_KEY}\n")
        assert running.admin.post("/admin/reload").status_code == 200
        assert socket.call("listLoaded")["error"]["errorData"]["status"] == 401


def test_foreign_pages_and_hosts_open_no_socket() -> None:
    """A page of another origin is refused before the handshake, with the answer that its requests get."""
    with _daemon() as daemon:
        port = int(daemon.url.rpartition(":")[2])
        for host, origin, status in (
            ("127.0.0.1", "https://evil.example", 403),
            ("evil.example", None, 421),
        ):
            with (
                create_connection(("127.0.0.1", port)) as plain,
                pytest.raises(InvalidStatus) as refused,
                connect(f"ws://{host}:{port}/llm", sock=plain, origin=origin),  # type: ignore[arg-type]
            ):
                pass
            assert refused.value.response.status_code == status
            assert "message" in json.loads(refused.value.response.body or b"")["error"]


def test_requests_for_sockets_elsewhere_are_requests() -> None:
    """A path without sockets answers a client that asks for one as it answers every other; so does /llm without."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    with _daemon() as daemon:
        assert httpx.get(f"{daemon.url}/v1/models", headers=upgrade).status_code == 200
        assert httpx.get(f"{daemon.url}/llm").status_code == 404
        assert httpx.get(f"{daemon.url}/llm", headers=upgrade).status_code == 400
        assert httpx.post(f"{daemon.url}/llm", headers=upgrade, content="x").status_code == 404
        key = {**upgrade, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
        long = httpx.get(f"{daemon.url}/llm", headers={**key, "X-Long": "x" * 9000})
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "invalid_request"


def test_socket_goes_on_after_bad_messages() -> None:
    """What is no message gets a warning, what is a wrong one its error, and nothing else is lost."""
    with _daemon() as daemon, _Socket(daemon.url) as socket:
        for text in ("", "x", "[]", '{"type":"nothing"}', '{"type":"rpcCall"}', "[" * 100_000):
            socket.connection.send(text)
            assert socket.receive()["type"] == "communicationWarning"
        socket.send(type="communicationWarning", warning="a client's own")
        socket.send(type="channelAck", channelId=1, ackId=1)
        socket.send(type="channelSend", channelId=7, ackId=3, message={"type": "cancel"})
        assert socket.receive() == {"type": "channelAck", "channelId": 7, "ackId": 3}
        socket.send(type="keepAlive")
        assert socket.receive() == {"type": "keepAliveAck"}
        for kind in ("signal", "writableSignal"):
            socket.send(type=f"{kind}Subscribe", subscribeId=4, endpoint="x")
            refusal = socket.receive()
            assert (refusal["type"], refusal["subscribeId"]) == (f"{kind}Error", 4)
        for endpoint, parameter in (
            ("nothing", None),
            ("tokenize", None),
            ("tokenize", {"specifier": {"type": "query"}, "inputString": 1}),
            ("unloadModel", {"identifier": "another"}),
            ("getLoadConfig", {"specifier": {"type": "query", "query": {"identifier": "//"}}}),
            ("applyPromptTemplate", {"specifier": {"type": "other"}}),
        ):
            refusal = socket.call(endpoint, parameter, call_id=5)
            assert (refusal["type"], refusal["callId"]) == ("rpcError", 5)
            assert refusal["error"]["title"]
        assert socket.is_served()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": 99}, "temperature"),
        ({"topPSampling": {"checked": "yes"}}, "checked"),
        ({"structured": {"type": "gbnf", "gbnfGrammar": "root ::= 'a'"}}, "JSON"),
        ({"structured": {"type": "json", "jsonSchema": {"type": "nothing"}}}, "nothing"),
        ({"tools": {"type": "toolArray", "tools": [{"type": "other"}]}}, "tools"),
        ({"promptTemplate": {"type": "jinja"}}, "template"),
        ({"stopStrings": "x"}, "array"),
    ],
)
def test_prediction_with_wrong_setting_gets_error(settings: dict[str, Any], problem: str) -> None:
    """A setting that a completion cannot have ends its channel with the completion's own error."""
    with _daemon() as daemon, _Socket(daemon.url) as socket:
        socket.predict("say yes", **settings)
        (refusal,) = socket.packets()
        assert refusal["type"] == "channelError"
        assert problem in refusal["error"]["title"]
        assert refusal["error"]["errorData"]["status"] == 400
        assert socket.is_served()


def test_prediction_takes_settings() -> None:
    """Checkboxes count where they are checked; the reason of the end is the client's bound."""
    with _daemon() as daemon, _Socket(daemon.url) as socket:
        off = {"checked": False, "value": 7}
        socket.predict(
            "say abcdef",
            temperature=0.5,
            maxPredictedTokens={"checked": True, "value": 3},
            topPSampling=off,
            stopStrings=["never"],
        )
        *_, success = socket.packets()
        assert success["stats"]["stopReason"] == "maxPredictedTokensReached"
        assert success["stats"]["predictedTokensCount"] == 3
        assert {"key": "llm.prediction.topPSampling", "value": off} in success["predictionConfig"][
            "fields"
        ]


def test_long_messages_are_refused_by_length() -> None:
    """A message beyond the bound of bodies gets an error; one beyond twice that ends the socket with 1009."""
    with _daemon(limits__max_body_bytes=4096) as daemon:
        with _Socket(daemon.url) as socket:
            socket.predict("x" * 5000)
            (refusal,) = socket.packets()
            assert refusal["error"]["errorData"] == {"code": "body_too_large", "status": 413}
            assert socket.is_served()
            socket.predict("x" * 10_000)
            with pytest.raises(ConnectionClosed) as closed:
                socket.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        with _Socket(daemon.url) as socket:
            assert socket.is_served()


def test_open_channels_of_socket_are_bounded(
    gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond the bound gets an error at once; what is open goes on, under its own number."""
    monkeypatch.setattr("machd.dialects.lm_studio_socket.session._MAX_OPEN", 2)
    with _daemon(gate) as daemon, _Socket(daemon.url) as socket:
        socket.predict("say a", channel_id=1)
        socket.predict("say a", channel_id=1)
        texts = {1: "", 2: ""}

        def other_than_fragment() -> dict[str, Any]:
            while (message := socket.receive())["type"] == "channelSend":
                if message["message"]["type"] == "fragment":
                    texts[message["channelId"]] += message["message"]["fragment"]["content"]
            return message

        assert "open already" in other_than_fragment()["warning"]
        socket.predict("say b", channel_id=2)
        socket.predict("say c", channel_id=3)
        refusal = other_than_fragment()
        assert (refusal["type"], refusal["channelId"]) == ("channelError", 3)
        assert refusal["error"]["errorData"]["code"] == "too_many_in_flight"
        socket.send(type="rpcCall", endpoint="listLoaded", callId=1)
        assert other_than_fragment()["type"] == "rpcError"
        gate.open()
        assert {other_than_fragment()["channelId"] for _ in range(2)} == {1, 2}
        assert texts == {1: "a", 2: "b"}
        assert socket.is_served()


def test_texts_to_embed_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls about embedding models that come all at once are answered in turn, where others get an error."""
    monkeypatch.setattr("machd.dialects.lm_studio_socket.session._MAX_OPEN", 2)
    with _daemon() as daemon:
        answers = {}
        for namespace in ("embedding", "llm"):
            with _Socket(daemon.url, namespace) as socket:
                for call_id in range(50):
                    socket.send(type="rpcCall", endpoint="listLoaded", callId=call_id)
                answers[namespace] = {
                    (message := socket.receive())["callId"]: message["type"] for _ in range(50)
                }
    assert answers["embedding"] == dict.fromkeys(range(50), "rpcResult")
    assert "rpcError" in answers["llm"].values()


def test_messages_count_as_requests_and_idle_sockets_do_not(gate: StepGate) -> None:
    """``limits.max_in_flight`` holds for what sockets ask for, together with requests of HTTP."""
    with (
        _daemon(gate, limits__max_in_flight=1) as daemon,
        _Socket(daemon.url) as one,
        _Socket(daemon.url) as other,
    ):
        one.predict("say a")
        gate.wait_until_held()
        refusal = other.call("listLoaded")
        assert refusal["error"]["errorData"] == {"code": "too_many_in_flight", "status": 503}
        assert httpx.get(f"{daemon.url}/v1/models").status_code == 503
        gate.open()
        assert [packet["type"] for packet in one.packets()][-1] == "success"
        assert other.call("listLoaded")["type"] == "rpcResult"


@pytest.mark.parametrize("way", ["cancel", "close", "reset"])
def test_prediction_ends_when_client_cancels_or_leaves(way: str) -> None:
    """An answer that nothing reads any more ends at once, and a cancelled one says so."""
    with _daemon() as daemon:
        with _Socket(daemon.url) as socket:
            socket.predict("say " + "x" * _ENDLESS, maxPredictedTokens=_ENDLESS)
            packets = socket.packets()
            next(one for one in packets if one["type"] == "fragment")
            if way == "cancel":
                socket.send(type="channelSend", channelId=1, message={"type": "cancel"})
                *_, last = packets
                assert last["stats"]["stopReason"] == "userStopped"
                assert socket.is_served()
            elif way == "reset":
                socket.connection.socket.close()
        wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")
        wait_until(
            lambda: scrape(daemon.url, "machd_http_requests_in_flight") <= 1,
            "no request is open",
        )
        answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=chat("say yes"))
        assert answer.json()["choices"][0]["message"]["content"] == "yes"


def test_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves its answers and pings unread loses its socket, and its answers end."""
    monkeypatch.setattr("machd.http.socket_connection._PONG_S", 0.2)
    with _daemon() as daemon, _Socket(daemon.url) as socket:
        socket.predict("say " + "x" * _ENDLESS, maxPredictedTokens=_ENDLESS)
        # This client stops reading once a few messages wait for it.
        wait_until(
            lambda: scrape(daemon.url, "machd_aborts_total", reason="client_disconnected") == 1,
            "the answer is ended",
        )
        wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")
        with pytest.raises(ConnectionClosed):
            list(iter(socket.receive, None))  # what was sent before


def test_stop_takes_no_notice_of_unfinished_handshakes() -> None:
    """A client that asks for a socket and then says nothing does not keep the daemon from its stop."""
    with _daemon() as daemon:
        port = int(daemon.url.rpartition(":")[2])
        with (
            create_connection(("127.0.0.1", port)) as half,
            create_connection(("127.0.0.1", port)) as silent,
        ):
            head = (
                b"GET /llm HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
                b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            )
            half.sendall(head)
            silent.sendall(head + b"\r\n")
            assert silent.recv(12) == b"HTTP/1.1 101"
            daemon.stop()
            assert daemon.join(CEILING_S)


def test_stop_lets_open_answers_end(gate: StepGate) -> None:
    """While the daemon drains, an idle socket closes with 1012, and a busy one after its answer."""
    with _daemon(gate, limits__drain_timeout_s=3600.0) as daemon:
        with _Socket(daemon.url) as idle, _Socket(daemon.url) as busy:
            busy.predict("say yes")
            gate.wait_until_held()
            daemon.stop()
            with pytest.raises(ConnectionClosed) as closed:
                idle.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            refusal = busy.call("tokenize", {"specifier": {"type": "query"}, "inputString": "a"})
            assert refusal["type"] in ("rpcError", "rpcResult")
            gate.open()
            assert [packet["type"] for packet in busy.packets()][-1] == "success"
            with pytest.raises(ConnectionClosed):
                busy.receive()
        assert daemon.join(CEILING_S)


def test_idle_sockets_give_way_to_requests() -> None:
    """More sockets than connections are allowed leave room: those that have waited longest are closed."""
    with _daemon(limits__max_connections=8) as daemon, ExitStack() as stack:
        sockets = [stack.enter_context(_Socket(daemon.url)) for _ in range(24)]
        assert httpx.get(f"{daemon.url}/v1/models").status_code == 200
        assert sockets[-1].is_served()
        with pytest.raises(ConnectionClosed):
            sockets[0].receive()


def test_other_namespaces_say_what_is_missing() -> None:
    """Completions of embedding models, files, downloads and plugins get an error in words."""
    with _daemon() as daemon:
        for namespace, endpoint in (
            ("embedding", "predict"),
            ("files", "uploadFileBase64"),
            ("repository", "searchModels"),
            ("plugins", "reindexPlugins"),
        ):
            with _Socket(daemon.url, namespace) as socket:
                refusal = socket.call(endpoint, {})
                assert refusal["type"] == "rpcError"
                assert "not served here" in refusal["error"]["title"]
