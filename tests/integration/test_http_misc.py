"""Everything public that does not generate, and how streams look on the wire."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import httpx
import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, completion, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode, at_prefill

from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.engine.protocol.step import StepPlan

_CHAT = "/v1/chat/completions"
Phase = Callable[[StepPlan], bool]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the tests that need no special settings."""
    with RunningDaemon(lambda: FakeEngine(told)) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=daemon.url) as client:
        yield client


# --- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello", "", "Größe 寿司 🍣", "a\n\tb\u2028", "\x00"])
def test_tokens_become_the_same_text_again(http: httpx.Client, text: str) -> None:
    """``/detokenize`` undoes ``/tokenize``, and the count is the number of ids."""
    tokenised = http.post("/tokenize", json={"prompt": text}).json()
    assert tokenised["count"] == len(tokenised["tokens"]) == len(text.encode())
    assert tokenised["max_model_len"] == 4096
    assert tokenised["token_strs"] is None
    back = http.post("/detokenize", json={"tokens": tokenised["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_conversation_is_tokenised_as_chat_counts_it(http: httpx.Client) -> None:
    """``/tokenize`` of messages counts exactly the prompt tokens that a chat completion reports."""
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "say hi"}]
    tokenised = http.post("/tokenize", json={"messages": messages, "model": "fake"}).json()
    answer = http.post(_CHAT, json={"model": "fake", "messages": messages}).json()
    assert tokenised["count"] == answer["usage"]["prompt_tokens"]
    shorter = http.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False}
    ).json()
    assert shorter["count"] == tokenised["count"] - len("assistant: ")


def test_each_tokens_text_is_told_on_request(http: httpx.Client) -> None:
    """``return_token_strs`` brings each token's text; pieces of characters show as U+FFFD."""
    answer = http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]


# --- what the daemon says of itself -----------------------------------------------------------


def test_models_are_listed_and_found(daemon: RunningDaemon) -> None:
    """The served model is listed and found; what is no name is a 404 with its own code."""
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "machd"
        for other in ("~gpt-4", "a/b/c/name", ".fake", "fake\\x"):
            with pytest.raises(NotFoundError) as caught:
                client.models.retrieve(other)
            assert caught.value.code == "model_not_found"
            assert caught.value.param == "model"


def test_capabilities_describe_the_model_and_the_mode(http: httpx.Client) -> None:
    """The contract's keys are there, and they tell the truth about the fake model."""
    answer = http.get("/v1/capabilities").json()
    assert answer["architecture"] == "fake"
    assert answer["kv_cache_kind"] == "standard"
    assert answer["layers"] == {"KVCache": 1}
    assert answer["decode_mode"]["active"] == "single"
    assert answer["decode_mode"]["reason"]
    assert answer["distributed"] is None, "an engine without a model of code"
    assert answer["bitwise"]["value"] is False
    assert "machd's own kernels" in answer["bitwise"]["reason"]
    assert answer["max_b"] == 1
    assert answer["model"]["id"] == "fake"
    assert answer["model"]["context_tokens"] == 4096
    assert answer["features"]["chat"] is True
    assert answer["features"] == {
        "chat": True,
        "logprobs": True,
        "tools": True,
        "tool_format": "json_tools",
        "system_messages": "anywhere",
        "reasoning": True,
        "structured_output": True,
        "vision": False,
        "video": False,
        "embeddings": False,
        "scores": False,
        "classes": False,
    }
    assert answer["speculation"]["mode"] == "off"
    assert answer["speculation"]["mode_reason"]
    assert answer["versions"]["machd"]


def test_cache_stats_have_the_contracts_shape(http: httpx.Client, daemon: RunningDaemon) -> None:
    """At rest the status is ok and the time is RFC 3339 with an offset, just now."""
    wait_until(lambda: is_idle(daemon.url), "the daemon is idle")
    answer = http.get("/v1/cache/stats").json()
    assert answer["status"] == "ok"
    as_of = datetime.fromisoformat(answer["as_of"])
    assert as_of.utcoffset() == timedelta(0)
    assert abs(datetime.now(as_of.tzinfo) - as_of) < timedelta(minutes=5)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", answer["as_of"])
    assert answer["kv"] == {"budget_bytes": 4096 * 1024, "reserved_bytes": 0, "used_bytes": 0}
    assert {"prefix", "disk", "expert_bank"} <= answer.keys()


