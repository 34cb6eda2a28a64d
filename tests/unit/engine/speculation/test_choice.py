"""The settings' mode gives a proposer, or none with a reason for the operator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.engines.oracle import open_draws
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind, tiny_model
from unit.engine.tiny_llama import TinyLlama

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.rules import speculation
from machd.engine.loading.loader import LoadedModel, load_model
from machd.engine.open import _engine
from machd.engine.protocol.progress import SilentProgress
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation import choice
from machd.engine.speculation.choice import ProposerChoice, choose_proposer
from machd.errors import ModelError, ModelFormatError, ModelNotFoundError, SettingsError
from machd.settings.model import ModelSettings, Settings
from machd.settings.sources import load_settings
from machd.settings.speculation import SpeculationSettings
from machd_probes.play import GREEDY

pytestmark = pytest.mark.usefixtures("one_template_process")


class _Stages(SilentProgress):
    """Keeps what is shown of loading."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str, total_bytes: int | None) -> None:
        del total_bytes
        self.names.append(name)


@pytest.fixture(name="served")
def _served(tiny: TinyLlama) -> LoadedModel:
    return load_model(tiny.source)


def _choose(
    served: LoadedModel, tmp_path: Path, mode: str = "auto", draft_model: object = None
) -> ProposerChoice:
    section = SpeculationSettings.model_validate(
        {"mode": mode, "draft_model": None if draft_model is None else str(draft_model)}
    )
    settings = Settings(speculation=section)
    return choose_proposer(
        settings,
        served,
        open_draws=open_draws(VOCABULARY_TOKENS),
        cache_directory=tmp_path,
        progress=SilentProgress(),
    )


def _kind(chosen: ProposerChoice) -> ProposerKind:
    return ProposerKind.OFF if chosen.proposer is None else chosen.proposer.kind


@pytest.mark.parametrize(
    ("mode", "is_named", "kind"),
    [
        ("off", False, ProposerKind.OFF),
        ("off", True, ProposerKind.OFF),
        ("auto", False, ProposerKind.NGRAM),
        ("auto", True, ProposerKind.DRAFT),
        ("ngram", False, ProposerKind.NGRAM),
        ("ngram", True, ProposerKind.NGRAM),
        ("draft", True, ProposerKind.DRAFT),
    ],
)
def test_the_mode_chooses_the_proposer(
    mode: str,
    *,
    is_named: bool,
    kind: ProposerKind,
    served: LoadedModel,
    tiny: TinyLlama,
    tmp_path: Path,
) -> None:
    """Auto takes a draft model that is named, else prompt lookup; each choice has a reason."""
    chosen = _choose(served, tmp_path, mode, tiny.source.path if is_named else None)
    assert _kind(chosen) is kind
    assert chosen.reason
    if chosen.proposer is not None:
        row = chosen.proposer.open([5, 6, 7, 5, 6], GREEDY)
        assert row.propose(2)
        chosen.proposer.close()


def test_the_engine_shows_its_proposer(
    served: LoadedModel, tiny: TinyLlama, tmp_path: Path
) -> None:
    """The engine's description has the chosen proposer, and the reason has its size."""
    chosen = _choose(served, tmp_path, "draft", tiny.source.path)
    engine = _engine(served, Settings(), None, chosen.proposer)
    assert engine.model.proposer is ProposerKind.DRAFT
    assert "million parameters" in chosen.reason
    engine.close()


def test_draft_without_a_model_is_a_wrong_setting(tmp_path: Path) -> None:
    """Said with the settings, before anything is loaded, wherever the mode was given."""
    config = tmp_path / "machd.toml"
    config.write_text('[speculation]\nmode = "draft"\n', encoding="utf-8")
    with pytest.raises(SettingsError) as wrong:
        load_settings(config_path=config, environ={}, flags={})
    (problem,) = wrong.value.problems
    assert problem.startswith("speculation.mode: ")
    assert "speculation.draft_model" in problem
    named = {"LME_SPECULATION_DRAFT_MODEL": "some/model"}
    loaded = load_settings(config_path=config, environ=named, flags={})
    assert loaded.settings.speculation.mode == "draft"


