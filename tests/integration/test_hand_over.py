"""A drafting request that is joined by others and is alone again answers as it does alone.

A daemon decodes on a tiny model whose answers are drafted, rightly at seven places of ten. A gate
holds each step, so that requests join at the same steps every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx
import pytest
from support.clients.raw_client import RawAnswer, RawClient
from support.clocks.polling import wait_until
from support.daemon.arrivals import Arrivals
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import sse_data, sse_text
from support.engines.oracle import Oracle, draft_eagerly
from support.engines.step_gate import StepGate
from support.engines.tiny_models import TinyKind, tiny_model
from support.every_run import sampled

from machd.engine.assembly import engine_parts
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import ProposerKind, StepPlan, StepResult
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine.step.ports import Proposer, RowProposer
from machd.request.generation import SamplingParams

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_DRAFT_TOKENS = 2
_SETTINGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 4,
    "continuous_batching.window_ms": 0,
    "speculation.max_draft_tokens": _DRAFT_TOKENS,
}
_SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "minLength": 24, "maxLength": 30} for name in ("one", "two", "six")
    },
    "required": ["one", "two", "six"],
    "additionalProperties": False,
}


def _completion(prompt: str, **fields: object) -> dict[str, object]:
    usual = {"max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    # One character a token: the end of the text, which has none, is never said.
    return {"model": "tiny-llama", "prompt": prompt, "logit_bias": {"0": -100}, **usual, **fields}


_FIRST: dict[str, dict[str, object]] = {
    "greedy": _completion("whoever comes first"),
    "seeded": _completion("or by chance", temperature=0.9, seed=5),
    "penalised": _completion("never twice", frequency_penalty=0.7, temperature=0.7, seed=9),
    "schema": {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "in a form"}],
        "max_tokens": 160,
        "temperature": 0.8,
        "seed": 3,
        "stream": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "form", "schema": _SCHEMA, "strict": True},
        },
    },
}
_OTHERS: dict[str, dict[str, object]] = {
    "second": _completion("the next", max_tokens=14),
    "third": _completion("and one more", max_tokens=12, temperature=1, seed=3),
    "fourth": _completion("that is all", max_tokens=10, presence_penalty=0.5),
}


def _path(body: dict[str, object]) -> str:
    return _CHAT if "messages" in body else _COMPLETIONS


# --- engines ----------------------------------------------------------------------------------


class _Heard:
    """A row's proposer that drafts nothing and records the row's tokens."""

    def __init__(self, said: list[int]) -> None:
        self._said = said

    @property
    def kv_bytes(self) -> int:
        return 0

    def extend(self, token_ids: Sequence[int]) -> None:
        self._said.extend(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        del max_tokens
        return ()

    def close(self) -> None:
        pass


@dataclass
class _Listener:
    """Drafts nothing and records the answers that an oracle needs."""

    answers: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = field(default_factory=dict)

    @property
    def kind(self) -> ProposerKind:
        return ProposerKind.NGRAM

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> RowProposer:
        said = self.answers[tuple(prompt), sampling] = []
        return _Heard(said)

    def close(self) -> None:
        pass


class _Engine(MlxEngine):
    """The standard tiny model with an oracle's drafts and a callback before each step."""

    def __init__(
        self,
        proposer: Proposer,
        before_step: Callable[[StepPlan], None] | None,
        *,
        looks_ahead: bool,
    ) -> None:
        self._before_step: Callable[[StepPlan], None] | None = None
        model = tiny_model(TinyKind.STANDARD)
        super().__init__(engine_parts(model, looks_ahead=looks_ahead, proposer=proposer))
        self._before_step = before_step

    def run(self, plan: StepPlan) -> StepResult:
        if self._before_step is not None and (plan.prefill or plan.decode):
            self._before_step(plan)
        return super().run(plan)


def _engine(
    proposer: Proposer, gate: StepGate | None = None, *, looks_ahead: bool = False
) -> Callable[[], Engine]:
    return lambda: _Engine(proposer, gate, looks_ahead=looks_ahead)


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """The requests' answers alone, without drafts."""

    texts: dict[str, str]
    listener: _Listener

    @property
    def oracle(self) -> Oracle:
        return Oracle(self.listener.answers, right_of_ten=7)


@pytest.fixture(name="known", scope="module")
def _known() -> _Known:
    listener = _Listener()
    bodies = {**_FIRST, **_OTHERS}
    with RunningDaemon(_engine(listener)) as daemon:
        texts = {
            name: _whole(httpx.post(f"{daemon.url}{_path(body)}", json={**body, "stream": False}))
            for name, body in bodies.items()
        }
    return _Known(texts, listener)


