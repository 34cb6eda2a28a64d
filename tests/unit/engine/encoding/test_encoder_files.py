"""What a checkpoint's own files say of an encoder, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.engines.loaded_encoder import encoder_files, encoder_source

from machd.engine.encoding.encoder_files import find_encoder
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.encoder import Activation, EncoderTask
from machd.errors import ModelArchitectureError, ModelError, ModelFormatError
from machd_probes.encoder_matrix.tiny_checkpoint import write_encoder
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "pooling", "is_normalised", "dimensions", "is_causal"),
    [
        ("bert", "mean", True, 32, False),
        ("bert-cls", "cls", False, 32, False),
        ("bert-root", "mean_sqrt_len_tokens", False, 32, False),
        ("xlm-roberta", "mean", True, 64, False),
        ("gemma3_text", "mean", True, 32, False),
        ("qwen3", "last", True, 32, True),
        ("llama", "mean", True, 32, False),
    ],
)
def test_pooling_and_what_follows_are_as_the_files_say(
    name: str,
    pooling: str,
    is_normalised: object,
    dimensions: int,
    is_causal: object,
    tmp_path: Path,
) -> None:
    """The description has the pooling, the length and the width of vectors that the folders say."""
    found = encoder_files(write_encoder(tmp_path / name, TINY_ENCODERS[name])).description
    assert found.task is EncoderTask.EMBED
    assert (found.pooling, found.is_normalised) == (pooling, is_normalised)
    assert (found.dimensions, found.is_causal) == (dimensions, is_causal)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, Activation.SOFTMAX),
        ({"problem_type": "multi_label_classification"}, Activation.SIGMOID),
        ({"problem_type": "regression"}, Activation.NONE),
        ({"id2label": {"0": "match"}}, Activation.SIGMOID),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, Activation.SIGMOID),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            Activation.NONE,
        ),
    ],
)
def test_activation_of_a_classifier_is_the_files_or_of_its_kind_of_problem(
    changes: Mapping[str, object], activation: Activation, tmp_path: Path
) -> None:
    """An activation that is named counts; else the kind of problem and the number of labels."""
    name = "xlm-roberta-classifier"
    found = encoder_files(write_encoder(tmp_path, TINY_ENCODERS[name], **changes)).description
    assert found.task is EncoderTask.CLASSIFY
    assert found.activation is activation
    assert found.dimensions == len(found.labels)


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Labels follow their numbers, not their order in the file or of their digits."""
    labels = {str(one): f"class {one}" for one in reversed(range(12))}
    encoder = TINY_ENCODERS["xlm-roberta-classifier"]
    found = encoder_files(write_encoder(tmp_path, encoder, id2label=labels)).description
    assert found.labels == tuple(f"class {one}" for one in range(12))


@pytest.mark.parametrize(
    ("name", "files", "tokens"),
    [
        ("bert", {}, 64),
        ("xlm-roberta", {}, 62),
        ("bert", {"sentence_bert_config.json": {"max_seq_length": 24}}, 24),
        ("bert", {"tokenizer_config.json": {"model_max_length": 48}}, 48),
        (
            "bert",
            {
                "sentence_bert_config.json": {"max_seq_length": None},
                "tokenizer_config.json": {"model_max_length": 1e30},
            },
            64,
        ),
        ("xlm-roberta", {"sentence_bert_config.json": {"max_seq_length": 512}}, 62),
    ],
)
def test_length_is_the_files_and_never_beyond_the_positions(
    name: str, files: Mapping[str, object], tokens: int, tmp_path: Path
) -> None:
    """Texts are cut where the files say, and where positions end; a file that says more is noted."""
    directory = write_encoder(tmp_path, TINY_ENCODERS[name])
    for file, value in files.items():
        _write(directory / file, value)
    found = encoder_files(directory)
    assert found.description.max_input_tokens == tokens
    assert any("512" in note for note in found.notes) == ("512" in json.dumps(files))


