"""The KV budget: size of reservations, their lane, and refused requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.engine.protocol.step import Lane
from machd.errors import KvBudgetExceededError, KvBudgetSpentError
from machd.scheduler.admission import (
    KvBudget,
    KvPolicy,
    Promised,
    check_budget,
)

DEFER = KvBudget(1000, bytes_per_token=10, bytes_per_sequence=5, policy=KvPolicy.DEFER)
REJECT = KvBudget(1000, bytes_per_token=10, bytes_per_sequence=5, policy=KvPolicy.REJECT)


@pytest.mark.parametrize(
    ("tokens", "expected_bytes"),
    [
        ((), 0),
        ((7,), 75),
        ((7, 3), 2 * 70 + 10),
        ((7, 3, 3), 4 * 70 + 15),
        ((1, 1, 1, 1, 9), 6 * 90 + 25),  # eight rows, but there are six slots
    ],
)
def test_the_batch_costs_a_padded_slab(tokens: tuple[int, ...], expected_bytes: int) -> None:
    """Rows rounded up to a power of two, never beyond the slots, each as long as the longest."""
    assert Promised(tokens, max_rows=6).bytes_of(DEFER) == expected_bytes


def test_in_length_classes_each_row_costs_its_own_columns() -> None:
    """A long row costs the others nothing; beyond 2,048 positions a row is not rounded to a class."""
    kv = replace(DEFER, has_length_classes=True)
    columns = 256 + 256 + 384 + 2048 + 2304
    rows = (7, 256, 257, 2000, 2100)
    assert Promised(rows, max_rows=8).bytes_of(kv) == columns * 10 + len(rows) * 5


def test_more_rows_of_mixed_lengths_fit_in_length_classes() -> None:
    """At least 1.5 times as many of 64 requests of 50 to 4,000 tokens run at once under a budget."""
    tokens = [50 + 3950 * ((number * 37) % 64) // 63 for number in range(64)]
    running = []
    for has_length_classes in (False, True):
        kv = replace(DEFER, budget_bytes=400_000, has_length_classes=has_length_classes)
        promised = Promised(max_rows=64)
        for one in tokens:
            if promised.lane_for(kv, one) is Lane.BATCH:
                promised = promised.with_row(Lane.BATCH, one)
        running.append(len(promised.batch))
    assert running[1] >= 1.5 * running[0]


@pytest.mark.parametrize(
    ("tokens", "batch", "serial", "lane"),
    [
        (99, (), (), Lane.BATCH),
        (40, (40,), (), Lane.BATCH),
        (60, (20,), (), Lane.SERIAL),  # 2 x 60 is too wide, 20 and 60 are not
        (20, (60,), (), Lane.SERIAL),
        (80, (40,), (), None),  # not even alone
        (20, (60,), (5,), None),  # alone it would fit, but somebody is alone already
        (20, (20,), (50,), Lane.BATCH),
        (30, (30,), (50,), None),
    ],
)
def test_sequence_too_long_for_the_slab_runs_serially_or_waits(
    tokens: int, batch: tuple[int, ...], serial: tuple[int, ...], lane: Lane | None
) -> None:
    """The batch lane comes first, a free serial lane second if only padding is too much, else none."""
    assert Promised(batch, serial, max_rows=4).lane_for(DEFER, tokens) is lane


@given(tokens=st.integers(1, 99), rows=st.integers(1, 8))
def test_an_idle_scheduler_takes_whatever_can_ever_run(tokens: int, rows: int) -> None:
    """A request that passes the check at submit fits an idle engine, so none waits for ever."""
    nobody = Promised(max_rows=rows)
    check_budget(DEFER, (tokens,), running=nobody, waiting=(), retry_after_s=1)
    assert nobody.lane_for(DEFER, tokens) is Lane.BATCH


@pytest.mark.parametrize("kv", [DEFER, REJECT])
def test_what_never_fits_is_told_with_its_numbers(kv: KvBudget) -> None:
    """The message has the tokens, the bytes they need and the bytes there are."""
    with pytest.raises(KvBudgetExceededError) as refusal:
        check_budget(kv, (120,), running=Promised(), waiting=(), retry_after_s=1)
    message = refusal.value.message
    assert all(number in message for number in ("120 tokens", "1205 bytes", "1000 bytes"))
    assert refusal.value.http_status == 400


def test_defer_lets_a_request_wait_for_what_others_hold() -> None:
    """However much is promised, and however many sequences a request has, each can run in turn."""
    check_budget(DEFER, (90, 90, 90), running=Promised((99,)), waiting=(), retry_after_s=1)
    check_budget(DEFER, (), running=Promised((99,)), waiting=(), retry_after_s=1)


def test_reject_turns_away_what_does_not_fit_now() -> None:
    """Reservations of others count, and the error says when to retry."""
    check_budget(REJECT, (49,), running=Promised((49,), max_rows=4), waiting=(), retry_after_s=9)
    with pytest.raises(KvBudgetSpentError) as refusal:
        check_budget(
            REJECT, (49,), running=Promised((49,), (1,), max_rows=4), waiting=(), retry_after_s=9
        )
    assert (refusal.value.http_status, refusal.value.retry_after_s) == (429, 9)
    assert "495 bytes" in refusal.value.message
    assert "1000 bytes 510 are" in refusal.value.message


def test_reject_takes_what_the_padding_has_room_for() -> None:
    """A fourth row costs nothing where three have been rounded up to four already."""
    three = Promised((24, 5, 5), max_rows=4)
    check_budget(REJECT, (24,), running=three, waiting=(), retry_after_s=9)
    with pytest.raises(KvBudgetSpentError):
        check_budget(REJECT, (25,), running=three, waiting=(), retry_after_s=9)


def test_reject_refuses_a_sequence_that_would_wait_for_padding() -> None:
    """A fifth row makes eight of four: it goes alone, and a sixth has no place at all."""
    four = Promised((20,) * 4, max_rows=8)
    check_budget(REJECT, (15,), running=four, waiting=(), retry_after_s=9)
    with pytest.raises(KvBudgetSpentError):
        check_budget(REJECT, (15, 1), running=four, waiting=(), retry_after_s=9)
    with pytest.raises(KvBudgetSpentError):
        check_budget(REJECT, (1,), running=four, waiting=(15,), retry_after_s=9)


def test_reject_lets_wait_for_a_slot() -> None:
    """A request without a free row is not refused for the budget's sake."""
    two = Promised((40, 40), max_rows=2)
    check_budget(REJECT, (40,), running=two, waiting=(), retry_after_s=9)
    check_budget(REJECT, (40, 40, 40), running=Promised(max_rows=2), waiting=(), retry_after_s=9)
    with pytest.raises(KvBudgetExceededError):
        check_budget(
            REJECT, (40, 40, 140), running=Promised(max_rows=2), waiting=(), retry_after_s=9
        )


def test_reject_does_not_send_a_client_back_for_what_can_never_be() -> None:
    """Sequences that fit one by one but never together are a 400, since none of them may wait."""
    with pytest.raises(KvBudgetExceededError):
        check_budget(REJECT, (60, 60), running=Promised(max_rows=2), waiting=(), retry_after_s=1)
