"""Rows with recurrent state verify drafts together, and each answers as it does alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.engines.block_drafts import HearingDraft
from support.engines.drafted_scripts import DraftedScripts, always, say
from support.engines.oracle import WatchedEngine, open_draws
from support.engines.tiny_models import TinyKind

from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.rollback import CacheCheckpoint
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.dflash import DFlashProposer
from machd.engine.step.decode_pass import Passes
from machd_probes.play import Join
from machd_probes.prober import tiny_loaded
from machd_probes.scripts import LENGTHS, random_prompt, scripts

PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, 16)
STATEFUL = (TinyKind.HYBRID_GDN, TinyKind.HYBRID, TinyKind.NESTED)
_EXHAUSTIVE = tuple(set(SCRIPTS) - {"early leaves", "down to one and up again"})


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["in step", "looking ahead"])
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in _EXHAUSTIVE else ()) for name in SCRIPTS],
)
def test_stateful_rows_verify_drafts_together(
    name: str,
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
) -> None:
    """After each row accepts its own number of drafts, its state is that of its accepted tokens."""
    stage = DraftedScripts(kind, looks_ahead=looks_ahead)

    assert stage.differences(SCRIPTS[name], always) == []
    accepted = [[one.accepted_tokens for one in result.drafts] for result in stage.engine.results]
    assert any(len(set(one)) > 1 for one in accepted), "rows accept different numbers"


def _unpadded(self: BatchLaneKv, lengths: Sequence[int] | None = None) -> None:
    self._positions.begin_pass(lengths)


def _all_done(self: CacheCheckpoint, counts: Sequence[int], added: Sequence[int]) -> bool:
    del self, counts, added
    return True


def _whole(self: Passes, current: object, kept_tokens: Sequence[int]) -> None:
    longest = [max(kept_tokens)] * len(kept_tokens)
    self._kv.begin_pass(longest)
    self._forward(current.token_ids[:, : longest[0]], self._kv.caches, {})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (BatchLaneKv, "begin_pass", _unpadded),
        (CacheCheckpoint, "roll_back", _all_done),
        (Passes, "compute_again", _whole),
    ],
    ids=["padding goes in", "nothing is put back", "too much is computed again"],
)
def test_a_fault_shows(
    owner: type, method: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison detects state that includes padding or rejected drafts."""
    stage = DraftedScripts(TinyKind.HYBRID_GDN)
    stage.differences(
        SCRIPTS["early leaves"], lambda _step, _rows: 0
    )  # what is said alone is known
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(AssertionError):  # the oracle may be the first to notice
        assert stage.differences(SCRIPTS["early leaves"], always) == []


def test_dflash_drafts_for_a_batch_of_qwen3_5_moe() -> None:
    """A DFlash draft that reads the target's layers drafts for several rows, and answers stay the same."""
    model = tiny_loaded("qwen3_5_moe")
    rows = [Join(prompt, 24) for prompt in PROMPTS[2:6]]
    plain = WatchedEngine(model, None)
    expected = say(plain, rows).token_ids
    plain.reset()
    width = model.description.vocabulary_tokens
    proposer = DFlashProposer(HearingDraft(model.model, width), open_draws=open_draws(width))
    engine = WatchedEngine(model, proposer)

    said = say(engine, rows, 4)

    assert engine.model.proposer is ProposerKind.DFLASH
    assert said.token_ids == expected
    assert said.draft_faults == []
    together = [result for result in said.results if len(result.drafts) > 1]
    assert any(len({one.accepted_tokens for one in result.drafts}) > 1 for result in together)
    assert said.accepted_tokens > 0
    assert engine.passes < plain.passes
