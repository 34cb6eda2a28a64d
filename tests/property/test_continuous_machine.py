"""Any history of submits, aborts, steps, faults, restarts, drains and switches keeps the scheduler right.

The machine plays continuous batching with switches of its config, and single flight, the narrowest
configuration, alone. Schedulers that are broken on purpose prove that it would notice.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.engines.fake_engine import FakeEngine
from support.every_run import sampled
from support.schedulers import broken_schedulers as broken_ones
from support.schedulers.continuous_machine import ContinuousMachine, SingleFlightMachine

from machd.scheduler.scheduler import Scheduler

TestContinuousMachine = ContinuousMachine.TestCase
TestContinuousMachine.settings = settings(
    max_examples=75,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSingleFlightMachine = SingleFlightMachine.TestCase
TestSingleFlightMachine.settings = settings(TestContinuousMachine.settings, max_examples=30)


class _OfManyHistories(ContinuousMachine):
    """The same, of ten times as many."""


TestManyHistories = pytest.mark.long(_OfManyHistories.TestCase)
TestManyHistories.settings = settings(TestContinuousMachine.settings, max_examples=750)

_FOUND_EARLY = [
    broken_ones.SendsATokenTwice,
    broken_ones.NeverDraftsAgain,
    broken_ones.LosesDrafts,
    broken_ones.GoesOnBehindTheEnd,
    broken_ones.CountsNoDrafts,
    broken_ones.StartsInSilence,
    broken_ones.ChangesInSilence,
    broken_ones.AdmitsWhileHeld,
    broken_ones.HoldsForGood,
    broken_ones.ReordersAtASwitch,
    broken_ones.KeepsTheOldSlots,
    broken_ones.ForgetsToGiveBack,
    broken_ones.LastComeFirstServed,
    broken_ones.SharesWithAnybody,
    broken_ones.LetsJoinTheDead,
    broken_ones.ForgetsToReplay,
    broken_ones.LetsOthersJoinASuspect,
    broken_ones.DecodesHalfABatch,
    broken_ones.QueuesWithoutBounds,
]
_FOUND_LATE = [
    broken_ones.LosesAToken,
    broken_ones.DrawsAtTheWrongPosition,
    broken_ones.TimesOutInTheQueueAgain,
    broken_ones.RestartsMatchers,
    broken_ones.DraftsForAll,
    broken_ones.StartsInAnotherMode,
    broken_ones.KeepsTheUnfit,
    broken_ones.TurnsAwayAtASwitch,
    broken_ones.SharesAfterItIsSwitchedOff,
    broken_ones.ForgetsThePadding,
    broken_ones.LeaderTakesAllAlong,
    broken_ones.StarvesTheSerialRow,
    broken_ones.NeverWakes,
]
"""It takes many examples to find these; the likes of them above are found in every run."""

_IN_SINGLE_FLIGHT = [
    broken_ones.ForgetsToRelease,
    broken_ones.KeepsFinishedInSlot,
    broken_ones.LosesWhoIsAbortedWhileWaiting,
    broken_ones.LastComeFirstServed,
    broken_ones.DeliversStopTokens,
    broken_ones.CountsOneTokenTooMany,
    broken_ones.NeverTimesOut,
    broken_ones.FailsInSilence,
    broken_ones.QueuesWithoutBounds,
]


def _check_that_it_fails(machine: type[ContinuousMachine]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=8000,
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                phases=[Phase.generate],
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize("broken", sampled([*_FOUND_EARLY, *_FOUND_LATE], _FOUND_EARLY))
def test_the_machine_notices_a_broken_scheduler(
    broken: type[Scheduler] | type[FakeEngine],
) -> None:
    """Each way of being wrong breaks an invariant, so a green machine means something."""

    class Broken(ContinuousMachine):
        scheduler_class = broken if issubclass(broken, Scheduler) else Scheduler
        engine_classes = (
            (broken, broken) if issubclass(broken, FakeEngine) else ContinuousMachine.engine_classes
        )

    _check_that_it_fails(Broken)


@pytest.mark.parametrize("broken", _IN_SINGLE_FLIGHT)
def test_the_machine_notices_a_broken_scheduler_in_single_flight(broken: type[Scheduler]) -> None:
    """Each way of being wrong shows in one row alone, too."""

    class Broken(SingleFlightMachine):
        scheduler_class = broken

    _check_that_it_fails(Broken)
