"""A daemon that several ranks are, as a client sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Protocol

import httpx

from support.clocks.polling import CEILING_S, wait_until
from support.ranks.launched_ranks import free_ports


class Ranks(Protocol):
    """Running ranks, or what has launched them."""

    def poll(self) -> int | None:
        """Return an exit code as soon as one of them has ended."""


class RanksDaemon:
    """A daemon of several ranks: what each of them is started with, and the address of rank 0."""

    def __init__(self, checkpoint: Path) -> None:
        """Choose free ports; nothing runs yet."""
        self.port, self.admin_port = free_ports(1), free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.machd_arguments = [
            *("serve", str(checkpoint), "--port", str(self.port)),
            *("--admin-listen", f"127.0.0.1:{self.admin_port}", "--probe-on-start", "off"),
            *("--continuous-batching-enabled",),
        ]
        self.arguments = ["-m", "machd", *self.machd_arguments]

    @property
    def is_ready(self) -> bool:
        """Return whether rank 0 takes requests."""
        try:
            return httpx.get(f"{self.url}/health/ready").is_success
        except httpx.HTTPError:
            return False

    def wait_until_ready(self, ranks: Ranks, log: Path) -> None:
        """Wait until rank 0 takes requests.

        Raises:
            AssertionError: The ranks ended before, or are not ready in time. It says what they logged.
        """
        wait_until(
            lambda: ranks.poll() is not None or self.is_ready,
            "the daemon is ready",
            seen=log.read_text,
        )
        assert ranks.poll() is None, f"the ranks ended before they were ready: {log.read_text()}"

    @property
    def live_status(self) -> int | None:
        """Status of the liveness endpoint; None while there is no answer."""
        try:
            return httpx.get(f"{self.url}/health/live").status_code
        except httpx.HTTPError:
            return None

    def ask(self, *, max_tokens: int) -> httpx.Response:
        """Complete a prompt."""
        body = self.body(max_tokens=max_tokens)
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=CEILING_S)

    def lose_rank(self, rank_pid: int) -> str:
        """Kill a rank in the middle of a stream; returns the stream's rest."""
        url, body = f"{self.url}/v1/completions", self.body(max_tokens=8000)
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=CEILING_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(rank_pid, signal.SIGKILL)
            return "".join(lines)

    @staticmethod
    def body(*, max_tokens: int) -> dict[str, object]:
        """Return the body of a completion."""
        return {
            "model": "tiny",
            "prompt": "one two three",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
