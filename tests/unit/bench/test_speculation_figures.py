"""What the figures make of answers with guesses and without."""

from __future__ import annotations

import dataclasses

import pytest
from support.clocks.virtual_time import LoopClock, in_virtual_time
from unit.bench.speculating_openai import SpeculatingOpenAi
from unit.bench.speculation_samples import COUNTERS, made_decode, made_pair, made_speculation

from machd.bench.connection import ServerAddress
from machd.bench.goal import Verdict
from machd.bench.speculation.counters import DraftCounters
from machd.bench.speculation.figures import GuessFigures, Spread, WorkloadFigures
from machd.bench.speculation.pairs import Pair, run_round
from machd.bench.speculation.plan import SpeculationPlan
from machd.bench.speculation.server import SpeculatingServer
from machd.bench.speculation.workloads import PROMPTS, Copying
from machd.errors import EngineFaultError

QUOTE, STORY = PROMPTS[:2]
PLAN = SpeculationPlan(tokens=24, rounds=2, prompts=(QUOTE, STORY, PROMPTS[-1]))


async def found(url: str) -> SpeculatingServer:
    """The server at a URL."""
    return await SpeculatingServer.find(ServerAddress.of(url), clock=LoopClock())


async def rounds_of(off: SpeculatingOpenAi, on: SpeculatingOpenAi) -> list[Pair]:
    """Two rounds of three prompts."""
    answered: list[None] = []
    async with off.running() as off_url, on.running() as on_url:
        servers = await found(off_url), await found(on_url)
        pairs: list[Pair] = []
        for number in range(PLAN.rounds):
            pairs += await run_round(
                *servers, PLAN, number, on_answer=lambda: answered.append(None)
            )
    assert len(answered) == PLAN.requests == 12
    return pairs


@in_virtual_time
async def test_guesses_are_counted_and_timed() -> None:
    """Of 24 tokens in passes of 4, the first pass counts with neither its tokens nor its time."""
    off = SpeculatingOpenAi(step_s=0.01)
    on = SpeculatingOpenAi(step_s=0.01, guesses=5, right=3)
    pairs = await rounds_of(off, on)

    figures = WorkloadFigures.of(Copying.QUOTE, [one for one in pairs if one.prompt != PROMPTS[-1]])
    assert [one.off.decoded_tokens for one in pairs] == [23] * 6
    assert [one.on.decoded_tokens for one in pairs] == [20] * 6
    assert 2.0 < figures.ratio.p50 < 6.0
    assert (figures.pairs, figures.completion_tokens) == (4, 4 * 24)
    assert figures.different_texts == 0
    guesses = figures.guesses
    assert guesses is not None
    assert (guesses.drafted_tokens, guesses.accepted_tokens) == (4 * 6 * 5, 4 * 6 * 3)
    assert (guesses.cycles, guesses.fallbacks) == (24, 0)
    assert guesses.acceptance_by_position == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert guesses.tokens_per_pass == 4.0
    assert [one.prompt for one in figures.prompts] == ["letter", "story"]


@in_virtual_time
async def test_both_are_asked_first_equally_often() -> None:
    """In turns, and the other way round in the next round: whoever is second finds a warm machine."""
    order: list[str] = []

    @dataclasses.dataclass
    class Noting(SpeculatingOpenAi):
        name: str = ""

        async def _stream(self, *args: object, **named: object) -> None:
            order.append(self.name)
            await super()._stream(*args, **named)  # type: ignore[arg-type]

    await rounds_of(Noting(step_s=0.001, name="A"), Noting(step_s=0.001, name="B"))

    assert "".join(order[-12:]) == "ABBAAB" + "BAABBA"


@in_virtual_time
async def test_messages_are_chats_of_a_fixed_length() -> None:
    """Greedy, as long in both, with the end of text ignored."""
    server = SpeculatingOpenAi(step_s=0.001)
    await rounds_of(server, SpeculatingOpenAi(step_s=0.001))

    path, fields = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert fields["messages"] == [{"role": "user", "content": PROMPTS[-1].text}]
    assert (fields["temperature"], fields["max_tokens"], fields["ignore_eos"]) == (0, 24, True)


@in_virtual_time
async def test_a_model_without_a_template_completes() -> None:
    """The message is then the text that is to go on."""

    class Untemplated(SpeculatingOpenAi):
        async def _answer(self, path: str, body: bytes, writer: object) -> None:
            known = path.replace("/chat/", "/unknown/") if "/chat/" in path else path
            if known != path:
                known = "/llm/none"
            await super()._answer(known, body, writer)  # type: ignore[arg-type]

    async with Untemplated(step_s=0.001).running() as url:
        server = await found(url)
        decode = await server.decode(QUOTE.text, 8)

    assert not server.target.dialect.is_chat
    assert decode.timing.completion_tokens == 8


