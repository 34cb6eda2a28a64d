"""A checkpoint is a reranker by its files' word or by the operator's, and never by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.reranker import read_reranker
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.reranker import DEFAULT_INSTRUCTION, RerankerDescription
from machd.engine.protocol.tokenizer import ChatMessages
from machd.errors import SettingsError

_MODULE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
_TOKENS = {"true_token_id": 89, "false_token_id": 78}


class _Plain(FakeTokenizer):
    """A chat template that shows the last message alone, as one without a pair's roles may."""

    def render_chat(self, messages: ChatMessages, **_: object) -> str:
        return str(messages[-1]["content"])


class _Qwen(_Plain):
    """Tokens for every word of Qwen3-Reranker's prompt."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        words = {"yes": 9, "no": 8, "<|im_start|>": 1, "<|im_end|>": 2, "<think>": 3, "</think>": 4}
        if text in words:
            return [words[text]]
        return super().encode(text, add_special_tokens=add_special_tokens)


def _source(directory: Path) -> ModelSource:
    return ModelSource(SourceKind.DIRECTORY, directory, "Qwen3-Reranker-0.6B")


def _write(
    directory: Path, *, score: Any = _TOKENS, path: str = "1_LogitScore", **options: Any
) -> None:
    modules = [
        {
            "idx": 0,
            "path": "",
            "type": "sentence_transformers.base.modules.transformer.Transformer",
        },
        {"idx": 1, "path": path, "type": _MODULE},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(options))


def test_files_of_sentence_transformers_make_a_reranker(tmp_path: Path) -> None:
    """Its two tokens, its default prompt, and its chat template."""
    _write(tmp_path, prompts={"query": "Judge."}, default_prompt_name="query")
    found = read_reranker(_source(tmp_path), FakeTokenizer(), kind="auto")
    assert found == (RerankerDescription(89, 78, "Judge.", has_template=True), ())


def test_instruction_is_qwen3s_where_the_files_name_none(tmp_path: Path) -> None:
    """A prompt that is no default one is not used unasked."""
    _write(tmp_path, prompts={"query": "Judge."}, default_prompt_name=None)
    found, _ = read_reranker(_source(tmp_path), FakeTokenizer(), kind="auto")
    assert found is not None
    assert found.instruction == DEFAULT_INSTRUCTION


def test_name_makes_no_reranker(tmp_path: Path) -> None:
    """Nor do the modules of an encoder."""
    assert read_reranker(_source(tmp_path), _Qwen(), kind="auto") == (None, ())
    (tmp_path / "modules.json").write_text(
        '[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    assert read_reranker(_source(tmp_path), _Qwen(), kind="auto") == (None, ())


@pytest.mark.parametrize(
    ("written", "note"),
    [
        ({"score": {"true_token_id": 9454, "false_token_id": None}}, "no token"),
        ({"score": {"true_token_id": 89, "false_token_id": None}}, "no false_token_id"),
        ({"score": {**_TOKENS, "false_token_id": -1}}, "no token"),
        ({"score": {**_TOKENS, "true_token_id": "yes"}}, "no token"),
        ({"score": [1]}, "JSON object"),
        ({"path": "../1_LogitScore"}, "outside the checkpoint"),
    ],
    ids=str,
)
def test_reranker_that_cannot_be_served_generates_all_the_same(
    tmp_path: Path, written: dict[str, Any], note: str
) -> None:
    """A note says why it ranks nothing."""
    _write(tmp_path, **written)
    found, notes = read_reranker(_source(tmp_path), FakeTokenizer(), kind="auto")
    assert found is None
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[1, null]", '"a"'], ids=len)
def test_list_of_modules_that_is_none_makes_no_reranker(tmp_path: Path, content: str) -> None:
    """Whatever the file holds, the model is served."""
    (tmp_path / "modules.json").write_text(content)
    assert read_reranker(_source(tmp_path), FakeTokenizer(), kind="auto")[0] is None


def test_template_without_the_pairs_roles_is_no_rerankers(tmp_path: Path) -> None:
    """The files promise one that has them; another prompt would rank badly without a word."""
    _write(tmp_path)
    found, notes = read_reranker(_source(tmp_path), _Plain(), kind="auto")
    assert found is None
    assert "query" in notes[0]


def test_setting_makes_a_reranker(tmp_path: Path) -> None:
    """With Qwen3-Reranker's prompt, unless a chat template has the pair's roles; also of a GGUF file."""
    expected = RerankerDescription(9, 8, has_template=False), ()
    assert read_reranker(_source(tmp_path), _Qwen(), kind="reranker") == expected
    gguf = ModelSource(SourceKind.GGUF, tmp_path / "model.gguf", "m")
    assert read_reranker(gguf, _Qwen(), kind="reranker") == expected


class _OfAnyRole(_Qwen):
    """A chat template that shows messages of whatever role, as most do."""

    def render_chat(self, messages: ChatMessages, **_: object) -> str:
        return "".join(f"{one['role']}: {one['content']}" for one in messages)


class _OfPairs(_Qwen):
    """A reranker's chat template."""

    def render_chat(self, messages: ChatMessages, **_: object) -> str:
        return "".join(
            f"{one['content']};" for one in messages if one["role"] in ("query", "document")
        )


def test_setting_takes_a_template_for_pairs_alone(tmp_path: Path) -> None:
    """One that shows every role is that of chats, and the model card's prompt another one."""
    for tokenizer, has_template in ((_OfAnyRole(), False), (_OfPairs(), True)):
        found, _ = read_reranker(_source(tmp_path), tokenizer, kind="reranker")
        assert found is not None
        assert found.has_template == has_template


def test_setting_is_refused_for_a_model_without_the_prompts_tokens(tmp_path: Path) -> None:
    """A model that never saw them would rank by chance."""
    with pytest.raises(SettingsError, match=r"model\.kind"):
        read_reranker(_source(tmp_path), _Plain(), kind="reranker")