@pytest.mark.parametrize("phase", [at_prefill, at_decode], ids=["prefill", "decode"])
def test_cache_stats_are_stale_while_a_generation_runs(phase: Phase) -> None:
    """From its first step to its last, the numbers are those of the last idle moment, and say so."""
    gate = StepGate(phase)
    with RunningDaemon(lambda: FakeEngine(told, before_step=gate)) as daemon, gate:
        idle = httpx.get(f"{daemon.url}/v1/cache/stats").json()
        with RawClient(daemon.url) as client:
            client.post_json(_CHAT, chat("say hello"))
            gate.wait_until_held()
            held = httpx.get(f"{daemon.url}/v1/cache/stats").json()
            assert held["status"] == "stale_generation_in_flight"
            assert held["kv"] == idle["kv"]
            assert datetime.fromisoformat(held["as_of"]) >= datetime.fromisoformat(idle["as_of"])
            gate.open()
            client.read_until(b"hello")
        wait_until(
            lambda: httpx.get(f"{daemon.url}/v1/cache/stats").json()["status"] == "ok",
            "the statistics are fresh again",
        )


@pytest.mark.parametrize("phase", [at_prefill, at_decode], ids=["prefill", "decode"])
def test_gauges_count_a_generation_from_its_first_step(phase: Phase) -> None:
    """A running generation is on the gauges in every phase, and gone from them afterwards."""
    gate = StepGate(phase)
    with RunningDaemon(lambda: FakeEngine(told, before_step=gate)) as daemon, gate:
        with RawClient(daemon.url) as client:
            client.post_json(_CHAT, chat("say hello"))
            gate.wait_until_held()
            assert scrape(daemon.url, "machd_requests_running") == 1
            assert scrape(daemon.url, "machd_active_loops") == 1
            assert scrape(daemon.url, "machd_slots", state="free") == 0
            gate.open()
            client.read_until(b"hello")
        wait_until(lambda: is_idle(daemon.url), "the gauges are back at zero")


def test_health_when_ready(http: httpx.Client) -> None:
    """Alive and ready: 200, and the state says so; ``/health`` is ``/health/live``."""
    for path in ("/health", "/health/live", "/health/ready"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "state": "ready", "reason": None}


def test_health_while_loading() -> None:
    """While the model loads the daemon lives but is not ready, and says why."""
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(CEILING_S)
        return FakeEngine()

    with RunningDaemon(load, wait_until_ready=False) as daemon:
        wait_until(lambda: _answers(daemon.url), "the listener answers")
        live = httpx.get(f"{daemon.url}/health/live")
        ready = httpx.get(f"{daemon.url}/health/ready")
        may_load.set()
        assert live.status_code == 200
        assert live.json()["state"] == "loading"
        assert ready.status_code == 503
        assert ready.json()["status"] == "unavailable"
        assert "loading" in ready.json()["reason"]
        wait_until(
            lambda: httpx.get(f"{daemon.url}/health/ready").status_code == 200,
            "ready once the model is loaded",
        )


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True


