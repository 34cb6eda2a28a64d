"""A BERT too small to cost anything, as sentence-transformers saves one that embeds and as transformers saves a classifier."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

TINY_DIMENSIONS = 16
"""Of its vectors."""

TINY_MAX_TOKENS = 24
"""Of a text, special tokens included."""

PROMPTS = {"query": "find ", "document": "keep "}
"""Of the checkpoint that embeds."""

_LAYERS = 2
_POSITIONS = 32
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:!?"
_WORDS = (*_SPECIAL, *_LETTERS, *(f"##{one}" for one in _LETTERS))
TINY_VOCABULARY_TOKENS = len(_WORDS)


def write_tiny_embedder(
    directory: Path,
    *,
    is_normalised: bool = True,
    is_matryoshka: bool = False,
    prompts: Mapping[str, str] | None = None,
    seed: int = 0,
    fill: float | None = None,
) -> Path:
    """Write a checkpoint that makes vectors by mean pooling.

    Args:
        directory: Made if it is not there.
        is_normalised: Whether its vectors have length 1.
        is_matryoshka: Whether they may be cut.
        prompts: Its prompts by name; none of them unless given.
        seed: Of the random weights.
        fill: A number in place of every weight of the first layer, such as NaN.
    """
    kinds = ("Transformer", "Pooling", *(("Normalize",) if is_normalised else ()))
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(directory, {"architectures": ["BertModel"], "is_matryoshka": is_matryoshka}, seed, fill)
    _write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir()
    _write_json(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": TINY_DIMENSIONS, "pooling_mode_mean_tokens": True},
    )
    _write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": TINY_MAX_TOKENS, "do_lower_case": False},
    )
    _write_json(
        directory / "config_sentence_transformers.json",
        {"prompts": dict(prompts or {}), "default_prompt_name": None},
    )
    return directory


def write_tiny_classifier(directory: Path, labels: Sequence[str], *, seed: int = 0) -> Path:
    """Write a classifier of texts; one label makes it a cross-encoder."""
    config = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(index): one for index, one in enumerate(labels)},
        "label2id": {one: index for index, one in enumerate(labels)},
        "max_position_embeddings": TINY_MAX_TOKENS,
    }
    return _write(directory, config, seed, None, labels=len(labels))


def _write(
    directory: Path,
    config: Mapping[str, object],
    seed: int,
    fill: float | None,
    *,
    labels: int = 0,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    positions = int(str(config.get("max_position_embeddings", _POSITIONS)))
    weights = _weights(seed, positions)
    if labels:
        weights = {f"bert.{name}": one for name, one in weights.items()}
        random = np.random.default_rng(seed + 1)
        weights["classifier.weight"] = _random(random, labels, TINY_DIMENSIONS)
        weights["classifier.bias"] = _random(random, labels)
    if fill is not None:
        name = next(one for one in weights if "layer.0.attention.self.query.weight" in one)
        weights[name] = np.full_like(weights[name], fill)
    save_file(weights, directory / "model.safetensors")
    _write_json(
        directory / "config.json",
        {
            "model_type": "bert",
            "hidden_act": "gelu",
            "hidden_size": TINY_DIMENSIONS,
            "intermediate_size": 2 * TINY_DIMENSIONS,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": _POSITIONS,
            "num_attention_heads": 2,
            "num_hidden_layers": _LAYERS,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "vocab_size": TINY_VOCABULARY_TOKENS,
            **config,
        },
    )
    _write_tokenizer(directory)
    return directory


def _weights(seed: int, positions: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    width, inner = TINY_DIMENSIONS, 2 * TINY_DIMENSIONS
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (TINY_VOCABULARY_TOKENS, width),
        "embeddings.position_embeddings.weight": (positions, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "pooler.dense.weight": (width, width),
        "pooler.dense.bias": (width,),
    }
    for layer in range(_LAYERS):
        at = f"encoder.layer.{layer}"
        for name, outputs, inputs in (
            ("attention.self.query", width, width),
            ("attention.self.key", width, width),
            ("attention.self.value", width, width),
            ("attention.output.dense", width, width),
            ("intermediate.dense", inner, width),
            ("output.dense", width, inner),
        ):
            shapes[f"{at}.{name}.weight"] = (outputs, inputs)
            shapes[f"{at}.{name}.bias"] = (outputs,)
    weights = {name: _random(random, *shape) for name, shape in shapes.items()}
    norms = ["embeddings.LayerNorm"]
    for layer in range(_LAYERS):
        norms += [
            f"encoder.layer.{layer}.{one}.LayerNorm" for one in ("attention.output", "output")
        ]
    for norm in norms:
        weights[f"{norm}.weight"] = np.ones(width, np.float32)
        weights[f"{norm}.bias"] = np.zeros(width, np.float32)
    return weights


def _random(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return (random.standard_normal(shape) * 0.5).astype(np.float32)


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "model_max_length": TINY_MAX_TOKENS,
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "mask_token": "[MASK]",
        },
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
