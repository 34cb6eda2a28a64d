"""The choice of the proposer in force: what is there and what the model allows, with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.verdicts import ModelVerdicts, judge
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import ProposerKind
from machd.link.speculation_mode import decide_speculation, draft_policy
from machd.settings.speculation import SpeculationSettings

_MODEL = FakeEngine().model
_PRIVATE = CacheFacts((LayerCacheFacts("LayerCache", trimmable=False, mergeable=False),), 1, 0)


def _proposed_by(proposer: ProposerKind, reason: str = "why") -> ModelDescription:
    return replace(_MODEL, proposer=proposer, proposer_reason=reason)


def _judged(model: ModelDescription) -> ModelVerdicts:
    return judge(model.cache)


@pytest.mark.parametrize("proposer", ProposerKind)
def test_the_engines_proposer_is_in_force_where_the_model_allows_it(proposer: ProposerKind) -> None:
    """With the engine's own reason, and as far ahead as the settings say."""
    model = _proposed_by(proposer)
    section = SpeculationSettings(max_draft_tokens=5)
    decision = decide_speculation(section, model, _judged(model))
    assert decision.active is proposer
    assert decision.reason == "why"
    assert decision.max_draft_tokens == (0 if proposer is ProposerKind.OFF else 5)


def test_a_model_that_rolls_no_drafts_back_has_its_verdicts_reason() -> None:
    """Whatever the proposer, speculation is off, and the reason is that of the model's caches."""
    model = replace(_proposed_by(ProposerKind.NGRAM), cache=_PRIVATE)
    verdicts = _judged(model)
    decision = decide_speculation(SpeculationSettings(), model, verdicts)
    assert decision.active is ProposerKind.OFF
    assert decision.reason == verdicts.speculation.reason != "why"
    assert decision.max_draft_tokens == 0


@pytest.mark.parametrize("cache", [_MODEL.cache, _PRIVATE], ids=["standard", "private"])
@pytest.mark.parametrize("proposer", ProposerKind)
def test_it_says_what_the_scheduler_is_told(proposer: ProposerKind, cache: CacheFacts) -> None:
    """The mode that is shown is the one that the scheduler uses."""
    model = replace(_proposed_by(proposer), cache=cache)
    section, verdicts = SpeculationSettings(), _judged(model)
    decision = decide_speculation(section, model, verdicts)
    policy = draft_policy(section, model, verdicts)
    assert decision.max_draft_tokens == policy.max_draft_tokens
    assert (decision.active is ProposerKind.OFF) is (policy.max_draft_tokens == 0)


@pytest.mark.parametrize(
    ("requested", "active", "is_as_requested"),
    [
        ("auto", ProposerKind.OFF, True),
        ("auto", ProposerKind.NGRAM, True),
        ("off", ProposerKind.OFF, True),
        ("draft", ProposerKind.DRAFT, True),
        ("draft", ProposerKind.OFF, False),
        ("dflash", ProposerKind.NGRAM, False),
    ],
)
def test_only_a_name_can_be_disappointed(
    requested: str,
    active: ProposerKind,
    is_as_requested: bool,  # noqa: FBT001
) -> None:
    """``auto`` is never disappointed; a named mode is if another or none is in force."""
    model = _proposed_by(active)
    section = SpeculationSettings.model_validate({"mode": requested})
    assert decide_speculation(section, model, _judged(model)).is_as_requested is is_as_requested


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("proposer", ProposerKind)
def test_there_is_always_a_reason(proposer: ProposerKind, mode: str) -> None:
    """Also for an engine that gives no reason."""
    model = _proposed_by(proposer, reason="")
    section = SpeculationSettings.model_validate({"mode": mode})
    assert decide_speculation(section, model, _judged(model)).reason
