"""A choice that rounding may make otherwise is not held against a model; one that it cannot is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from support.engines.faults_in_rows import a_slots_history_stays, one_generator_for_all

from machd.capabilities.evidence import Outcome
from machd.clock import SystemClock
from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd_probes.prober import loaded_subject, run_check
from machd_probes.subject import Subject

_CHECK = "sampling_isolation"
_FEW_TOKENS, _FLAT_TOKENS = 256, 49152
_ROUNDING = 1e-4
"""In nats: less than what a probe tolerates, more than what decides between twins."""


def _llama(vocabulary_tokens: int) -> Module:
    import_mlx_lm()
    from mlx_lm.models import llama  # noqa: PLC0415 - after import_mlx_lm()

    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary_tokens,
        tie_word_embeddings=True,
    )
    mx.random.seed(7)
    model: Module = llama.Model(arguments)
    mx.eval(model.parameters())
    return model


def _subject(model: Module) -> Subject:
    description = describe_model(
        model,
        model_id="random",
        architecture="llama",
        context_tokens=512,
        eos_token_ids=frozenset(),
    )
    engine = make_engine(LoadedModel(model, FakeTokenizer(), description), max_rows=8)
    return loaded_subject(engine, model)


def _outcome(subject: Subject) -> tuple[Outcome, str]:
    result = run_check(subject, _CHECK, SystemClock())
    subject.engine.close()
    return result.outcome, result.detail


def _round_in_company(patch: pytest.MonkeyPatch, model: Module, off_by: mx.array) -> None:
    """Add so many nats to the logits of each token wherever a row is not alone."""
    right: Callable[..., mx.array] = type(model).__call__

    def call(self: Any, token_ids: mx.array, **others: Any) -> mx.array:
        logits = right(self, token_ids, **others)
        return logits + off_by if token_ids.shape[0] > 1 else logits

    patch.setattr(type(model), "__call__", call)


def _with_twins(patch: pytest.MonkeyPatch, raised_by: float) -> Subject:
    """Every token has a twin as likely as itself, which company makes more likely by so many nats."""
    model = _llama(_FEW_TOKENS)
    embedding = model.model.embed_tokens
    embedding.weight[1::2] = embedding.weight[::2]
    _round_in_company(patch, model, raised_by * (mx.arange(_FEW_TOKENS) % 2))
    return _subject(model)


def test_draws_from_a_flat_distribution_may_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 49,152 tokens alike has less of the distribution than rounding moves its edge."""
    model = _llama(_FLAT_TOKENS)
    _round_in_company(monkeypatch, model, _ROUNDING * mx.linspace(-1, 1, _FLAT_TOKENS))
    assert _outcome(_subject(model)) == (Outcome.PASSED, "")


@pytest.mark.parametrize("vocabulary_tokens", [_FEW_TOKENS, _FLAT_TOKENS])
def test_draw_with_other_noise_is_a_fault(
    vocabulary_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that draws as another seed would has tokens that no rounding chooses, on flat models too."""
    subject = _subject(_llama(vocabulary_tokens))
    one_generator_for_all(monkeypatch)
    assert _outcome(subject)[0] is Outcome.FAILED


def test_history_of_another_row_is_a_fault_on_a_flat_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take the most likely token count what their slot said before."""
    subject = _subject(_llama(_FLAT_TOKENS))
    a_slots_history_stays(monkeypatch)
    assert _outcome(subject)[0] is Outcome.FAILED


def test_tokens_as_likely_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two twins is said is rounding's to choose."""
    assert _outcome(_with_twins(monkeypatch, _ROUNDING)) == (Outcome.PASSED, "")


def test_a_token_that_is_less_likely_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as much is no rounding."""
    outcome, detail = _outcome(_with_twins(monkeypatch, 100 * _ROUNDING))
    assert outcome is Outcome.FAILED
    assert "other tokens" in detail
