"""The load of a soak: rounds of requests of every kind, of which a third are left by their clients.

Every answer has to be whole and, where a shape was asked for, of that shape. Half of the requests
come from a fixed pool: the greedy ones among them have one right answer each, learnt from the daemon
while nothing else ran. (Sampled ones have not: 49,152 weights that are nearly equal, summed in
float32, move the drawn token to its neighbour where a batch rounds the logits in another way.) The
other half are new in each round, so that caches fill and evict.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.clients.bad_requests import BAD_REQUESTS
from support.clients.chaos_clients import Conduct, Errand, Town, answer_of, valid_requests
from support.clients.raw_client import RawAnswer
from support.clients.shaped_requests import shaped_requests
from support.clocks.polling import CEILING_S

_CHAT = "/v1/chat/completions"
_RESPONSES = "/v1/responses"
_MESSAGES = "/v1/messages"
_REFUSALS = (429, 503)
"""Statuses of a busy daemon; an answer with one has to name when to come back."""

_LEAVING_SHARE = 1 / 3
_BAD_SHARE = 0.08
_SLOW_SHARE = 0.03
_LEAVING = [one for one in Conduct if one.leaves]
_SHAPED_TOKENS = 200

Read = Callable[[RawAnswer], object]
"""What an answer says, without ids and times; raises AssertionError where it is not whole."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request, how its answer is read, and whether what was read is of the right shape."""

    path: str
    body: Mapping[str, object]
    read: Read
    is_right: Callable[[Any], bool] = lambda _said: True

    @property
    def is_greedy(self) -> bool:
        return self.body.get("temperature") == 0

    def errand(self, number: int | None = None) -> Errand:
        return Errand(self.path, json.dumps(self.body).encode(), request=number)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The ends of a round's requests.

    Attributes:
        answered: Whole answers with status 200 that were right.
        refused: Expected refusals: bad requests, and a busy daemon's.
        left: Requests whose clients left.
        wrong: What was neither, each in a line.
    """

    answered: int
    refused: int
    left: int
    wrong: tuple[str, ...]


class SoakLoad:
    """Rounds of mixed requests for one daemon, seeded."""

    def __init__(self, url: str, model: str, *, seed: int, pool_size: int = 120) -> None:
        """Prepare the pool; nothing is asked yet.

        Args:
            url: The daemon.
            model: The model's id.
            seed: Of everything that is drawn.
            pool_size: Requests with one right answer each.
        """
        self._url = url
        self._model = model
        self._rng = random.Random(seed)
        self._pool = self._requests(pool_size)
        self._right: list[object] = []
        self._bad = [self._bad_request(path, body) for path, body in _bad_bodies()]

    def learn_answers(self) -> None:
        """Ask each request of the pool while no other request runs, and remember its answer."""
        errands = [[request.errand(number)] for number, request in enumerate(self._pool)]
        pairs = self._run(errands, max_clients=1)
        for (_, answer), request in zip(pairs, self._pool, strict=True):
            assert answer is not None
            assert answer.status == 200, (request, answer)
            said = request.read(answer)
            assert request.is_right(said), (request, said)
            self._right.append(said)

    def run_round(self, count: int, *, max_clients: int) -> RoundOutcome:
        """Send so many requests, at most ``max_clients`` at once, and judge every answer."""
        new = self._requests(count // 2)
        errands = [[self._draw(new, number)] for number in range(count)]
        return self._judge(self._run(errands, max_clients=max_clients), new)

    def _run(
        self, errands: Sequence[Sequence[Errand]], *, max_clients: int
    ) -> list[tuple[Errand, RawAnswer | None]]:
        async def run() -> list[tuple[Errand, RawAnswer | None]]:
            async with asyncio.timeout(CEILING_S):
                return await Town(self._url, max_clients=max_clients).run(errands)

        return asyncio.run(run())

    def _draw(self, new: Sequence[_Request], number: int) -> Errand:
        """One of the new requests on even numbers, else one of the pool or a bad one."""
        rng = self._rng
        if rng.random() < _BAD_SHARE:
            return rng.choice(self._bad)
        if number % 2 == 0 and number // 2 < len(new):
            errand = new[number // 2].errand(-1 - number // 2)
        else:
            drawn = rng.randrange(len(self._pool))
            errand = self._pool[drawn].errand(drawn)
        draw = rng.random()
        if draw < _LEAVING_SHARE:
            return replace(
                errand,
                conduct=rng.choice(_LEAVING),
                patience=rng.random(),
                resets=rng.random() < 0.5,
            )
        if draw < _LEAVING_SHARE + _SLOW_SHARE:
            return replace(errand, conduct=Conduct.READ_SLOWLY)
        return errand

    def _judge(
        self, pairs: Sequence[tuple[Errand, RawAnswer | None]], new: Sequence[_Request]
    ) -> RoundOutcome:
        answered = refused = left = 0
        wrong: list[str] = []
        for errand, answer in pairs:
            if answer is None:
                left += 1
            elif answer.status == errand.status == 200:
                mistake = self._mistake(errand, answer, new)
                answered += mistake is None
                wrong += [] if mistake is None else [mistake]
            elif answer.status == errand.status or _is_busy(answer):
                refused += 1
            else:
                wrong.append(
                    f"{errand.path}: {answer.status} in place of {errand.status}: {answer}"
                )
        return RoundOutcome(answered, refused, left, tuple(wrong))

    def _mistake(self, errand: Errand, answer: RawAnswer, new: Sequence[_Request]) -> str | None:
        number = errand.request
        assert number is not None, "a bad request has another status"
        request = self._pool[number] if number >= 0 else new[-1 - number]
        try:
            said = request.read(answer)
        except (AssertionError, LookupError, ValueError) as error:
            return f"{errand.path}: not whole ({error!r}): {answer}"
        if not request.is_right(said):
            return f"{errand.path}: not of the shape: {errand.body!r} {said!r}"
        if number >= 0 and request.is_greedy and said != self._right[number]:
            return f"{errand.path}: {errand.body!r} {said!r} in place of {self._right[number]!r}"
        return None

    def _requests(self, count: int) -> list[_Request]:
        """Half plain ones, a quarter with shapes, and the rest of the other dialects."""
        rng = self._rng
        plain = [
            _Request(path, {**body, "model": self._model}, answer_of)
            for path, body in valid_requests(count // 2, rng)
        ]
        shaped = [
            _Request(one.path, {"model": self._model, **one.body}, answer_of, _shape(one.has_shape))
            for one in shaped_requests(count // 4, rng, max_tokens=_SHAPED_TOKENS)
        ]
        kinds = (self._response, self._message, self._tool_call, self._logprobs)
        rest = range(count - len(plain) - len(shaped))
        return [*plain, *shaped, *(kinds[number % len(kinds)]() for number in rest)]

    def _seeded(self) -> dict[str, object]:
        return {"model": self._model, "temperature": self._rng.choice((0.0, 0.8))}

    def _words(self) -> str:
        return "".join(self._rng.choices("etaoin shrdlu", k=self._rng.choice((5, 40, 300))))

    def _response(self) -> _Request:
        body = {"model": self._model, "temperature": 0.0, "input": self._words()}
        limits = {"max_output_tokens": self._rng.choice((4, 16)), "store": self._rng.random() < 0.7}
        stream = {"stream": self._rng.random() < 0.5}
        return _Request(_RESPONSES, {**body, **limits, **stream}, _response_text)

    def _message(self) -> _Request:
        turns = [{"role": "user", "content": self._words()}]
        body = {"model": self._model, "temperature": 0.0, "messages": turns, "max_tokens": 12}
        return _Request(_MESSAGES, body, _message_text)

    def _tool_call(self) -> _Request:
        name = f"look_up_{self._rng.randrange(40)}"
        properties = {"count": {"type": "integer", "minimum": 0, "maximum": 99}}
        schema = {"type": "object", "properties": properties, "required": ["count"]}
        function = {"name": name, "parameters": {**schema, "additionalProperties": False}}
        body = {
            **self._seeded(),
            "seed": self._rng.randrange(2**31),
            "messages": [{"role": "user", "content": self._words()}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": name}},
            "max_tokens": _SHAPED_TOKENS,
        }
        return _Request(_CHAT, body, _called, lambda calls: calls[0][0] == name)

    def _logprobs(self) -> _Request:
        body = {
            **self._seeded(),
            "seed": self._rng.randrange(2**31),
            "messages": [{"role": "user", "content": self._words()}],
            "logprobs": True,
            "top_logprobs": self._rng.choice((0, 3, 20)),
            "max_tokens": 8,
            "stream": self._rng.random() < 0.5,
        }
        return _Request(_CHAT, body, answer_of)

    def _bad_request(self, path: str, body: bytes) -> Errand:
        model = json.dumps(self._model).encode()
        return Errand(path, body.replace(b'"fake"', model), status=400)


def _bad_bodies() -> list[tuple[str, bytes]]:
    return [(one.path, one.body) for one in BAD_REQUESTS if len(one.body) < 20_000]


def _is_busy(answer: RawAnswer) -> bool:
    return answer.status in _REFUSALS and "retry-after" in answer.headers


def _shape(has_shape: Callable[[str], bool]) -> Callable[[Any], bool]:
    """Return whether every choice that was not cut by its number of tokens has the shape."""
    return lambda said: all(reason == "length" or has_shape(text) for text, reason in said)


def _events(answer: RawAnswer) -> list[dict[str, Any]]:
    lines = answer.body.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def _is_stream(answer: RawAnswer) -> bool:
    return answer.headers["content-type"].startswith("text/event-stream")


def _response_text(answer: RawAnswer) -> object:
    body = _events(answer)[-1]["response"] if _is_stream(answer) else answer.json()
    assert body["status"] in ("completed", "incomplete"), body
    texts = [part["text"] for item in body["output"] for part in item["content"]]
    return tuple(texts), body["status"]


def _message_text(answer: RawAnswer) -> object:
    body = answer.json()
    return tuple(block["text"] for block in body["content"]), body["stop_reason"]


def _called(answer: RawAnswer) -> object:
    (choice,) = answer.json()["choices"]
    calls = choice["message"]["tool_calls"]
    return [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
