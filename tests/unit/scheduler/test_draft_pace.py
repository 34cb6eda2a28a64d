"""Drafts where they pay, and never more than 2 % lost where they do not: simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.engine.protocol.step import Lane
from machd.engine.step.span_choice import Offer, worthwhile_tokens
from machd.scheduler import draft_balance
from machd.scheduler.draft_balance import Acceptance, DraftBalance
from machd.scheduler.pacing import StepPace

MAX_TOKENS = 8

KNOWN, NOISY, COLD = 0.6, 1.5, 3.5
"""Passes that may be lost beyond the 2 %: the first balance and rounding; with noise; and once in a
daemon's life, before the machine is known. Of 1,000 random machines with noise 998 stay under the second, and all under
the third."""


@dataclass(frozen=True)
class Machine:
    """True cost of a pass; ``step_s`` is added to every pass over more than one token of each row."""

    pass_s: float
    token_s: float
    step_s: float = 0.0

    def cost_s(self, rows: int, tokens: int) -> float:
        """Duration of a pass over so many tokens of each row."""
        return self.pass_s + self.token_s * rows * tokens + self.step_s * (tokens > 1)

    def best_speed(self, draft_s: float = 0.0) -> float:
        """Gain of a lone row whose drafts are all right."""
        return max(
            (1 + ahead) * self.cost_s(1, 1) / (self.cost_s(1, 1 + ahead) + ahead * draft_s)
            for ahead in range(MAX_TOKENS + 1)
        )


MACHINES = {
    "cpu": Machine(0.052, 0.0026),
    "a jump at two": Machine(0.052, 0.0026, 0.012),
    "gpu": Machine(0.010, 0.0001),
    "every token a pass": Machine(0.0, 0.02),
}

Verdict = Callable[["Row", int], int]
"""A row and its number of drafts to the number of right ones."""


class Row:
    """A row and the pace that it runs under."""

    def __init__(self, pace: StepPace) -> None:
        self.pace = pace
        self.acceptance = Acceptance()


def nothing(row: Row, drafted: int) -> int:
    """Never right."""
    del row, drafted
    return 0


def everything(row: Row, drafted: int) -> int:
    """Always right."""
    del row
    return drafted


def bait(row: Row, drafted: int) -> int:
    """Fill the balance whenever it is low and spend it whenever it is high."""
    return drafted if row.pace.drafts.passes < 0.2 else 0


@dataclass
class Run:
    """Rows that decode together on a machine, and the time they took."""

    machine: Machine
    pace: StepPace
    noise: Random | None = None
    draft_s: float = 0.0
    offer: Callable[[int], int] = field(default=lambda wanted: wanted)
    taken_s: float = 0.0
    passes: int = 0
    drafted: int = 0

    def rows(self, *verdicts: Verdict) -> dict[Row, Verdict]:
        """Open a row for each verdict."""
        return {Row(self.pace): verdict for verdict in verdicts}

    def go(self, rows: Mapping[Row, Verdict], count: int) -> dict[Row, int]:
        """Decode until each row has ``count`` tokens; returns each row's tokens."""
        said = dict.fromkeys(rows, 0)
        while min(said.values()) < count:
            self.step(rows, said)
        return said

    def speed(self, rows: Mapping[Row, Verdict], count: int) -> float:
        """Decode, and return how many times as fast as plain decoding that was."""
        before_s = self.taken_s
        said = self.go(rows, count)
        plain_s = self.machine.cost_s(len(rows), 1) / len(rows)
        return sum(said.values()) * plain_s / (self.taken_s - before_s)

    def step(self, rows: Mapping[Row, Verdict], said: dict[Row, int]) -> None:
        """Run one step as the scheduler and the engine do."""
        width, every = len(rows), list(rows)
        allowed = self.pace.draft_tokens(Lane.BATCH, width, MAX_TOKENS)
        cost = self.pace.span_cost(Lane.BATCH, width)
        drafting_s, offers = 0.0, []
        for row in every:
            wanted = allowed
            if wanted and self.draft_s:
                wanted = worthwhile_tokens([Offer(0, wanted, row.acceptance.rate)], cost)
            offered = min(wanted, self.offer(wanted)) if wanted else 0
            drafting_s += self.draft_s * offered
            offers.append(Offer(0, offered, row.acceptance.rate))
        ahead = worthwhile_tokens(offers, cost)
        accepted_tokens = longest = 0
        for row, offer in zip(every, offers, strict=True):
            drafted = min(offer.draft_tokens, ahead)
            accepted = rows[row](row, drafted) if drafted else 0
            if drafted:
                row.acceptance.observe(drafted, accepted)
            else:
                row.acceptance.fade()
            said[row] += 1 + accepted
            accepted_tokens += accepted
            longest = max(longest, drafted)
            self.drafted += drafted
        cost_s = self.machine.cost_s(width, 1 + longest) + drafting_s
        self.taken_s += cost_s
        self.passes += 1
        self.pace.observe(
            Lane.BATCH,
            width,
            duration_s=self._measured(cost_s),
            ahead_tokens=longest,
            accepted_tokens=accepted_tokens,
        )

    def _measured(self, duration_s: float) -> float:
        if self.noise is None:
            return duration_s
        hiccup = 3.0 if self.noise.random() < 0.03 else 1.0
        return duration_s * hiccup * self.noise.lognormvariate(0.0, 0.1)


