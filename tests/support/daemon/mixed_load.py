"""Clients of every kind on one daemon until told to stop: some read to the end, some disconnect, many come at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import httpx

from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S
from support.engines.dialogue import chat, completion

_PATH = "/v1/completions"


class MixedLoad:
    """A context manager: inside it there is always somebody who asks.

    Two stream whole answers, one says and stores responses, one leaves in the middle of every
    answer, and twice a second a crowd asks the same thing at once, of whom some are turned away
    where the queue is short. No answer is looked at: faults are part of it.
    """

    def __init__(self, url: str, *, model: str = "fake", crowd: int = 16) -> None:
        """Prepare for a daemon."""
        self._url = url
        self._model = model
        self._crowd = crowd
        self._stop = threading.Event()
        self._clients = ThreadPoolExecutor(5 + crowd)
        self._number = itertools.count()

    def __enter__(self) -> Self:
        """Begin."""
        for client in (self._stream, self._stream, self._respond, self._leave, self._gather):
            self._clients.submit(self._repeat, client)
        return self

    def __exit__(self, *_: object) -> None:
        """Let everyone finish."""
        self._stop.set()
        self._clients.shutdown(cancel_futures=True)

    def _repeat(self, client: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                client()
            except (httpx.HTTPError, OSError, AssertionError):
                self._stop.wait(0.05)  # told to come back later, or cut off by a fault

    def _body(self, **fields: object) -> dict[str, object]:
        prompt = f"question {next(self._number)} " * 4
        body = completion(prompt, max_tokens=40, temperature=0, ignore_eos=True)
        return body | {"model": self._model} | fields

    def _stream(self) -> None:
        httpx.post(
            self._url + _PATH, json=self._body(stream=True), timeout=CEILING_S
        ).raise_for_status()

    def _respond(self) -> None:
        if next(self._number) % 2:
            body = chat("hi", max_tokens=10) | {"model": self._model}
            httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=CEILING_S)
        else:
            body = {"model": self._model, "input": "hi", "max_output_tokens": 16}
            httpx.post(f"{self._url}/v1/responses", json=body, timeout=CEILING_S)
        self._stop.wait(0.1)

    def _leave(self) -> None:
        with RawClient(self._url) as client:
            client.post_json(_PATH, self._body(stream=True, max_tokens=400))
            # A refused request has no event, and its connection stays open.
            if client.read_until(b"\r\n").startswith(b"HTTP/1.1 200"):
                client.read_until(b"data: ")
            client.reset()
        self._stop.wait(0.2)

    def _gather(self) -> None:
        body = self._body(max_tokens=8)
        alike = [body] * (self._crowd // 4)
        others = [self._body(max_tokens=8) for _ in range(self._crowd - len(alike))]
        for one in alike + others:
            self._clients.submit(httpx.post, self._url + _PATH, json=one, timeout=CEILING_S)
        self._stop.wait(0.5)
