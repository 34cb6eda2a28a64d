"""A model whose experts lie in a file computes the same as from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from support.engines.banked_models import banked_copy, banked_engine, moe_model
from support.engines.rounding import is_equal_but_for_rounding

from machd.engine.experts.bank import ExpertBank
from machd.engine.experts.expert_files import ExpertReadError
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.model_code import read_model_code
from machd.engine.protocol.step import PrefillChunk, StepPlan
from machd_probes.play import GREEDY, Join, play

_IDS = mx.array(np.random.default_rng(0).integers(1, 200, (3, 17)))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model in memory, which tests copy."""
    return moe_model()


def _logits(model: Module, ids: mx.array = _IDS) -> mx.array:
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    caches = make_prompt_cache(model)
    parts = [model(ids[:, :9], cache=caches), model(ids[:, 9:], cache=caches)]
    parts += [model(ids[:, number : number + 1], cache=caches) for number in range(12)]
    logits = mx.concatenate(parts, axis=1)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_banked_model_logits_equal_those_from_memory(
    loaded: LoadedModel, tmp_path: Path, share: float
) -> None:
    """Logits are those from memory with all experts in the bank, with half, and with one at a time."""
    model, banked = banked_copy(loaded, tmp_path, share)
    banked.connect_previews()
    assert is_equal_but_for_rounding(_logits(model), _logits(loaded.model))
    reading = banked.reading()
    assert (reading.misses > 0) == (share < 1)
    banked.close()


def test_banked_model_looks_nothing_up_when_all_experts_are_in_memory(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """A pass over resident layers counts no lookup, because it reads no router's choice back."""
    model, banked = banked_copy(loaded, tmp_path, 1.0)
    _logits(model)
    reading = banked.reading()
    assert (reading.hits, reading.misses, reading.evictions) == (0, 0, 0)
    banked.close()


def test_previews_read_ahead_without_changing_logits(loaded: LoadedModel, tmp_path: Path) -> None:
    """Read-ahead hits appear only with previews connected, and logits are the same without them."""
    found = []
    for is_connected in (False, True):
        model, banked = banked_copy(loaded, tmp_path, 0.5)
        if is_connected:
            banked.connect_previews()
        assert is_equal_but_for_rounding(_logits(model, _IDS[:1]), _logits(loaded.model, _IDS[:1]))
        found.append(banked.reading().read_ahead_hits)
        banked.close()
    assert found[0] == 0
    assert found[1] > 0


def test_banked_model_reports_its_original_code(loaded: LoadedModel, tmp_path: Path) -> None:
    """The named layers are those of the model in memory, so that its measurements apply."""
    model, banked = banked_copy(loaded, tmp_path, 0.5)
    assert read_model_code(model, loaded.description.cache) == loaded.description.code
    banked.close()


def _stale(bank: ExpertBank) -> None:
    """Overwrite a slot with another expert while the tables stay."""
    slots = bank.slots(0)
    present = np.flatnonzero(slots >= 0)
    array = bank.array(0, "up_proj", "weight")
    assert array is not None
    rows = np.asarray(array)
    rows[slots[present[0]]] = rows[slots[present[1]]]


def _swapped(bank: ExpertBank) -> None:
    """Exchange the slots of two experts in the table."""
    slots = bank.slots(0)
    first, second = np.flatnonzero(slots >= 0)[:2]
    slots[[first, second]] = slots[[second, first]]


@pytest.mark.parametrize("harm", [_stale, _swapped])
def test_wrong_expert_changes_logits(
    loaded: LoadedModel, tmp_path: Path, harm: Callable[[ExpertBank], None]
) -> None:
    """A stale or swapped expert is noticed by the comparison that this file rests on."""
    model, banked = banked_copy(loaded, tmp_path, 1.0)
    harm(banked.bank)
    assert not is_equal_but_for_rounding(_logits(model), _logits(loaded.model))
    banked.close()


def _break(monkeypatch: pytest.MonkeyPatch, bank: ExpertBank, expert: int) -> None:
    """Evict one expert of the first layer, and let every read of it fail."""
    lost = {locations[expert] for locations in bank.layers[0].locations.values()}
    read = bank._files.read

    def failing(location: object, parameter: object, into: object) -> int:
        if location in lost:
            raise ExpertReadError("an I/O error")
        return read(location, parameter, into)  # type: ignore[arg-type]

    monkeypatch.setattr(bank._files, "read", failing)
    slot = int(bank.slots(0)[expert])
    if slot >= 0:
        bank._evict(bank._pools[0], slot)


def test_lost_expert_makes_only_its_rows_nan(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that chose the lost expert are NaN; all others are what they were."""
    model, banked = banked_copy(loaded, tmp_path, 0.5)
    _break(monkeypatch, banked.bank, 0)
    ids = mx.arange(1, 33)[:, None]
    logits, right = model(ids), loaded.model(ids)
    is_lost = np.isnan(np.array(logits)).any(axis=(1, 2))
    assert 0 < is_lost.sum() < len(is_lost)
    kept = mx.array(np.flatnonzero(~is_lost))
    assert is_equal_but_for_rounding(logits[kept], right[kept])
    assert isinstance(banked.take_fault(), ExpertReadError)
    assert banked.take_fault() is None
    banked.close()


def test_lost_expert_in_a_prompt_fails_its_row_only(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose prompt needs the lost expert fail, others get tokens, and a retry works once it is readable."""
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
