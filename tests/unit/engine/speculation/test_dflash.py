"""DFlash reads a row's tokens once and in order, and drafts blocks where the package can run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from support.engines.oracle import open_draws
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind

from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.dflash import DFlashProposer
from machd.engine.speculation.dflash_package import dflash_obstacle, known_draft, load_block_draft
from machd.engine.step.ports import Proposer
from machd.errors import ModelFormatError, SettingsError
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY

BLOCK_TOKENS = 5
PROMPT = tuple((5 * i * i + i) % 90 + 1 for i in range(30))
needs_package = pytest.mark.skipif(
    find_spec("dflash_mlx") is None, reason="dflash-mlx is made for macOS on Apple GPUs alone"
)


class _Counting:
    """A draft that proposes the numbers after the last token, and remembers what it read."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, *, is_broken: bool = False) -> None:
        self.readers: list[_CountingReader] = []
        self.is_broken = is_broken

    def open(self) -> _CountingReader:
        self.readers.append(_CountingReader(is_broken=self.is_broken))
        return self.readers[-1]


class _CountingReader:
    def __init__(self, *, is_broken: bool) -> None:
        self.read_ids: list[int] = []
        self.longest = 0
        self._is_broken = is_broken

    @property
    def nbytes(self) -> int:
        return 100 * len(self.read_ids)

    def read(self, token_ids: Sequence[int]) -> None:
        assert token_ids
        self.read_ids += token_ids
        self.longest = max(self.longest, len(token_ids))

    def block_logits(self, last_token_id: int, count: int) -> mx.array:
        if self._is_broken:
            return mx.full((count, VOCABULARY_TOKENS), mx.nan)
        ids = (mx.arange(count)[:, None] + last_token_id + 1) % VOCABULARY_TOKENS
        return 10.0 * (mx.arange(VOCABULARY_TOKENS)[None] == ids)


def _proposer(draft: _Counting) -> DFlashProposer:
    return DFlashProposer(draft, open_draws=open_draws(VOCABULARY_TOKENS))


def _kind(proposer: Proposer) -> ProposerKind:
    return proposer.kind


def test_what_a_row_says_is_read_once_and_in_order() -> None:
    """All but the last token, with which the block begins, and no rejected draft."""
    draft = _Counting()
    proposer = _proposer(draft)
    assert _kind(proposer) is ProposerKind.DFLASH
    row = proposer.open(PROMPT, GREEDY)
    assert not draft.readers
    said = list(PROMPT)
    for step in ([3], [7, 8, 9], [1], [100, 101]):
        proposed = row.propose(4) or row.propose(4)  # the first time it reads the prompt
        assert proposed == tuple(said[-1] + i for i in (1, 2, 3, 4))
        row.extend(step)
        said += step
    assert row.propose(4)
    (reader,) = draft.readers
    assert reader.read_ids == said[:-1]


def test_a_proposal_is_a_block_at_the_most() -> None:
    """Asking for more gives one block; asking again without new tokens gives the same and reads nothing."""
    draft = _Counting()
    row = _proposer(draft).open([1, 2, 3], GREEDY)
    assert row.propose(64) == (4, 5, 6, 7, 8)
    assert row.propose(64) == (4, 5, 6, 7, 8)
    assert row.propose(2) == (4, 5)
    assert draft.readers[0].read_ids == [1, 2]


def test_drafts_are_sampled_as_the_row_is() -> None:
    """The row's penalties, biases, forced tokens and temperature apply to its drafts."""
    draft = _Counting()

    def propose(**params: object) -> tuple[int, ...]:
        sampling = replace(SamplingParams(temperature=0.0), **params)  # type: ignore[arg-type]
        return _proposer(draft).open([1, 2, 3], sampling).propose(3)

    assert propose() == (4, 5, 6)
    assert propose(logit_bias=((50, 20.0),)) == (50, 50, 50)
    assert propose(logit_bias=((50, 20.0),), frequency_penalty=15.0)[1:] == (5, 6)
    assert propose(forced_token_ids=(9, 9)) == (9, 9, 6)
    drawn = {propose(temperature=8.0, seed=seed) for seed in range(20)}
    assert len(drawn) > 10


def test_a_long_prompt_is_read_a_part_each_time() -> None:
    """There are no drafts until the prompt is read; the row generates tokens meanwhile."""
    draft = _Counting()
    prompt = PROMPT * 30
    row = _proposer(draft).open(prompt, GREEDY)
    said = list(prompt)
    while not (proposed := row.propose(2)):
        row.extend([77])
        said.append(77)
    (reader,) = draft.readers
    assert proposed == (78, 79)
    assert reader.read_ids == said[:-1]
    assert reader.longest == 256


def test_no_bytes_are_held_without_proposals() -> None:
    """None before the first proposal, after 256 tokens without one, or after closing; then all is read anew."""
    draft = _Counting()
    row = _proposer(draft).open([1, 2, 3], GREEDY)
    assert row.kv_bytes == 0
    row.propose(1)
    assert row.kv_bytes == 200
    row.extend([9] * 256)
    assert row.kv_bytes == 200
    row.extend([10])
    assert row.kv_bytes == 0
    while not row.propose(2):
        pass
    assert draft.readers[-1].read_ids == [1, 2, 3, *[9] * 256]
    row.close()
    assert row.kv_bytes == 0