def test_prompts_are_those_of_the_file(tmp_path: Path) -> None:
    """Prompts have their names and texts, and the default one its name."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    assert encoder_files(directory).description.prompts == {"query": "query: ", "document": ""}
    assert encoder_files(directory).description.default_prompt is None
    said = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    _write(directory / "config_sentence_transformers.json", said)
    assert encoder_files(directory).description.default_prompt == "query"


@pytest.mark.parametrize(
    ("transformer", "normalizer", "lowercases"),
    [
        ({"do_lower_case": True}, {"type": "NFC"}, True),
        ({"do_lower_case": True}, {"type": "BertNormalizer", "lowercase": True}, False),
        (
            {"do_lower_case": True},
            {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
            False,
        ),
        ({"do_lower_case": False}, None, False),
    ],
)
def test_letters_are_made_small_where_the_file_asks_and_the_tokenizer_does_not(
    transformer: object, normalizer: object, lowercases: object, tmp_path: Path
) -> None:
    """``do_lower_case`` counts once."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    _write(directory / "sentence_bert_config.json", transformer)
    _write(directory / "tokenizer.json", {"normalizer": normalizer})
    assert encoder_files(directory).lowercases is lowercases


def test_matryoshka_is_what_the_files_say(tmp_path: Path) -> None:
    """Vectors may be cut where the checkpoint says that it was trained for it, and else not."""
    encoder = TINY_ENCODERS["bert"]
    directory = write_encoder(tmp_path, encoder)
    assert not encoder_files(directory).description.has_shorter_vectors
    write_encoder(tmp_path, encoder, matryoshka_dimensions=[32, 16])
    assert encoder_files(directory).description.has_shorter_vectors


def test_a_model_that_generates_is_no_encoder(tmp_path: Path) -> None:
    """A decoder without a pooling, a GGUF file and a directory without a configuration are left to others."""
    directory = write_encoder(tmp_path / "qwen3", TINY_ENCODERS["qwen3"])
    (directory / "modules.json").unlink()
    assert find_encoder(encoder_source(directory)) is None
    transformer = {"type": "sentence_transformers.models.Transformer", "path": ""}
    _write(directory / "modules.json", [transformer])
    assert find_encoder(encoder_source(directory)) is None
    score = {
        "type": "sentence_transformers.cross_encoder.modules.LogitScore",
        "path": "1_LogitScore",
    }
    _write(directory / "modules.json", [transformer, score])
    assert find_encoder(encoder_source(directory)) is None
    assert find_encoder(ModelSource(SourceKind.GGUF, tmp_path / "a.gguf", "a")) is None
    assert find_encoder(encoder_source(tmp_path)) is None


_POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
_NO_POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False}