def new_pace() -> StepPace:
    """A pace without measurements."""
    return StepPace(beside_decode=None)


def lost_passes(run: Run, said: Mapping[Row, int]) -> float:
    """Passes over one token of each row that a run took beyond 1.02 times plain decoding."""
    rows = len(said)
    plain_s = run.machine.cost_s(rows, 1)
    return (run.taken_s - 1.02 * sum(said.values()) / rows * plain_s) / plain_s


def warmed(machine: Machine, rows: int = 1) -> StepPace:
    """A pace that knows the machine and has its first balance."""
    pace = new_pace()
    for ahead in [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8] * 4:
        duration_s = machine.cost_s(rows, 1 + ahead)
        pace.observe(Lane.BATCH, rows, duration_s=duration_s, ahead_tokens=ahead)
    pace.drafts.passes = draft_balance._FIRST_PASSES
    return pace


def random_verdict(seed: int, rate: float) -> Verdict:
    """Right this often."""
    random = Random(seed)

    def judge(row: Row, drafted: int) -> int:
        del row
        return next((i for i in range(drafted) if random.random() >= rate), drafted)

    return judge


def alternating(length: int) -> Verdict:
    """So many verdicts wrong, then so many right."""
    calls = 0

    def judge(row: Row, drafted: int) -> int:
        nonlocal calls
        del row
        calls += 1
        return drafted if calls // length % 2 else 0

    return judge


def random_offer(seed: int) -> Callable[[int], int]:
    """A proposer that finds any number of the tokens it is asked for."""
    random = Random(seed)
    return lambda wanted: random.randint(0, wanted)


machines = st.sampled_from(sorted(MACHINES))
seeds = st.integers(0, 2**32)
verdicts = st.one_of(
    st.sampled_from([nothing, everything, bait]),
    st.builds(random_verdict, seeds, st.floats(0.0, 1.0)),
    st.builds(alternating, st.integers(1, 200)),
)
offers = st.one_of(st.just(lambda wanted: wanted), st.builds(random_offer, seeds))
counts = st.integers(20, 500)


@settings(deadline=None)
@given(machines, verdicts, offers, counts)
def test_draft_pace_never_loses_more_than_promised(
    name: str, verdict: Verdict, offer: Callable[[int], int], count: int
) -> None:
    """On a known machine a row takes at most 1.02 times plain decoding and half a pass."""
    machine = MACHINES[name]
    run = Run(machine, warmed(machine), offer=offer)
    assert lost_passes(run, run.go(run.rows(verdict), count)) <= KNOWN


def noisy_run(pace: Callable[[Machine], StepPace], seed: int) -> float:
    """Return what a drawn run loses on a machine whose durations vary.

    Noise has no worst case: one run in thousands loses more than is asserted. So the draws are the same every time, which
    those of Hypothesis are not: it draws constants of all modules that are loaded, too.
    """
    dice = Random(seed)
    machine = MACHINES[dice.choice(sorted(MACHINES))]
    verdict = dice.choice(
        [
            nothing,
            everything,
            bait,
            *(random_verdict(dice.getrandbits(32), dice.random()) for _ in range(3)),
            *(alternating(dice.randint(1, 200)) for _ in range(3)),
        ]
    )
    offer = dice.choice([lambda wanted: wanted, random_offer(dice.getrandbits(32))])
    run = Run(machine, pace(machine), noise=Random(dice.getrandbits(32)), offer=offer)
    return lost_passes(run, run.go(run.rows(verdict), dice.randint(20, 500)))


@pytest.mark.parametrize("seed", range(100))
def test_noise_does_not_hide_losses(seed: int) -> None:
    """With each duration off by a tenth, and one in thirty by three times, the same nearly holds."""
    assert noisy_run(warmed, seed) <= NOISY


@pytest.mark.parametrize("seed", range(100))
def test_new_machine_is_learnt_with_little_loss(seed: int) -> None:
    """Learning the cost of a pass takes a few passes, even where every token costs one."""
    assert noisy_run(lambda _machine: new_pace(), seed) <= COLD


@settings(deadline=None, max_examples=50)
@given(machines, st.lists(verdicts, min_size=2, max_size=6), offers, st.integers(20, 150))
def test_batch_never_loses_more_than_promised(
    name: str, each: list[Verdict], offer: Callable[[int], int], count: int
) -> None:
    """The promise holds for the tokens of a batch together, whatever each row's drafts are worth."""
    machine = MACHINES[name]
    run = Run(machine, warmed(machine, len(each)), offer=offer)
    assert lost_passes(run, run.go(run.rows(*each), count)) <= KNOWN


