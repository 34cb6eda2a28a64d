"""``machd check`` of models that make vectors or labels of texts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from machd.cli.check import check
from machd.cli.check_encoder import EncoderCheck
from machd.errors import ModelFormatError
from machd_probes.encoder_matrix.tiny_checkpoint import write_encoder
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS

_NAMES = ("bert", "gemma3_text", "xlm-roberta-classifier", "bert-reranker")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(check, [*arguments])


def _words(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", ("makes vectors", "32 numbers, of length 1, pooling mean", "query, document")),
        ("bert-cls", ("not normalised, pooling cls", "64 tokens")),
        ("gemma3_text", ("gemma3_text", "32 numbers")),
        ("xlm-roberta-classifier", ("makes labels", "3: sad, neutral, glad", "softmax")),
        ("bert-reranker", ("scores pairs", "activation none")),
    ],
)
def test_the_table_names_what_the_files_say(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Kind, pooling, width, length, labels and prompts are named, and no KV cache."""
    found = _words(_run(str(write_encoder(tmp_path / name, TINY_ENCODERS[name]))))
    for one in words:
        assert one in found
    assert "KV cache" not in found


@pytest.mark.parametrize("name", _NAMES)
def test_the_document_is_what_it_is_declared_to_be(name: str, tmp_path: Path) -> None:
    """JSON decodes strictly, and its figures are those of the files."""
    directory = write_encoder(tmp_path / name, TINY_ENCODERS[name])
    result = _run("--json", str(directory))
    document = msgspec.json.decode(result.stdout, type=EncoderCheck, strict=True)
    assert document.encoder.dimensions == (len(document.encoder.labels) or 32)
    assert document.weights_bytes == document.parameters * 4 > 0
    assert document.fit.total_bytes < document.fit.device_memory_bytes
    assert document.versions.dtype == "float32"


def test_a_length_beyond_the_positions_is_noted(tmp_path: Path) -> None:
    """A file that asks for longer texts than the model has positions for is named."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    config = json.dumps({"max_seq_length": 512})
    (directory / "sentence_bert_config.json").write_text(config, encoding="utf-8")
    assert "sentence_bert_config.json says texts of 512 tokens" in _words(_run(str(directory)))


def test_what_serve_would_refuse_is_refused(tmp_path: Path) -> None:
    """An unknown value of the configuration ends the check with the error that names it."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"], hidden_act="relu")
    result = _run(str(directory))
    assert isinstance(result.exception, ModelFormatError)
    assert "hidden_act" in result.exception.message


def test_no_encoder_is_batched_or_measured(tmp_path: Path) -> None:
    """``--require batched`` does not hold for it, and ``--measure`` says that it is for other models."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    assert _run("--require", "batched", str(directory)).exit_code == 1
    assert "--measure is for models that generate" in _run("--measure", str(directory)).output


def test_an_encoder_beside_others_takes_no_kv_cache(tmp_path: Path) -> None:
    """``--fits`` adds up its weights and working memory."""
    directories = [
        str(write_encoder(tmp_path / name, TINY_ENCODERS[name])) for name in ("bert", "qwen3")
    ]
    result = _run("--fits", "--json", *directories)
    shares = json.loads(result.stdout)["models"]
    assert [one["kv_bytes"] for one in shares] == [0, 0]
    assert all(one["total_bytes"] == one["weights_bytes"] + one["working_bytes"] for one in shares)