@pytest.mark.parametrize(
    ("name", "changes", "files", "words"),
    [
        ("bert", {"hidden_act": "relu"}, {}, ("hidden_act", "relu", "gelu")),
        ("bert", {"position_embedding_type": "relative_key"}, {}, ("position_embedding_type",)),
        ("xlm-roberta", {"pad_token_id": 96}, {}, ("pad_token_id", "95")),
        ("bert", {"is_decoder": True}, {}, ("is_decoder",)),
        ("bert", {"max_position_embeddings": 1e9}, {}, ("max_position_embeddings",)),
        ("bert", {"hidden_size": 48}, {}, ("1_Pooling", "32", "48")),
        ("modernbert", {"hidden_activation": "silu"}, {}, ("hidden_activation", "silu")),
        ("modernbert-reranker", {"classifier_pooling": "max"}, {}, ("classifier_pooling", "max")),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, {}, ("attn_logit_softcapping",)),
        ("qwen3", {"use_sliding_window": True}, {}, ("use_sliding_window",)),
        ("bert", {"model_type": "nomic_bert"}, {}, ("nomic_bert", "modernbert")),
        ("xlm-roberta-classifier", {"id2label": {"0": "a", "2": "b"}}, {}, ("id2label", "1")),
        ("xlm-roberta-classifier", {"id2label": {"0": "a", "1": "a"}}, {}, ("twice",)),
        ("xlm-roberta-classifier", {"id2label": []}, {}, ("id2label",)),
        (
            "xlm-roberta-classifier",
            {"sentence_transformers": {"activation_fn": "my.Act"}},
            {},
            ("my.Act",),
        ),
        (
            "bert-reranker",
            {"architectures": ["Qwen3ForSequenceClassification"]},
            {},
            ("Qwen3ForSequenceClassification", "BertForSequenceClassification"),
        ),
        ("bert", {}, {"1_Pooling/config.json": _NO_POOLING}, ("1_Pooling", "no way of pooling")),
        ("bert", {}, {"1_Pooling/config.json": {"pooling_mode": "median"}}, ("median",)),
        ("bert", {}, {"1_Pooling/config.json": {"pooling_mode_attention": True}}, ("attention",)),
        (
            "bert",
            {},
            {"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            ("include_prompt",),
        ),
        ("bert", {}, {"modules.json": {}}, ("modules.json",)),
        ("bert", {}, {"modules.json": [{"path": ""}]}, ("modules.json", "type")),
        (
            "bert",
            {},
            {"modules.json": [{"type": "custom_st.Transformer", "path": ""}, _POOLING]},
            ("custom_st.Transformer",),
        ),
        (
            "bert",
            {},
            {"modules.json": [{"type": "sentence_transformers.models.Pooling", "path": "../x"}]},
            ("outside",),
        ),
        (
            "bert",
            {},
            {"modules.json": [{"type": "sentence_transformers.models.CNN", "path": ""}, _POOLING]},
            ("CNN",),
        ),
        (
            "bert",
            {},
            {
                "modules.json": [
                    {"type": "sentence_transformers.models.Transformer", "path": "0_T"},
                    _POOLING,
                ]
            },
            ("0_T", "own folder"),
        ),
        (
            "xlm-roberta",
            {},
            {
                "2_Dense/config.json": {
                    "in_features": 16,
                    "out_features": 8,
                    "activation_function": "torch.nn.Tanh",
                }
            },
            ("2_Dense", "16", "32"),
        ),
        (
            "xlm-roberta",
            {},
            {
                "2_Dense/config.json": {
                    "in_features": 32,
                    "out_features": 8,
                    "activation_function": "my.Act",
                }
            },
            ("2_Dense", "my.Act"),
        ),
        (
            "bert",
            {},
            {"sentence_bert_config.json": {"max_seq_length": -3}},
            ("max_seq_length", "-3"),
        ),
        (
            "bert",
            {},
            {"sentence_bert_config.json": {"transformer_task": "fill-mask"}},
            ("fill-mask",),
        ),
        (
            "bert",
            {},
            {"config_sentence_transformers.json": {"prompts": {"query": 3}}},
            ("prompts",),
        ),
        (
            "bert",
            {},
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            ("default_prompt_name",),
        ),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    name: str,
    changes: Mapping[str, object],
    files: Mapping[str, object],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """A value that machd does not compute ends in an error that names it, never in a usual one in its place."""
    directory = write_encoder(tmp_path, TINY_ENCODERS[name], **changes)
    for file, value in files.items():
        _write(directory / file, value)
    with pytest.raises(ModelError) as refused:
        find_encoder(encoder_source(directory))
    assert isinstance(refused.value, ModelFormatError | ModelArchitectureError)
    for word in words:
        assert word in refused.value.message


def test_an_encoder_without_pooling_is_refused_and_says_what_is_missing(tmp_path: Path) -> None:
    """The weights of a BERT alone do not say which vector stands for a text."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    (directory / "modules.json").unlink()
    with pytest.raises(ModelFormatError, match=r"modules\.json"):
        find_encoder(encoder_source(directory))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A module without its configuration is an error that names the file."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json"):
        find_encoder(encoder_source(directory))