@pytest.mark.parametrize(
    ("name", "value", "count"), [("_GROWTH", 0.05, 500), ("_FIRST_PASSES", 3.0, 40)]
)
def test_larger_balance_would_be_noticed(
    name: str, value: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a larger balance a proposer that is always wrong breaks the promise."""
    machine = MACHINES["cpu"]
    lost = []
    for _ in range(2):
        run = Run(machine, warmed(machine))
        lost.append(lost_passes(run, run.go(run.rows(nothing), count)))
        monkeypatch.setattr(draft_balance, name, value)
        monkeypatch.setattr(draft_balance, "_MAX_PASSES", 9.0)
    assert lost[0] <= KNOWN < lost[1]


def test_unbooked_losses_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balance that never shrinks is spent without end."""
    monkeypatch.setattr(DraftBalance, "_earn", lambda *_: None)
    machine = MACHINES["cpu"]
    run = Run(machine, warmed(machine))
    assert lost_passes(run, run.go(run.rows(nothing), 400)) > KNOWN


@pytest.mark.parametrize("name", sorted(MACHINES))
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_right_drafts_are_nearly_as_fast_as_possible(name: str, seed: int | None) -> None:
    """A new daemon finds the best length within a request, noise or not."""
    machine = MACHINES[name]
    run = Run(machine, new_pace(), noise=None if seed is None else Random(seed))
    run.speed(run.rows(everything), 200)
    assert run.speed(run.rows(everything), 300) > 0.85 * machine.best_speed()


@pytest.mark.parametrize("name", ["cpu", "a jump at two", "gpu"])
@pytest.mark.parametrize("draft", [0.0, 0.1])
def test_text_that_begins_to_repeat_itself_gets_fast(name: str, draft: float) -> None:
    """After a long answer without a right draft, the first right ones bring speed back."""
    machine = MACHINES[name]
    run = Run(machine, warmed(machine), draft_s=draft * machine.cost_s(1, 1))
    row = Row(run.pace)
    run.speed({row: nothing}, 500)
    before = run.passes
    run.go({row: everything}, 20)
    assert run.passes - before <= 60  # until it drafts again
    assert run.speed({row: everything}, 300) > 0.75 * machine.best_speed(run.draft_s)


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_batch_of_right_drafts_is_faster(rows: int) -> None:
    """Batches gain from right drafts as long as a token costs less than a pass."""
    run = Run(MACHINES["cpu"], new_pace())
    assert run.speed(run.rows(*[everything] * rows), 300) > 1.15
    assert run.pace.drafts.batched_gain is not None
    assert run.pace.drafts.batched_gain > 1.1


@pytest.mark.parametrize("rows", [2, 8])
def test_batch_leaves_out_drafts_that_do_not_pay(rows: int) -> None:
    """Drafts end if a further token of each row is measured twice to cost as much as a pass: of one token, then of three."""
    run = Run(MACHINES["every token a pass"], new_pace())
    every = run.rows(*[everything] * rows)
    run.go(every, 300)
    run.drafted = 0
    run.go(every, 200)
    assert run.drafted <= (1 + 3) * rows


def test_rows_without_drafts_do_not_lower_what_others_may() -> None:
    """A row whose drafts are right has as many beside a row that has none."""
    machine = MACHINES["gpu"]
    longest = []
    for offers_of_second in (everything, None):
        run = Run(machine, warmed(machine, 2))
        cost = run.pace.span_cost(Lane.BATCH, 2)
        second = Offer(0, 0 if offers_of_second is None else 8, 0.95)
        longest.append(worthwhile_tokens([Offer(0, 8, 0.95), second], cost))
    assert longest[0] == longest[1] == 8


def test_width_that_was_never_met_has_no_drafts() -> None:
    """The cost of a pass of so many rows has to be measured first."""
    pace = new_pace()
    for _ in range(8):
        pace.observe(Lane.BATCH, 1, duration_s=0.05)
    assert pace.draft_tokens(Lane.BATCH, 1, 8) == 1
    assert pace.draft_tokens(Lane.BATCH, 2, 8) == 0
    assert pace.draft_tokens(Lane.SERIAL, 1, 8) == 0


def test_drafts_that_take_long_to_make_are_fewer() -> None:
    """A draft model's time counts: as many drafts as pay, and none where one costs a pass."""
    machine = MACHINES["cpu"]
    drafted = []
    for draft in (0.0, 0.3, 1.2):
        run = Run(machine, new_pace(), draft_s=draft * machine.cost_s(1, 1))
        run.go(run.rows(random_verdict(1, 0.7)), 600)
        drafted.append(run.drafted / run.passes)
    assert drafted[0] > drafted[1] > drafted[2]
    assert drafted[2] < 0.05


def test_one_hiccup_does_not_end_drafts() -> None:
    """A pass that took a minute keeps a row from drafting for a while, and not for good."""
    pace = new_pace()
    for _ in range(8):
        pace.observe(Lane.BATCH, 1, duration_s=0.05)
    pace.observe(Lane.BATCH, 1, duration_s=60.0, ahead_tokens=1)
    waits = 0
    offer = [Offer(0, 1, 0.9)]
    while not (
        pace.draft_tokens(Lane.BATCH, 1, 8)
        and worthwhile_tokens(offer, pace.span_cost(Lane.BATCH, 1))
    ):
        pace.observe(Lane.BATCH, 1, duration_s=0.05)
        waits += 1
        assert waits < 1000
