"""A model whose experts lie in a file computes what it computes from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from support.engines.banked_models import banked_copy, banked_engine, moe_model

from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.expert_files import ExpertReadError
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.model_code import read_model_code
from machd.engine.protocol.step import PrefillChunk, StepPlan
from machd_probes.play import GREEDY, Join, play

_IDS = mx.array(np.random.default_rng(0).integers(1, 200, (3, 17)))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """In memory; tests copy it."""
    return moe_model()


def _logits(model: Module, ids: mx.array = _IDS) -> mx.array:
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    caches = make_prompt_cache(model)
    parts = [model(ids[:, :9], cache=caches), model(ids[:, 9:], cache=caches)]
    parts += [model(ids[:, :1], cache=caches) for _ in range(4)]
    logits = mx.concatenate(parts, axis=1)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_logits_are_the_same_bit_by_bit(loaded: LoadedModel, tmp_path: Path, share: float) -> None:
    """With all experts in memory, with half, and with room for one at a time."""
    model, banked = banked_copy(loaded, tmp_path, share)
    banked.connect()
    assert mx.array_equal(_logits(model), _logits(loaded.model)).item()
    reading = banked.reading()
    assert (reading.misses > 0) == (share < 1)
    banked.close()


def test_with_all_experts_in_memory_nothing_is_looked_up(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """No pass waits for what its routers choose."""
    model, banked = banked_copy(loaded, tmp_path, 1.0)
    _logits(model)
    reading = banked.reading()
    assert (reading.hits, reading.misses, reading.evictions) == (0, 0, 0)
    banked.close()


def test_previews_read_ahead_and_change_no_answer(loaded: LoadedModel, tmp_path: Path) -> None:
    """Connected twice the same model finds experts on their way; unconnected none."""
    found = []
    for is_connected in (False, True):
        model, banked = banked_copy(loaded, tmp_path, 0.5)
        if is_connected:
            banked.connect()
        assert mx.array_equal(_logits(model), _logits(loaded.model)).item()
        found.append(banked.reading().read_ahead_hits)
        banked.close()
    assert found[0] == 0
    assert found[1] > 0


def test_the_model_names_the_code_that_it_had(loaded: LoadedModel, tmp_path: Path) -> None:
    """What was measured of the architecture goes for it with its experts on disk."""
    model, banked = banked_copy(loaded, tmp_path, 0.5)
    assert read_model_code(model, loaded.description.cache) == loaded.description.code
    banked.close()


def _stale(bank: ExpertBank) -> None:
    """A slot whose expert was replaced without the table knowing."""
    slots = bank.slots(0)
    present = np.flatnonzero(slots >= 0)
    array = bank.array(0, "up_proj", "weight")
    assert array is not None
    rows = np.asarray(array)
    rows[slots[present[0]]] = rows[slots[present[1]]]


def _swapped(bank: ExpertBank) -> None:
    """Two experts of which each lies in the other's slot."""
    slots = bank.slots(0)
    first, second = np.flatnonzero(slots >= 0)[:2]
    slots[[first, second]] = slots[[second, first]]


@pytest.mark.parametrize("harm", [_stale, _swapped])
def test_a_wrong_expert_shows(
    loaded: LoadedModel, tmp_path: Path, harm: Callable[[ExpertBank], None]
) -> None:
    """The comparison that this file rests on can fail."""
    model, banked = banked_copy(loaded, tmp_path, 1.0)
    harm(banked.bank)
    assert not mx.allclose(_logits(model), _logits(loaded.model)).item()
    banked.close()


def _break(monkeypatch: pytest.MonkeyPatch, bank: ExpertBank, expert: int) -> None:
    """One expert of the first layer cannot be read any more, and is not in memory."""
    lost = {places[expert] for places in bank.layers[0].places.values()}
    read = bank._files.read

    def failing(place: object, form: object, into: object) -> int:
        if place in lost:
            raise ExpertReadError("an I/O error")
        return read(place, form, into)  # type: ignore[arg-type]

    monkeypatch.setattr(bank._files, "read", failing)
    slot = int(bank.slots(0)[expert])
    if slot >= 0:
        bank._evict(bank._shelf_of[0], slot)


def test_only_rows_that_need_a_lost_expert_are_nan(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one position each: those that chose it, and no other."""
    model, banked = banked_copy(loaded, tmp_path, 0.5)
    _break(monkeypatch, banked.bank, 0)
    ids = mx.arange(1, 33)[:, None]
    logits = np.array(model(ids))
    right = np.array(loaded.model(ids))
    is_lost = np.isnan(logits).any(axis=(1, 2))
    assert 0 < is_lost.sum() < len(is_lost)
    assert np.array_equal(logits[~is_lost], right[~is_lost])
    assert isinstance(banked.take_fault(), ExpertReadError)
    assert banked.take_fault() is None
    banked.close()


def test_rows_fail_in_the_prompt_and_others_get_their_tokens(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that needs a lost expert ends its row; once it can be read again, so can the row."""
    engine, banked = banked_engine(loaded, tmp_path, 0.5)
    with monkeypatch.context() as broken:
        _break(broken, banked.bank, 0)
        prompts = [tuple(range(first, first + 12)) for first in (1, 40, 80)]
        chunks = tuple(
            PrefillChunk(
                slot_index=slot_index,
                token_ids=prompt,
                start=0,
                is_last=True,
                sampling=GREEDY,
                reserved_tokens=20,
            )
            for slot_index, prompt in enumerate(prompts)
        )
        result = engine.run(StepPlan(prefill=chunks))
        assert result.faults
        assert all(isinstance(one.cause, ExpertReadError) for one in result.faults)
        failed = {one.slot_index for one in result.faults}
        assert {one.slot_index for one in result.tokens} == {0, 1, 2} - failed
        engine.run(StepPlan(release=(0, 1, 2)))
    again = play(engine, [Join(prompts[0], 6)])
    reference, other = banked_engine(loaded, tmp_path, 1.0)
    expected = play(reference, [Join(prompts[0], 6)])
    assert [one.token_id for one in again[0]] == [one.token_id for one in expected[0]]
    assert other.reading().misses == 0
    engine.close()
    reference.close()
