"""Several servers in turns, on servers whose tempo is known."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack

import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi

from machd.errors import EngineFaultError
from machd_bench.bench import Bench, Mode
from machd_bench.connection import Address
from machd_bench.peer import Peer
from machd_bench.report import Row
from machd_bench.scenarios.peers import PEERS
from machd_bench.server import Server

ROUNDS = 3
WORD_S = 0.001


async def rows_of(first: FakeOpenAi, *others: FakeOpenAi) -> tuple[list[Row], Bench]:
    """The rows of a server against others, called A, B and so on, and the bench."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(first.running())
        peers = [
            Peer(name, await stack.enter_async_context(one.running()), "second")
            for name, one in zip("AB", others, strict=False)
        ]
        plan = dataclasses.replace(
            PLAN, concurrencies=(1, 4), peers=tuple(peers), peer_rounds=ROUNDS
        )
        server = await Server.find(Address.of(url), LoopClock())
        bench = Bench(plan, LoopClock(), Unseen(), Mode.REMOTE, server=server)
        return [row async for row in PEERS.run(bench)], bench


def prompts_of(server: FakeOpenAi) -> list[str]:
    """The prompts of full answers, in their order."""
    return [
        str(body["prompt"]) for _, body in server.asked if body["max_tokens"] == PLAN.max_tokens
    ]


@in_virtual_time
async def test_ratios_are_of_the_first_server_over_each_peer() -> None:
    """Twice and four times the time between tokens are half and a quarter of the tokens/s, however many streams run."""
    servers = [FakeOpenAi(one, word_s=one) for one in (0.01, 0.02, 0.04)]

    rows, bench = await rows_of(*servers)

    assert [row.case for row in rows] == [
        *("1 stream, the server", "1 stream, A", "1 stream, B"),
        *("4 streams, the server", "4 streams, A", "4 streams, B"),
    ]
    for row, times in zip(rows[1:3] + rows[4:], (2, 4, 2, 4), strict=True):
        for name in ("tps_p25_ratio", "tps_ratio", "tps_p75_ratio"):
            assert row.number(name) == pytest.approx(times)
        assert row.number("ttft_ratio") == pytest.approx(1 / times)
    assert "tps_ratio" not in rows[0].figures
    answers = bench.progress.answers if isinstance(bench.progress, Unseen) else 0
    assert answers == PEERS.requests(bench.plan)


@in_virtual_time
async def test_every_server_gets_the_same_prompts_in_alternating_order() -> None:
    """A prompt goes to each server once, is new in each round, and the order turns from round to round."""
    servers = [FakeOpenAi(word_s=WORD_S), FakeOpenAi(word_s=WORD_S)]
    order: list[int] = []
    for number, server in enumerate(servers):
        server.asked = _Told(order, number)

    await rows_of(*servers)

    first, second = map(prompts_of, servers)
    assert first == second
    assert len(set(first)) == ROUNDS * (1 + 4)
    assert order[: ROUNDS * 2] == [0, 1, 1, 0, 0, 1]
    assert {body["model"] for _, body in servers[1].asked} == {"second"}


class _Told(list[tuple[str, dict[str, object]]]):
    """Requests of a server, which tells its number in a list for each full one."""

    def __init__(self, order: list[int], number: int) -> None:
        super().__init__()
        self._order, self._number = order, number

    def append(self, request: tuple[str, dict[str, object]]) -> None:
        super().append(request)
        if request[1]["max_tokens"] == PLAN.max_tokens:
            self._order.append(self._number)


@in_virtual_time
async def test_tokens_are_counted_by_usage_or_else_by_events() -> None:
    """A row says which, a note names the server that does not count, and answers that end early show."""
    rows, bench = await rows_of(
        FakeOpenAi(word_s=WORD_S),
        FakeOpenAi(word_s=WORD_S, sends_usage=False, max_tokens=PLAN.max_tokens // 2),
    )

    own, peer = rows[:2]
    assert (own.figures["tokens_counted_by"], peer.figures["tokens_counted_by"]) == (
        "usage",
        "events",
    )
    assert (own.figures["given_share"], peer.figures["given_share"]) == (1.0, 0.5)
    assert peer.figures["completion_tokens"] == ROUNDS * PLAN.max_tokens // 2
    assert peer.figures["same_text_share"] == 1.0
    assert "A does not count tokens: events with text were counted" in bench.notes


@in_virtual_time
async def test_a_peer_without_completions_makes_all_requests_chats() -> None:
    """A chat template lengthens prompts, so it has to lengthen all of them."""
    first = FakeOpenAi(word_s=WORD_S)

    await rows_of(first, FakeOpenAi(word_s=WORD_S, has_completions=False))

    paths = {path for path, body in first.asked if body["max_tokens"] == PLAN.max_tokens}
    assert paths == {"/v1/chat/completions"}


@in_virtual_time
async def test_a_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    """A note says why, and no ratio is made of half of its rounds."""

    class Failing(FakeOpenAi):
        async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
            if len(self.asked) > 3:
                self.refuses = frozenset({"model"})
            await super()._answer(path, body, writer)

    rows, bench = await rows_of(
        FakeOpenAi(word_s=WORD_S), Failing(word_s=WORD_S), FakeOpenAi(word_s=WORD_S)
    )

    assert [row.case for row in rows] == [
        *("1 stream, the server", "1 stream, B", "4 streams, the server", "4 streams, B")
    ]
    assert any(note.startswith("A left out after a failure: ") for note in bench.notes)


@in_virtual_time
async def test_a_peer_that_is_not_there_is_told_by_its_name() -> None:
    """The scenario ends at once, before anything is timed."""
    async with FakeOpenAi(word_s=WORD_S).running() as url:
        server = await Server.find(Address.of(url), LoopClock())
    plan = dataclasses.replace(PLAN, peers=(Peer("gone", url, None),))
    bench = Bench(plan, LoopClock(), Unseen(), Mode.REMOTE, server=server)

    with pytest.raises(EngineFaultError, match="gone does not answer"):
        await anext(PEERS.run(bench))


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("http://h:1", Peer("h:1", "http://h:1", None)),
        ("mlx_lm=http://h:1/v1#default_model", Peer("mlx_lm", "http://h:1/v1", "default_model")),
        ("https://h/a=b#org/name", Peer("h", "https://h/a=b", "org/name")),
    ],
)
def test_a_peer_is_read_with_its_name_and_model(text: str, peer: Peer) -> None:
    """Both may be left out."""
    assert Peer.of(text) == peer


def test_a_peer_without_a_url_is_refused() -> None:
    """A host and a port alone could be anything."""
    with pytest.raises(ValueError, match="not a URL such as"):
        Peer.of("mlx_lm=localhost:18081")
