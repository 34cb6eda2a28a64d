"""Latency of the answer, or of the refusal, of hostile bodies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from machd.bench.guarantees.bodies import Body
from machd.bench.guarantees.daemon import Daemon
from machd.bench.guarantees.guarantee import Obstacle


@dataclass(frozen=True, slots=True)
class Refusal:
    """Bodies sent one after the other; a try is as long as the slowest of them.

    Attributes:
        bodies_of: Bodies for a model's id.
        needs_chat: Whether they say something only of a model with a chat template.
    """

    name: str
    goal_s: float
    bodies_of: Callable[[str], list[Body]]
    needs_chat: bool = False

    async def try_once(self, subject: Daemon) -> float | Obstacle:
        """Send each body once.

        Raises:
            EngineFaultError: One of them got another status than it should.
        """
        if self.needs_chat and not subject.has_chat:
            return Obstacle("the model has no chat template")
        bodies = self.bodies_of(subject.target.model_id)
        async with aclosing(subject.connection()) as connection:
            return max([await body.send(connection, subject.clock) for body in bodies])