def test_one_token_is_not_enough_to_draft_from() -> None:
    """A draft reads the target's hidden states of tokens before the last; a first token has none."""
    row = _proposer(_Counting()).open([1], GREEDY)
    assert row.propose(4) == ()
    row.extend([5])
    assert row.propose(4) == (6, 7, 8, 9)


def test_logits_that_are_not_numbers_are_a_fault() -> None:
    """The error reaches the caller, which decodes without drafts."""
    with pytest.raises(FloatingPointError):
        _proposer(_Counting(is_broken=True)).open([1, 2, 3], GREEDY).propose(4)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_package_runs_on_apple_silicon_alone(backend: str) -> None:
    """Elsewhere the reason says so, and what to set."""
    obstacle = dflash_obstacle(backend)
    assert obstacle is not None
    assert backend in obstacle
    assert "speculation.mode" in obstacle


def test_a_missing_package_is_asked_for_by_name() -> None:
    """Where it could run, the reason says what to install; with it there is none."""
    obstacle = dflash_obstacle("metal")
    if find_spec("dflash_mlx") is None:
        assert obstacle is not None
        assert "pip install dflash-mlx==" in obstacle
    else:
        assert obstacle is None


def _save_draft(directory: Path, **changes: object) -> Path:
    """A draft of random weights for the tiny gated-delta-net model, as drafts are published."""
    from dflash_mlx.model import DFlashDraftModel, DFlashDraftModelArgs  # noqa: PLC0415 - an extra

    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY_TOKENS,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "num_target_layers": 4,
        "block_size": BLOCK_TOKENS + 1,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
        **changes,
    }
    draft = DFlashDraftModel(DFlashDraftModelArgs.from_dict(config))
    mx.random.seed(1)
    drawn = tree_map(_drawn, draft.parameters())
    flat = tree_flatten(drawn)
    assert isinstance(flat, list)
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), dict(flat))
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _drawn(array: mx.array) -> mx.array:
    """Another value for a parameter, of a size that keeps the signal's."""
    noise = mx.random.normal(array.shape)
    return 1.0 + 0.3 * noise if array.ndim == 1 else noise * 2.0 / array.shape[-1] ** 0.5


@needs_package
def test_what_a_draft_of_the_package_hears_is_carried_over(tmp_path: Path) -> None:
    """A text that is read in steps, with drafts in between, gives the logits of one read at once."""
    draft = load_block_draft(loaded(TinyKind.HYBRID_GDN), _save_draft(tmp_path / "draft"))
    reader = draft.open()
    said: list[int] = []
    before: mx.array | None = None
    for step in (PROMPT, [7, 8, 9], [1], [100, 101], [4] * 20):
        said += step
        reader.read(step)
        fresh = draft.open()
        fresh.read(said)
        logits = reader.block_logits(33, BLOCK_TOKENS)
        assert mx.allclose(logits, fresh.block_logits(33, BLOCK_TOKENS), atol=1e-4)
        assert before is None or mx.abs(logits - before).max() > 0.1, "what was said matters"
        before = logits


@needs_package
def test_a_draft_of_the_package_drafts_for_rows(tmp_path: Path) -> None:
    """Whole blocks of served tokens, sampled as the row is; closing the row frees its caches."""
    served = loaded(TinyKind.HYBRID_GDN)
    draft = load_block_draft(served, _save_draft(tmp_path / "draft"))
    proposer = DFlashProposer(draft, open_draws=open_draws(served.description.vocabulary_tokens))
    sampled = SamplingParams(temperature=1.0, seed=5)
    row = proposer.open(PROMPT, sampled)
    said: list[int] = []
    for step in ([3], [7, 8, 9], [100, 101]):
        proposed = row.propose(64)
        assert len(proposed) == BLOCK_TOKENS
        assert max(proposed) < VOCABULARY_TOKENS
        fresh = proposer.open(PROMPT, sampled)
        fresh.extend(said)
        assert fresh.propose(64) == proposed
        row.extend(step)
        said += step
    assert row.kv_bytes > 0
    row.close()
    assert row.kv_bytes == 0
    proposer.close()


@needs_package
def test_a_draft_is_of_one_model(tmp_path: Path) -> None:
    """Another model's draft is refused by its number of layers or by what does not fit together."""
    served = loaded(TinyKind.HYBRID_GDN)
    for number, changes in enumerate(({"num_target_layers": 9}, {"hidden_size": 32})):
        path = _save_draft(tmp_path / f"draft-{number}", **changes)
        with pytest.raises(SettingsError, match=r"speculation\.draft_model: .* another model"):
            load_block_draft(served, path)


@needs_package
def test_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    """Whatever the package makes of it; and a model in which it cannot listen has no drafts."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"^speculation\.draft_model: "):
        load_block_draft(loaded(TinyKind.HYBRID_GDN), tmp_path)
    with pytest.raises(SettingsError, match=r"^speculation\.mode: "):
        load_block_draft(loaded(TinyKind.STANDARD), tmp_path)


@needs_package
def test_the_package_knows_drafts_by_the_models_name() -> None:
    """As its list of tested models says."""
    assert known_draft("mlx-community/Qwen3.6-27B-4bit") == "z-lab/Qwen3.6-27B-DFlash"
    assert known_draft("smollm2-135m-instruct") is None
