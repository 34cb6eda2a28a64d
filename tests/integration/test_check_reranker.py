"""``machd check`` of models that generate text and score documents by two tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from unit.engine.tiny_llama import MERGES, TinyLlama

from machd.cli.check import check
from machd.cli.check_document import ModelCheck
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.protocol.reranker import DEFAULT_INSTRUCTION
from machd.errors import SettingsError

_TEMPLATE = """\
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"""
_OF_MESSAGES = "{%- for message in messages if message['role'] == 'user' %}{{ message['content'] }}{% endfor %}"
_MODULES = [
    {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    },
]


@pytest.fixture(autouse=True, scope="module")
def _whole_mlx_lm() -> None:
    """The command alone imports less of it, which other tests of this process need."""
    import_mlx_lm()


_ADDED = ("<think>", "</think>", "yes", "no")
"""Of what Qwen3-Reranker's prompt says; in place of the tokenizer's merges."""


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    """A model that generates, without a word of reranking, whose tokenizer has Qwen's special tokens."""
    path = TinyLlama.save(tmp_path / "tiny").path
    tokenizer = json.loads((path / "tokenizer.json").read_text("utf-8"))
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    tokenizer["model"]["merges"] = []
    for token, merge in zip(_ADDED, MERGES, strict=False):
        vocabulary[token] = vocabulary.pop("".join(merge))
        added.append({**added[0], "id": vocabulary[token], "content": token, "special": False})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return path


def _name_reranker(directory: Path, template: str, tokens: dict[str, int], **options: Any) -> None:
    (directory / "chat_template.jinja").write_text(template)
    (directory / "modules.json").write_text(json.dumps(_MODULES))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(options))


def _token_ids(directory: Path, *texts: str) -> list[int]:
    vocabulary = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return [int(vocabulary[one]) for one in texts]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(check, [*arguments])


def _row(result: Result) -> ModelCheck:
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=ModelCheck, strict=True)


def test_files_of_sentence_transformers_are_named(model: Path) -> None:
    """Two tokens as text, the instruction and whose prompt, in JSON and as a table."""
    true_token_id, false_token_id = _token_ids(model, "1", "0")
    tokens = {"true_token_id": true_token_id, "false_token_id": false_token_id}
    prompts = {"query": "Judge.\x1b[31m"}
    _name_reranker(model, _TEMPLATE, tokens, prompts=prompts, default_prompt_name="query")
    found = _row(_run("--json", str(model))).reranker
    assert found is not None
    assert (found.true_token, found.false_token) == ("1", "0")
    assert (found.prompt, found.instruction) == ("chat_template", prompts["query"])
    result = _run(str(model))
    said = " ".join(result.output.split())
    assert "kind scores documents (a reranker that generates), and generates text" in said
    assert "scores '1' against '0', with the prompt of its chat template" in said
    assert "instruction 'Judge." in said
    assert "\x1b" not in result.output


def test_the_operators_word_is_enough(model: Path) -> None:
    """With model.kind a model without such files is one, with Qwen3-Reranker's prompt; without it, it is none."""
    plain = _row(_run("--json", str(model)))
    assert plain.reranker is None
    found = _row(_run("--json", "--model-kind", "reranker", str(model))).reranker
    assert found is not None
    assert (found.true_token, found.false_token, found.prompt) == ("yes", "no", "qwen3")
    assert found.instruction == DEFAULT_INSTRUCTION
    said = " ".join(_run("--model-kind", "reranker", str(model)).output.split())
    assert "scores 'yes' against 'no', with the prompt of Qwen3-Reranker" in said


@pytest.mark.parametrize(
    ("template", "tokens", "words"),
    [
        (_OF_MESSAGES, {"true_token_id": 20, "false_token_id": 21}, "shows no query and document"),
        (_TEMPLATE, {"true_token_id": 20}, "no false_token_id"),
        (_TEMPLATE, {"true_token_id": 20, "false_token_id": 1 << 30}, "no token of the tokenizer"),
    ],
)
def test_a_reranker_that_cannot_be_served_is_a_note(
    model: Path, template: str, tokens: dict[str, int], words: str
) -> None:
    """The model generates all the same, and the reason is the one that serve logs."""
    _name_reranker(model, template, tokens)
    found = _row(_run("--json", str(model)))
    assert found.reranker is None
    (note,) = (one for one in found.notes if "reranking is refused" in one)
    assert words in note


def test_a_model_without_the_prompts_tokens_is_refused_as_a_reranker(model: Path) -> None:
    """What serve refuses, check refuses, in the same words."""
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["added_tokens"] = [
        one for one in tokenizer["added_tokens"] if one["content"] != "<think>"
    ]
    path.write_text(json.dumps(tokenizer), "utf-8")
    result = _run("--model-kind", "reranker", str(model))
    assert isinstance(result.exception, SettingsError)
    assert "'<think>'" in str(result.exception.problems)