def test_nothing_is_loaded_for_a_model_that_cannot_roll_drafts_back(
    served: LoadedModel, tmp_path: Path
) -> None:
    """The rule's own reason is given, which is logged when all is decided."""
    private = LayerCacheFacts("TheirOwnCache", "", mergeable=False, trimmable=False)
    facts = CacheFacts((private,), 0, 0)
    blocked = replace(served, description=replace(served.description, cache=facts))
    for mode in ("auto", "ngram", "draft", "dflash"):
        chosen = _choose(blocked, tmp_path, mode, tmp_path / "missing")
        assert chosen == ProposerChoice(None, speculation(facts).reason)


def test_a_draft_model_of_another_vocabulary_is_refused(
    served: LoadedModel, tmp_path: Path
) -> None:
    """With the setting's name, whichever way it was asked for."""
    other = write_tiny_llama(tmp_path / "other")
    for mode in ("auto", "draft"):
        with pytest.raises(SettingsError, match=r"speculation\.draft_model: "):
            _choose(served, tmp_path, mode, other)


def test_what_keeps_a_draft_model_from_loading_is_said_of_it(
    served: LoadedModel, tiny: TinyLlama, tmp_path: Path
) -> None:
    """The kind of error stays, and the message names the setting instead of the served model's."""
    with pytest.raises(ModelNotFoundError, match=r"^speculation\.draft_model: ") as missing:
        _choose(served, tmp_path, "draft", tmp_path / "missing")
    assert missing.value.exit_code == 2
    (tiny.source.path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"^speculation\.draft_model: "):
        _choose(served, tmp_path, "draft", tiny.source.path)


def test_loading_a_draft_model_is_shown_as_such(
    served: LoadedModel, tiny: TinyLlama, tmp_path: Path
) -> None:
    """The same stages as the served model's, told apart; the dtype is the one of the settings."""
    stages = _Stages()
    settings = Settings(
        model=ModelSettings(dtype="bfloat16"),
        speculation=SpeculationSettings(draft_model=str(tiny.source.path)),
    )
    chosen = choose_proposer(
        settings,
        served,
        open_draws=open_draws(VOCABULARY_TOKENS),
        cache_directory=tmp_path,
        progress=stages,
    )
    assert "draft model: loading the weights" in stages.names
    assert all(name.startswith("draft model: ") for name in stages.names)
    assert "bfloat16" in chosen.reason


def test_dflash_is_told_what_it_misses(served: LoadedModel, tmp_path: Path) -> None:
    """On a CPU the daemon decodes without, and says why in its log and its capabilities."""
    chosen = _choose(served, tmp_path, "dflash")
    assert chosen.proposer is None
    assert "Apple silicon" in chosen.reason


@pytest.fixture(name="_platform")
def _a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the package runs, as far as the choice can see."""
    monkeypatch.setattr(choice, "dflash_obstacle", lambda _: None)
    monkeypatch.setattr(choice, "known_draft", {"org/known": "org/known-DFlash"}.get)


@pytest.mark.usefixtures("_platform")
def test_a_draft_that_nobody_named_is_taken_if_it_is_there(
    served: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails over one that the package would take, but one that was named has to be there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "knows no draft" in _choose(served, tmp_path, "dflash").reason
    known = replace(served, description=replace(served.description, model_id="org/known"))
    chosen = _choose(known, tmp_path, "dflash")
    assert chosen.proposer is None
    assert "org/known-DFlash is no path below" in chosen.reason
    with pytest.raises(ModelError, match=r"^speculation\.draft_model: "):
        _choose(served, tmp_path, "dflash", tmp_path / "missing")


def test_a_hybrid_model_gets_a_proposer() -> None:
    """Whether it is served with one is decided by what was measured of it, not here."""
    hybrid = tiny_model(TinyKind.HYBRID)
    assert _kind(_choose(hybrid, Path())) is ProposerKind.NGRAM