@in_virtual_time
async def test_a_server_that_does_not_count_is_timed_all_the_same() -> None:
    """No guesses in the figures, and one token at an answer's first moment."""
    quiet = SpeculatingOpenAi(step_s=0.002, guesses=3, right=3, counts=False, has_tokens=False)
    pairs = await rounds_of(SpeculatingOpenAi(step_s=0.002), quiet)

    figures = WorkloadFigures.of(Copying.QUOTE, pairs)
    assert figures.guesses is None
    assert all(one.guesses is None for one in figures.prompts)
    assert [one.on.decoded_tokens for one in pairs] == [23] * 6


@in_virtual_time
async def test_other_texts_are_told() -> None:
    """A daemon that answers something else when it guesses is faster for nothing."""
    pairs = await rounds_of(
        SpeculatingOpenAi(step_s=0.001), SpeculatingOpenAi(step_s=0.001, word="v")
    )

    assert WorkloadFigures.of(Copying.QUOTE, pairs).different_texts == 6


@in_virtual_time
async def test_an_answer_in_one_piece_has_no_speed() -> None:
    """It is told what to ask for instead of dividing by nothing."""
    async with SpeculatingOpenAi(step_s=0.001, guesses=40, right=39).running() as url:
        server = await found(url)
        with pytest.raises(EngineFaultError, match="--speculation-tokens"):
            await server.decode(QUOTE.text, 24)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((2.5, 2.6, 2.7), Verdict.PASS),
        ((2.4, 2.6, 2.7, 2.8, 2.9), Verdict.PASS),
        ((2.0, 2.4, 2.6), Verdict.NOT_SHOWN),
        ((2.4, 2.5, 2.6), Verdict.NOT_SHOWN),
        ((2.0, 2.3, 2.49), Verdict.MISSED),
        ((0.9, 1.0, 1.1, 1.2, 9.0), Verdict.MISSED),
        ((3.0, 3.1), Verdict.NOT_SHOWN),
        ((1.0,), Verdict.NOT_SHOWN),
    ],
)
def test_a_goal_is_reached_where_rounds_agree(ratios: tuple[float, ...], verdict: Verdict) -> None:
    """Both quartiles are on its side; fewer than three rounds show nothing."""
    assert Spread.of(ratios).verdict(2.5, len(ratios)) is verdict


def test_rounds_are_compared_with_themselves() -> None:
    """A machine that is half as fast in one round changes no ratio."""
    pairs = [
        made_pair(QUOTE, number, 2.0, gap_s=gap_s) for number, gap_s in enumerate((0.1, 0.2, 0.1))
    ]
    figures = WorkloadFigures.of(Copying.QUOTE, pairs)

    assert figures.ratio == Spread(p25=2.0, p50=2.0, p75=2.0)
    assert figures.off_tps.p50 == pytest.approx(10)
    assert figures.on_tps.p25 == pytest.approx(15)
    assert figures.verdict is Verdict.MISSED


def test_prompts_of_a_round_count_by_their_time() -> None:
    """A round's tokens/s are those of all its answers together, not the mean of theirs."""
    pairs = [made_pair(QUOTE, 0, 4.0), made_pair(STORY, 0, 1.0)]
    figures = WorkloadFigures.of(Copying.QUOTE, pairs)

    assert figures.ratio.p50 == pytest.approx(2 / (1 / 4 + 1))
    assert [one.ratio for one in figures.prompts] == pytest.approx([4.0, 1.0])


def test_tokens_a_pass_count_passes_without_guesses() -> None:
    """65 tokens of which 45 were guessed right took 20 passes, whatever verified them."""
    guesses = GuessFigures.of(COUNTERS, 65)
    assert guesses.tokens_per_pass == 65 / 20
    assert guesses.acceptance == 0.75
    assert guesses.acceptance_by_position == pytest.approx([0.9, 8 / 9, 0.75])

    nothing = GuessFigures.of(DraftCounters(0, 0, {1: 0}, {1: 0}, 0, 0), 65)
    assert (nothing.tokens_per_pass, nothing.acceptance) == (1.0, None)
    assert nothing.acceptance_by_position == []


def test_the_whole_is_told_by_workload() -> None:
    """In their order, each with its own goal."""
    figures = made_speculation()

    assert [one.workload.value for one in figures.workloads] == ["quote", "edit", "prose"]
    assert [one.goal for one in figures.workloads] == [2.5, 1.6, 0.98]
    assert [one.verdict for one in figures.workloads] == [
        *(Verdict.PASS, Verdict.MISSED, Verdict.PASS)
    ]
    assert made_decode(0.1).decode_s == pytest.approx(6.4)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda one: f"{one.copying.value}-{one.name}")
def test_prompts_are_there_and_long_enough(prompt: object) -> None:
    """What is copied has more words than an answer has tokens; prose has nothing to copy."""
    assert prompt in PROMPTS
    for one in PROMPTS:
        words = len(one.text.split())
        assert words < 20 if one.copying is Copying.PROSE else words > 45