def test_metrics_are_prometheus_text(http: httpx.Client) -> None:
    """The page has Prometheus' content type and parses; the state is one series set to 1."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    active = [one.labels["state"] for one in families["machd_state"].samples if one.value == 1]
    assert active == ["ready"]
    assert families["machd_model_info"].samples[0].labels["model"] == "fake"


def test_metrics_count_a_request(http: httpx.Client, daemon: RunningDaemon) -> None:
    """A request adds its tokens and one to the counter of its endpoint and finish reason."""
    labels = {"endpoint": "completions", "finish_reason": "stop", "decode_mode": "single"}
    names = ("machd_prompt_tokens_total", "machd_generation_tokens_total")
    before = [scrape(daemon.url, name) for name in names]
    count = scrape(daemon.url, "machd_requests_total", **labels)
    http.post("/v1/completions", json=completion("say hello"))
    wait_until(
        lambda: scrape(daemon.url, "machd_requests_total", **labels) == count + 1,
        "the request is counted",
    )
    after = [scrape(daemon.url, name) for name in names]
    assert [late - early for early, late in zip(before, after, strict=True)] == [9, 6]


def test_metrics_can_be_kept_off_the_public_port() -> None:
    """With ``metrics.public`` false there is no such path."""
    with RunningDaemon(flags={"metrics.public": False}) as daemon:
        assert httpx.get(f"{daemon.url}/metrics").status_code == 404


def test_openapi_document_describes_every_endpoint(http: httpx.Client) -> None:
    """The document is served as JSON and holds every public endpoint under its method."""
    answer = http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert document["openapi"].startswith("3.1")
    for endpoint in PUBLIC_ENDPOINTS:
        assert endpoint.method in document["paths"][endpoint.path]
    assert "http://" not in answer.text.replace("http://127.0.0.1", "")


def test_every_described_endpoint_exists(http: httpx.Client) -> None:
    """No endpoint of the table answers 404 or 405 to its own method; only what it names may miss.

    The feed of models is there with several models alone (``test_model_feed``).
    """
    for endpoint in PUBLIC_ENDPOINTS:
        answer = http.request(endpoint.method, endpoint.path.replace("{id}", "fake"))
        if endpoint.path == "/models/sse":
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            continue
        is_stored = endpoint.path in ("/v1/responses/{id}", "/v1/chat/completions/{id}")
        assert answer.status_code in (200, 400, *((404,) if is_stored else ())), endpoint.path
        if answer.status_code == 404:
            assert "is stored here" in answer.json()["error"]["message"]


def test_requests_start_no_thread() -> None:
    """The threads that they need are there from the start: later the system may have none."""
    with RunningDaemon() as daemon:
        before = set(threading.enumerate())
        httpx.post(f"{daemon.url}{_CHAT}", json=chat(max_tokens=2))
        for endpoint in PUBLIC_ENDPOINTS:
            httpx.request(endpoint.method, f"{daemon.url}{endpoint.path}", json={})
        assert set(threading.enumerate()) == before


# --- headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "req-1.2_3", "A" * 64, "0-9.z"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", _CHAT), ("GET", "/health"), ("GET", "/nowhere")]
)
def test_good_request_ids_are_echoed(
    http: httpx.Client, given: str, method: str, path: str
) -> None:
    """A well-formed X-Request-Id comes back on every answer, errors included."""
    answer = http.request(method, path, headers={"X-Request-Id": given}, json=chat("say a"))
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize(
    "given", [None, "", " ", "a b", "A" * 65, "a\tb", "é", "<script>", "a,b", "a/b", "x\x7f"]
)
def test_bad_request_ids_are_replaced(daemon: RunningDaemon, given: str | None) -> None:
    """An id that is missing, too long or not plain never comes back; a fresh one does."""
    headers = {"X-Request-Id": given} if given is not None else {}
    with RawClient(daemon.url) as client:
        client.request("GET", "/health", headers={**headers, "Connection": "close"})
        head = client.read_to_end().partition(b"\r\n\r\n")[0].decode("latin-1")
    assert re.search(r"^x-request-id: req-[0-9a-f]{24}\r?$", head, re.MULTILINE)
    assert head.lower().count("x-request-id") == 1


def test_request_ids_are_unique(http: httpx.Client) -> None:
    """Ids that the daemon makes do not repeat."""
    ids = {http.get("/health").headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20


def test_the_server_does_not_name_its_software(http: httpx.Client) -> None:
    """No header tells which server software answers."""
    assert "server" not in http.get("/health").headers


# --- streams on the wire ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_CHAT, chat("say Hello 🍣\nbye", stream=True)),
        (_CHAT, chat("say x", stream=True, n=3, stream_options={"include_usage": True})),
        (_CHAT, chat("say tab\tcr\rnl\n\n", stream=True)),
        ("/v1/completions", completion("say Hello 🍣\n\nbye", stream=True, logprobs=2)),
        ("/v1/completions", completion(["say a", "say b"], stream=True, echo=True)),
    ],
)
def test_streams_are_framed_byte_for_byte(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    """LF alone, one ``data:`` line a frame, every frame JSON of one object, ``[DONE]`` last."""
    with http.stream("POST", path, json=body) as answer:
        assert answer.headers["cache-control"] == "no-cache"
        assert "content-length" not in answer.headers
        raw = b"".join(answer.iter_raw())
    assert b"\r" not in raw
    assert raw.endswith(b"}\n\ndata: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1
    frames = raw.removesuffix(b"\n\n").split(b"\n\n")
    for frame in frames[:-1]:
        assert frame.startswith(b"data: {")
        assert b"\n" not in frame
        assert isinstance(json.loads(frame[6:]), dict)


def test_every_frame_is_whole_utf8() -> None:
    """A character of several tokens comes out in one piece, whenever the engine pauses."""
    text = "é寿🍣e\u0301👩‍👩‍👧"
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat(f"say {text}", stream=True))
        for _ in range(len(text.encode())):
            gate.wait_until_held()
            gate.let()
        gate.open()
        client.read_until(b"[DONE]\n\n")
        pieces = [
            event["choices"][0]["delta"].get("content", "") for event in sse_data(client.body)
        ]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_silence_is_filled_with_comments() -> None:
    """While the engine computes, comment lines flow; clients that know SSE never see them."""
    gate = StepGate(at_decode)
    flags = {"streaming.keepalive_s": 0.02}
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate), flags) as daemon,
        RawClient(daemon.url) as raw,
        gate,
    ):
        raw.post_json(_CHAT, chat("say hello", stream=True))
        gate.wait_until_held()
        raw.read_until(b": keep-alive\n\n")
        gate.open()
        raw.read_until(b"[DONE]\n\n")
        assert sse_text(raw.body) == "hello"


def test_a_client_of_openais_does_not_see_comments() -> None:
    """OpenAI's client reads the text of a stream with comment lines in it."""
    gate = StepGate(at_decode)
    flags = {"streaming.keepalive_s": 0.005}
    opener = threading.Timer(0.2, gate.open)
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate), flags) as daemon,
        gate,
        OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client,
    ):
        opener.start()
        with client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "say hello"}], stream=True
        ) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        opener.join()
    assert text == "hello"


