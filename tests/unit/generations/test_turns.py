"""Clients take turns in rotation."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from machd.generations.turns import Turns

_WAIT_S = 3600.0


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_client_with_many_requests_delays_another_by_one() -> None:
    """Its requests that wait come one by one, and the other client's first comes after the first of them."""
    turns, order = Turns(1), list[str]()

    async def take(client: str) -> None:
        async with turns.of(client, wait_s=_WAIT_S):
            order.append(client)
            await asyncio.sleep(0)

    async with turns.of("many", wait_s=_WAIT_S):
        clients = [*["many"] * 5, "one", "other", "one"]
        tasks = [asyncio.create_task(take(client)) for client in clients]
        await _settle()
    await asyncio.gather(*tasks)
    assert order == ["many", "one", "other", "many", "one", *["many"] * 3]


async def test_a_request_that_gives_up_takes_no_turn() -> None:
    """Neither while it waits, nor in the moment in which its turn comes."""
    turns = Turns(1)
    holder = turns.of("a", wait_s=_WAIT_S)
    await holder.__aenter__()

    async def take(client: str) -> str:
        async with turns.of(client, wait_s=_WAIT_S):
            return client

    waiting = [asyncio.create_task(take(client)) for client in "bcd"]
    await _settle()
    waiting[0].cancel()
    await _settle()
    await holder.__aexit__(None, None, None)
    waiting[1].cancel()  # its turn has come, and it has not run yet
    assert await asyncio.wait_for(waiting[2], timeout=_WAIT_S) == "d"


async def test_a_wait_ends_in_time() -> None:
    """The error is a timeout, and the turn that is held comes back."""
    turns = Turns(1)
    async with turns.of("a", wait_s=_WAIT_S):
        with pytest.raises(TimeoutError):
            async with turns.of("b", wait_s=0.001):
                raise AssertionError("there is no turn")
    async with turns.of("b", wait_s=0.001):
        pass


@pytest.mark.parametrize("seed", range(30))
async def test_turns_are_never_lost_and_never_too_many(seed: int) -> None:
    """Of generated clients that come, give up and end, at most so many hold a turn, and at the end all are free."""
    source = random.Random(seed)
    count = source.randint(1, 3)
    turns, held, done = Turns(count), 0, Counter[str]()

    async def take(client: str, steps: int) -> None:
        nonlocal held
        async with turns.of(client, wait_s=_WAIT_S):
            held += 1
            assert held <= count
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
            finally:
                held -= 1
        done[client] += 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(60):
        tasks.append(asyncio.create_task(take(source.choice("abc"), source.randint(0, 4))))
        if source.random() < 0.4:
            source.choice(tasks).cancel()
        for _ in range(source.randint(0, 3)):
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(one is None or isinstance(one, asyncio.CancelledError) for one in results)
    assert held == 0
    assert turns._free == count
    assert not turns._waiting
