"""machd and other servers on one machine, in turns: the same prompts, as many streams, round by round.

All servers run all the time. In each round every server gets the same prompts, one after the other, forwards in one round
and backwards in the next, so that a machine whose speed drifts slows all of them. Prompts are new in each
round: nothing is measured that a cache remembers. Ratios are of one round, machd's figure over the peer's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from machd.errors import EngineFaultError
from machd_bench.answer import Answer, all_gaps_s, tokens_per_second
from machd_bench.bench import Bench, together
from machd_bench.connection import Address
from machd_bench.peer import Peer
from machd_bench.prompts import Prompt
from machd_bench.report import Figure, Row, percentiles
from machd_bench.scenario import BATCHED, Scenario
from machd_bench.server import Server

_WARM_UP_PROMPT_TOKENS = 8
_WARM_UP_TOKENS = 3


@dataclass(slots=True)
class Contender:
    """One of the servers.

    Attributes:
        rounds: Its answers at the present number of streams.
        fault: Why it is not asked any more.
    """

    name: str
    server: Server
    rounds: list[list[Answer]] = field(default_factory=list)
    fault: str | None = None

    async def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        """Send all prompts at once; a failure is kept in ``fault``, and gives no answers."""
        try:
            return await together(self.server.ask(one, max_tokens) for one in prompts)
        except EngineFaultError as error:
            self.fault = error.message
            return []


def contender_row(streams: int, one: Contender, first: Contender, asked_tokens: int) -> Row:
    """Sum up a server's rounds; ratios are those of ``first`` over it, and null for itself.

    Args:
        streams: Requests that were open at once.
        one: The server.
        first: machd; it has as many rounds.
        asked_tokens: What each answer should have had.
    """
    tps = [tokens_per_second(answers) for answers in one.rounds]
    answers = [answer for answers in one.rounds for answer in answers]
    counted = {answer.is_counted for answer in answers}
    figures: dict[str, Figure] = {
        "server": one.name,
        "streams": streams,
        "rounds": len(one.rounds),
        "tps": float(np.median(tps)),
        **percentiles("ttft", (answer.ttft_s for answer in answers)),
        **percentiles("gap", all_gaps_s(answers)),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
        "given_share": sum(answer.completion_tokens for answer in answers)
        / (asked_tokens * len(answers)),
        "tokens_counted_by": "usage" if counted == {True} else "events",
    }
    if one is not first:
        pairs = list(zip(first.rounds, one.rounds, strict=True))
        figures |= _quartiles(
            "tps", [tokens_per_second(a) / tokens_per_second(b) for a, b in pairs]
        )
        figures |= _quartiles("ttft", [_median_ttft_s(a) / _median_ttft_s(b) for a, b in pairs])
        both = [both for a, b in pairs for both in zip(a, b, strict=True)]
        figures["same_text_share"] = sum(_is_same(*pair) for pair in both) / len(both)
    return Row(
        case=f"{streams} stream{'s' * (streams > 1)}, {one.name}",
        figures=figures,
        samples={"round_tps": tps},
    )


def _quartiles(name: str, ratios: Sequence[float]) -> dict[str, Figure]:
    first, median, third = np.percentile(ratios, (25, 50, 75)).tolist()
    return {f"{name}_p25_ratio": first, f"{name}_ratio": median, f"{name}_p75_ratio": third}


def _median_ttft_s(answers: Sequence[Answer]) -> float:
    return float(np.median([one.ttft_s for one in answers]))


def _is_same(one: Answer, other: Answer) -> bool:
    """Compare texts as far as both go: a server that does not know ``ignore_eos`` may end early."""
    length = min(len(one.text.strip()), len(other.text.strip()))
    return one.text.strip()[:length] == other.text.strip()[:length]


async def _found(bench: Bench, peers: Sequence[Peer]) -> list[Contender]:
    """Get to know all servers, the bench's own first, and let all be asked in one way.

    Raises:
        EngineFaultError: A peer does not answer, or not as a server of this API.
    """
    assert isinstance(bench.server, Server), "no mode of this scenario is without one"
    own = "machd" if bench.server.capabilities else "the server"
    contenders = [Contender(own, bench.server)]
    for peer in peers:
        try:
            found = await Server.find(Address.of(peer.url), bench.clock, model_id=peer.model_id)
        except OSError as error:
            raise EngineFaultError(f"{peer.name} does not answer: {error}") from error
        contenders.append(Contender(peer.name, found))
    if any(
        one.server.dialect.is_chat for one in contenders
    ):  # a template's tokens are for all then
        for one in contenders:
            dialect = replace(one.server.dialect, is_chat=True)
            one.server = replace(one.server, dialect=dialect)
    return contenders


async def _take_turns(bench: Bench, contenders: Sequence[Contender], streams: int) -> None:
    """Ask every server in every round, once each of them has run so many streams."""
    plan = bench.plan
    for one in contenders:
        one.rounds = []
        warm_up = bench.prompts(f"peers-warm-up-{streams}", streams, _WARM_UP_PROMPT_TOKENS)
        await one.ask(warm_up, _WARM_UP_TOKENS)
    for number in range(plan.peer_rounds):
        bench.progress.say(f"{streams} streams, round {number + 1} of {plan.peer_rounds}")
        prompts = bench.prompts(f"peers-{streams}-{number}", streams)
        able = [one for one in contenders if one.fault is None]
        for one in reversed(able) if number % 2 else able:
            if answers := await one.ask(prompts, plan.max_tokens):
                one.rounds.append(answers)
            bench.progress.advance(streams)


async def _peers(bench: Bench) -> AsyncGenerator[Row]:
    contenders = await _found(bench, bench.plan.peers)
    for streams in bench.plan.concurrencies:
        await _take_turns(bench, contenders, streams)
        if contenders[0].fault is not None:
            raise EngineFaultError(contenders[0].fault)
        for one in contenders:
            if one.fault is None:
                yield contender_row(streams, one, contenders[0], bench.plan.max_tokens)
    bench.notes.extend(_notes(contenders))


def _notes(contenders: Sequence[Contender]) -> list[str]:
    """Tell what is not alike between servers."""
    return [
        *(f"{one.name} left out after a failure: {one.fault}" for one in contenders if one.fault),
        *(
            f"{one.name} does not take ignore_eos: its answers may have ended early"
            for one in contenders
            if not one.server.dialect.ignores_eos
        ),
        *(
            f"{one.name} does not count tokens: events with text were counted"
            for one in contenders
            if one.rounds and not one.rounds[0][0].is_counted
        ),
    ]


PEERS = Scenario(
    name="peers",
    about="servers in turns with the same prompts; ratios are machd's figure over theirs",
    run=_peers,
    modes=BATCHED,
    columns=(
        *("tps", "tps_p25_ratio", "tps_ratio", "tps_p75_ratio"),
        *("ttft_p50_s", "ttft_ratio", "given_share"),
    ),
    streams=lambda plan: max(plan.concurrencies),
    requests=lambda plan: (1 + len(plan.peers)) * plan.peer_rounds * sum(plan.concurrencies),
    has_goal=False,
)