def _whole(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _text(answer: RawAnswer) -> str:
    assert answer.status == 200, answer
    events = sse_data(answer.body)
    assert all("error" not in event for event in events), answer
    if "text" in events[0]["choices"][0]:
        return sse_text(answer.body)
    deltas = (event["choices"][0]["delta"] for event in events if event["choices"])
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Drafts are verified whether that pays or not."""
    with pytest.MonkeyPatch.context() as patch:
        draft_eagerly(patch)
        yield


# --- tests ------------------------------------------------------------------------------------


def _shows(url: str, mode: str) -> None:
    wait_until(lambda: scrape(url, "machd_decode_mode", mode=mode) == 1, f"it decodes {mode}")
    other = {"speculative": "batched", "batched": "speculative"}[mode]
    assert scrape(url, "machd_decode_mode", mode=other) == 0


def _accepted(url: str) -> float:
    return scrape(url, "machd_speculation_accepted_tokens_total")


def _step_until(gate: StepGate, rows: int) -> None:
    """Let steps go until one that decodes so many rows and no prompt is held."""
    for _ in range(60):
        plan = gate.wait_until_held()
        if len(plan.decode) == rows and not plan.prefill:
            return
        gate.let()
    raise AssertionError(f"no step decodes {rows} rows")


@pytest.mark.parametrize(
    ("name", "looks_ahead"),
    sampled(
        [(name, ahead) for name in _FIRST for ahead in (False, True)],
        # Every way to sample, but the seeded one, which the next test joins; of looking ahead, the plain rows and those that a grammar holds back.
        [
            *((name, False) for name in ("penalised", "schema")),
            *((name, True) for name in ("greedy", "schema")),
        ],
    ),
)
def test_a_request_that_is_joined_and_left_again_is_answered_as_alone(
    name: str,
    looks_ahead: bool,  # noqa: FBT001
    known: _Known,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speculative, batched, speculative: the same text, and each one is told how it began."""
    arrivals = Arrivals(monkeypatch)
    gate = StepGate()
    engine = _engine(known.oracle, gate, looks_ahead=looks_ahead)
    with (
        RunningDaemon(engine, _SETTINGS) as daemon,
        RawClient(daemon.url) as first,
        RawClient(daemon.url) as second,
        RawClient(daemon.url) as third,
        RawClient(daemon.url) as fourth,
        gate,
    ):
        body = _FIRST[name]
        arrivals.wait_for_one_more(lambda: first.post_json(_path(body), body))
        _step_until(gate, 1)
        for _ in range(3):
            gate.let()
            gate.wait_until_held()
        _shows(daemon.url, "speculative")
        gate.step_until(lambda: _accepted(daemon.url) > 0, "drafts are accepted")
        before = _accepted(daemon.url)

        for client, other in zip((second, third, fourth), _OTHERS.values(), strict=True):
            arrivals.wait_for_one_more(
                lambda client=client, other=other: client.post_json(_COMPLETIONS, other)  # type: ignore[misc]
            )
        _step_until(gate, 4)
        gate.let()
        gate.wait_until_held()
        _shows(daemon.url, "batched")

        _step_until(gate, 1)
        gate.let()
        gate.wait_until_held()
        _shows(daemon.url, "speculative")
        gate.open()

        answer = first.read_answer()
        assert _text(answer) == known.texts[name]
        assert answer.headers["x-decode-mode"] == "speculative"
        for client, other_name in zip((second, third, fourth), _OTHERS, strict=True):
            answer = client.read_answer()
            assert _text(answer) == known.texts[other_name]
            assert answer.headers["x-decode-mode"] == "batched"
        assert _accepted(daemon.url) > before
        changes = {
            mode: scrape(daemon.url, "machd_decode_mode_changes_total", mode=mode)
            for mode in ("batched", "speculative")
        }
        assert changes == {"batched": 1, "speculative": 1}
        assert scrape(daemon.url, "machd_speculation_fallbacks_total") == 0
        wait_until(lambda: scrape(daemon.url, "machd_kv_used_bytes") == 0, "nothing is left")


def test_every_place_to_join_gives_the_same(known: _Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of the first the second comes at, both are answered as alone."""
    arrivals = Arrivals(monkeypatch)
    is_held = [0]
    gate = StepGate(lambda _plan: is_held[0] > 0)
    first_body, second_body = _FIRST["seeded"], _OTHERS["third"]
    with RunningDaemon(_engine(known.oracle, gate), _SETTINGS) as daemon, gate:
        for steps in range(1, 16, 3):
            is_held[0] = steps
            with RawClient(daemon.url) as first, RawClient(daemon.url) as second:
                first.post_json(_COMPLETIONS, first_body)
                gate.wait_until_held()
                for _ in range(steps - 1):
                    gate.let()
                    gate.wait_until_held()
                arrivals.wait_for_one_more(lambda: second.post_json(_COMPLETIONS, second_body))
                is_held[0] = 0
                gate.let()
                assert _text(first.read_answer()) == known.texts["seeded"], steps
                assert _text(second.read_answer()) == known.texts["third"], steps
