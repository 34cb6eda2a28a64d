"""The engine as it is served: prompt lookup with real pacing, and what drafts may not do to other rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from support.engines.oracle import fail_verification
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind, tiny_model

from machd.engine.assembly import make_engine
from machd.engine.kv.row_caches import innermost
from machd.engine.protocol.slab_size import reserved_columns
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan, StepResult
from machd.engine.speculation.ngram import NgramProposer
from machd.engine.step import decoder
from machd.engine.step.mlx_engine import MlxEngine
from machd.engine.step.verification import Span, Verdict, verify
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join, play
from machd_probes.scripts import LENGTHS, Script, random_prompt, scripts

SCRIPTS = scripts([random_prompt(length, number) for number, length in enumerate(LENGTHS)], 16)


class _Same:
    """Proposes one token as long as its prompt is short, whatever the row's tokens are."""

    def __init__(self, prompt_tokens: int) -> None:
        self._is_on = prompt_tokens < 50
        self.kv_bytes = 0

    def extend(self, token_ids: object) -> None:
        """Ignore generated tokens."""

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        return (5,) * max_tokens if self._is_on else ()

    def close(self) -> None:
        """Nothing is held."""


class _SameForAll(NgramProposer):
    def open(self, prompt: Any, sampling: SamplingParams) -> Any:
        del sampling
        return _Same(len(prompt))


_SCRIPTS = ("staggered", "down to one and up again", "mixed parameters")
_KINDS = (TinyKind.STANDARD, TinyKind.ROTATING, TinyKind.HYBRID_GDN)


def _start(engine: MlxEngine, *rows: tuple[tuple[int, ...], int]) -> None:
    """Prefill prompts, each with the number of positions that it reserves."""
    for slot, (prompt, positions) in enumerate(rows):
        sampling = SamplingParams(temperature=1.0, seed=slot)
        chunk = PrefillChunk(
            slot, prompt, 0, is_last=True, sampling=sampling, reserved_tokens=positions
        )
        engine.run(StepPlan(prefill=(chunk,)))


def _decode(engine: MlxEngine, *slots: int, max_draft_tokens: int = 8) -> StepResult:
    return engine.run(StepPlan(decode=tuple(DecodeRow(one, max_draft_tokens) for one in slots)))


@pytest.mark.parametrize(
    ("looks_ahead", "name", "kind"),
    [
        pytest.param(
            looks_ahead,
            name,
            kind,
            id=f"{'looking ahead' if looks_ahead else 'in step'}-{name}-{kind}",
            marks=()
            if name == _SCRIPTS[0] or (kind is TinyKind.STANDARD and not looks_ahead)
            else pytest.mark.long,
        )
        for looks_ahead, name, kind in product((False, True), _SCRIPTS, _KINDS)
    ],
)
def test_prompt_lookup_changes_nothing(kind: TinyKind, name: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """Answers stay the same whatever prompt lookup finds and the pace allows, at every batch width."""
    engine = make_engine(loaded(kind), looks_ahead=looks_ahead, proposer=NgramProposer())
    script = SCRIPTS[name]
    loops = Join((7, 8, 9, 7, 8, 9, 7, 8), 40, replace(GREEDY, logit_bias=((7, 9.0), (8, 9.0))))
    script = Script((loops, *script.joins))
    said = play(engine, script.joins, slots=script.slots, drafts=lambda _step, _rows: 8)
    assert alone(kind).differences(script, said) == []
    assert engine.memory().kv_used_bytes == 0


def test_drafts_need_no_more_than_rows_reserved() -> None:
    """Padding to a neighbour's drafts stays within the reserved columns, up to the last token."""
    engine = make_engine(tiny_model(TinyKind.STANDARD), proposer=_SameForAll(), max_rows=2)
    _start(engine, (tuple(range(1, 101)) * 3, 330), ((1, 2, 3), 300))
    drafted = 0
    for _ in range(28):
        drafted += len(_decode(engine, 0, 1, max_draft_tokens=16).drafts)
        keys_and_values = innermost(engine._batch._kv.caches)[0].state
        columns = sum(array.shape[0] * array.shape[2] for array in keys_and_values[::2])
        assert columns <= reserved_columns([330, 300])
    assert drafted


def test_nan_behind_a_failing_row_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that fails at its matcher after NaN drafts leaves no NaN to the next row of its slot."""
    engine = make_engine(tiny_model(TinyKind.STANDARD), proposer=_SameForAll())
    _start(engine, ((1, 2, 3, 4), 400), ((1, 2, 3, 5), 400))

    class Refusing:
        forced = ()

        def take_forced(self, count: int) -> list[int]:
            del count
            return []

        def accept(self, token_id: int) -> None:
            raise RuntimeError(f"{token_id} is too much")

    def poisoned(draft: Span, chosen: Any) -> Verdict:
        verdict = verify(draft, chosen)
        if chosen[0].slot_index != 1:
            return verdict
        for cache in innermost(engine._batch._kv.caches):
            length = engine._batch._kv._positions.lengths[1]  # type: ignore[attr-defined]
            for array in cache.state:
                array[1:2, :, length - 1 : length] = float("nan")
        row = engine._batch._rows[1]
        row.sampling = replace(row.sampling, matcher=Refusing())  # type: ignore[arg-type]
        draft.ahead_states = (row.sampling,) * len(draft.ahead_ids)
        return replace(verdict, is_finite=False)

    monkeypatch.setattr(decoder, "verify", poisoned)
    (fault,) = _decode(engine, 0, 1).faults
    assert fault.slot_index == 1
    arrays = [array for cache in innermost(engine._batch._kv.caches) for array in cache.state]
    assert not any(bool(mx.any(mx.isnan(array))) for array in arrays)


def test_a_failing_verification_rejects_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts whose verification raises are reported as rejected, so that the pace makes them rare."""
    fail_verification(monkeypatch)
    engine = make_engine(tiny_model(TinyKind.STANDARD), proposer=_SameForAll())
    _start(engine, ((1, 2, 3, 4), 400))
    results = [_decode(engine, 0) for _ in range(200)]
    told = [one for result in results for one in result.drafts]
    assert len(told) == len(results)
    assert {one.accepted_tokens for one in told} == {0}
    assert not any(result.faults for result in results)