def _tokens_per_event(url: str, text: str, **fields: object) -> list[int]:
    body = httpx.post(
        f"{url}{_CHAT}", json=chat(f"say {text}", stream=True, logprobs=True, **fields)
    ).content
    assert sse_text(body) == text
    events = [event["choices"][0] for event in sse_data(body)]
    return [len(event["logprobs"]["content"]) for event in events if event["logprobs"]]


def test_stream_interval_sets_the_tokens_of_an_event(http: httpx.Client) -> None:
    """All events but the first and the last carry at least ``stream_interval`` tokens."""
    url, text = str(http.base_url).rstrip("/"), "x" * 50
    for interval in (1, 7, 1024):
        counts = _tokens_per_event(url, text, stream_interval=interval)
        assert sum(counts) == 50
        assert all(count >= interval for count in counts[1:-1])
        assert len(counts) <= 2 + 49 // interval


def test_the_interval_of_the_settings_is_the_default() -> None:
    """``streaming.interval`` paces streams that ask for nothing; a request can ask for less."""
    with RunningDaemon(lambda: FakeEngine(told), {"streaming.interval": 1000}) as daemon:
        assert len(_tokens_per_event(daemon.url, "x" * 50)) <= 2
        counts = _tokens_per_event(daemon.url, "x" * 50, stream_interval=5)
        assert all(count >= 5 for count in counts[1:-1])


def test_an_unhurried_engine_sends_a_token_an_event() -> None:
    """With interval 1 a token leaves as soon as it is there, before the next one is computed."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat("say abcdef", stream=True))
        for letter in b"abcdef":
            gate.wait_until_held()
            client.read_until(b'"content":"%c"' % letter)
            gate.let()
        gate.open()
        client.read_until(b"[DONE]\n\n")
