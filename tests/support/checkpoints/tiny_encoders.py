"""Encoders too small to cost anything, in the layout of transformers and sentence-transformers, one of each family.

Every weight follows from its name and place by whole numbers, so that any program writes the same files: the reference vectors
of ``tests/unit/engine/encoding/reference_vectors.json`` were computed of these by transformers 5.24 in float32, with pooling, dense
layers and normalisation of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Weights = dict[str, NDArray[np.float32]]
Shapes = Mapping[str, tuple[int, ...]]

VOCABULARY_TOKENS = 96
_HIDDEN, _INNER, _HEADS, _LAYERS = 32, 48, 4, 3
_HEAD_DIM = _HIDDEN // _HEADS
_FIRST_TOKEN = 10
"""Ids below stand for special tokens in some families."""

LENGTHS = (1, 2, 19, 7, 33, 40)
"""Tokens of the texts that the reference vectors are of; most are longer than the windows of 8."""


@dataclass(frozen=True)
class TinyEncoder:
    """One checkpoint.

    Attributes:
        config: Its ``config.json``.
        shapes: Of its tensors.
        pooling: Name in ``1_Pooling/config.json``; empty for a classifier.
        dense: Activations of dense layers behind pooling, each of which changes the width.
        offset: What norms' weights are around: 0 where a layer adds 1 itself.
        prompts: Of ``config_sentence_transformers.json``.
    """

    config: Mapping[str, object]
    shapes: Shapes
    pooling: str = ""
    is_normalised: bool = True
    dense: tuple[str, ...] = ()
    norm_offset: float = 1.0
    prompts: Mapping[str, str] = field(default_factory=dict)


def token_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens of a text, none of them special."""
    numbers = _numbers(f"text {length} {seed}", length)
    span = VOCABULARY_TOKENS - _FIRST_TOKEN
    return tuple(int(_FIRST_TOKEN + (one + 1) / 2 * span) for one in numbers)


def write_encoder(directory: Path, encoder: TinyEncoder, **changes: object) -> Path:
    """Write a checkpoint, with other values in ``config.json`` where some are given; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: _weight(name, shape, encoder.norm_offset) for name, shape in encoder.shapes.items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _write(directory / "config.json", {**encoder.config, **changes})
    if encoder.pooling:
        _write_modules(directory, encoder)
    if encoder.prompts:
        _write(directory / "config_sentence_transformers.json", {"prompts": encoder.prompts})
    return directory


def _write_modules(directory: Path, encoder: TinyEncoder) -> None:
    kinds = ["Transformer", "Pooling", *("Dense" for _ in encoder.dense)]
    kinds += ["Normalize"] if encoder.is_normalised else []
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    flag = f"pooling_mode_{encoder.pooling}"
    _write(directory / "1_Pooling/config.json", {"word_embedding_dimension": _HIDDEN, flag: True})
    width = _HIDDEN
    for place, activation in enumerate(encoder.dense):
        out = width * 2 if place % 2 == 0 else width // 2
        has_bias = place % 2 == 1
        folder = directory / f"{place + 2}_Dense"
        config = {
            "in_features": width,
            "out_features": out,
            "bias": has_bias,
            "activation_function": activation,
        }
        _write(folder / "config.json", config)
        shapes = {"linear.weight": (out, width)} | ({"linear.bias": (out,)} if has_bias else {})
        weights = {name: _weight(f"{place} {name}", shape, 1.0) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        width = out


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _numbers(name: str, count: int) -> NDArray[np.float64]:
    """Numbers in [-1, 1) that follow from a name: SplitMix64 of its CRC and the place."""
    with np.errstate(over="ignore"):
        state = (
            np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
        ) * (np.uint64(0x9E3779B97F4A7C15))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0


def _weight(name: str, shape: tuple[int, ...], norm_offset: float) -> NDArray[np.float32]:
    """Weights large enough that attention is not flat, and norms and biases that are not 1 and 0."""
    numbers = _numbers(name, int(np.prod(shape))).reshape(shape)
    if len(shape) == 1:
        is_norm = "norm" in name.lower() and name.endswith("weight")
        return (norm_offset * is_norm + 0.3 * numbers).astype(np.float32)
    gain = 1.0 if "embed" in name else 2.0 * np.sqrt(3.0 / shape[-1])
    return (gain * numbers).astype(np.float32)


def _bert_shapes(positions: int, types: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY_TOKENS, _HIDDEN),
        "embeddings.position_embeddings.weight": (positions, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (types, _HIDDEN),
        **_with_bias("embeddings.LayerNorm", (_HIDDEN,)),
    }
    for layer in range(_LAYERS):
        place = f"encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            shapes |= _with_bias(place + name, (_HIDDEN, _HIDDEN))
        shapes |= _with_bias(place + "attention.output.dense", (_HIDDEN, _HIDDEN))
        shapes |= _with_bias(place + "attention.output.LayerNorm", (_HIDDEN,))
        shapes |= _with_bias(place + "intermediate.dense", (_INNER, _HIDDEN))
        shapes |= _with_bias(place + "output.dense", (_HIDDEN, _INNER))
        shapes |= _with_bias(place + "output.LayerNorm", (_HIDDEN,))
    return {prefix + name: shape for name, shape in shapes.items()}


def _with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _modernbert_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.tok_embeddings.weight": (VOCABULARY_TOKENS, _HIDDEN),
        "model.embeddings.norm.weight": (_HIDDEN,),
        "model.final_norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS + 1):
        place = f"model.layers.{layer}."
        if layer:
            shapes[place + "attn_norm.weight"] = (_HIDDEN,)
        shapes[place + "attn.Wqkv.weight"] = (3 * _HIDDEN, _HIDDEN)
        shapes[place + "attn.Wo.weight"] = (_HIDDEN, _HIDDEN)
        shapes[place + "mlp_norm.weight"] = (_HIDDEN,)
        shapes[place + "mlp.Wi.weight"] = (2 * _INNER, _HIDDEN)
        shapes[place + "mlp.Wo.weight"] = (_HIDDEN, _INNER)
    return shapes


def _decoder_shapes(
    prefix: str, *, head_norms: bool = False, four_norms: bool = False
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY_TOKENS, _HIDDEN),
        "norm.weight": (_HIDDEN,),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if four_norms else []
    for layer in range(_LAYERS):
        place = f"layers.{layer}."
        shapes |= {place + f"{name}.weight": (_HIDDEN,) for name in norms}
        attention = place + "self_attn."
        shapes[attention + "q_proj.weight"] = (_HEADS * _HEAD_DIM, _HIDDEN)
        shapes[attention + "k_proj.weight"] = (_HEADS // 2 * _HEAD_DIM, _HIDDEN)
        shapes[attention + "v_proj.weight"] = (_HEADS // 2 * _HEAD_DIM, _HIDDEN)
        shapes[attention + "o_proj.weight"] = (_HIDDEN, _HEADS * _HEAD_DIM)
        if head_norms:
            shapes[attention + "q_norm.weight"] = (_HEAD_DIM,)
            shapes[attention + "k_norm.weight"] = (_HEAD_DIM,)
        shapes[place + "mlp.gate_proj.weight"] = (_INNER, _HIDDEN)
        shapes[place + "mlp.up_proj.weight"] = (_INNER, _HIDDEN)
        shapes[place + "mlp.down_proj.weight"] = (_HIDDEN, _INNER)
    return {prefix + name: shape for name, shape in shapes.items()}


_SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "max_position_embeddings": 64,
}
_BERT: Mapping[str, object] = {
    **_SIZES,
    "model_type": "bert",
    "architectures": ["BertModel"],
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-3,
    "pad_token_id": 0,
}
_ROBERTA: Mapping[str, object] = {
    **_BERT,
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
_MODERNBERT: Mapping[str, object] = {
    **_SIZES,
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "num_hidden_layers": _LAYERS + 1,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "norm_eps": 1e-3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DECODER: Mapping[str, object] = {
    **_SIZES,
    "num_key_value_heads": _HEADS // 2,
    "head_dim": _HEAD_DIM,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_CLASSIFIER_OF_ROBERTA = {
    **_with_bias("classifier.dense", (_HIDDEN, _HIDDEN)),
    **_with_bias("classifier.out_proj", (3, _HIDDEN)),
}
_HEAD_OF_MODERNBERT: Shapes = {
    "head.dense.weight": (_HIDDEN, _HIDDEN),
    "head.norm.weight": (_HIDDEN,),
    **_with_bias("classifier", (1, _HIDDEN)),
}

TINY_ENCODERS: Mapping[str, TinyEncoder] = {
    "bert": TinyEncoder(
        _BERT, _bert_shapes(64, 2), "mean_tokens", prompts={"query": "query: ", "document": ""}
    ),
    "bert-cls": TinyEncoder(_BERT, _bert_shapes(64, 2), "cls_token", is_normalised=False),
    "bert-max": TinyEncoder(_BERT, _bert_shapes(64, 2, "bert."), "max_tokens"),
    "bert-weighted": TinyEncoder(_BERT, _bert_shapes(64, 2), "weightedmean_tokens"),
    "bert-root": TinyEncoder(
        _BERT, _bert_shapes(64, 2), "mean_sqrt_len_tokens", is_normalised=False
    ),
    "xlm-roberta": TinyEncoder(
        _ROBERTA,
        _bert_shapes(64, 1),
        "mean_tokens",
        dense=("torch.nn.modules.activation.Tanh",),
    ),
    "roberta": TinyEncoder(
        {**_ROBERTA, "model_type": "roberta", "architectures": ["RobertaModel"]},
        _bert_shapes(64, 1),
        "cls_token",
    ),
    "modernbert": TinyEncoder(_MODERNBERT, _modernbert_shapes(), "cls_token"),
    "gemma3_text": TinyEncoder(
        {
            **_DECODER,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3TextModel"],
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 12,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            },
        },
        _decoder_shapes("", head_norms=True, four_norms=True),
        "mean_tokens",
        dense=(
            "torch.nn.modules.linear.Identity",
            "torch.nn.modules.activation.GELU",
        ),
        norm_offset=0.0,
    ),
    "qwen3": TinyEncoder(
        {**_DECODER, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        _decoder_shapes("", head_norms=True),
        "lasttoken",
    ),
    "mistral": TinyEncoder(
        {
            **_DECODER,
            "model_type": "mistral",
            "architectures": ["MistralModel"],
            "sliding_window": 8,
        },
        _decoder_shapes("model."),
        "lasttoken",
    ),
    "llama": TinyEncoder(
        {**_DECODER, "model_type": "llama", "architectures": ["LlamaModel"], "is_causal": False},
        _decoder_shapes(""),
        "mean_tokens",
    ),
    "bert-reranker": TinyEncoder(
        {
            **_BERT,
            "architectures": ["BertForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
            "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        },
        _bert_shapes(64, 2, "bert.")
        | _with_bias("bert.pooler.dense", (_HIDDEN, _HIDDEN))
        | _with_bias("classifier", (1, _HIDDEN)),
    ),
    "xlm-roberta-classifier": TinyEncoder(
        {
            **_ROBERTA,
            "architectures": ["XLMRobertaForSequenceClassification"],
            "id2label": {"0": "sad", "1": "neutral", "2": "glad"},
        },
        _bert_shapes(64, 1, "roberta.") | _CLASSIFIER_OF_ROBERTA,
    ),
    "modernbert-reranker": TinyEncoder(
        {
            **_MODERNBERT,
            "architectures": ["ModernBertForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
            "classifier_pooling": "mean",
        },
        {**_modernbert_shapes(), **_HEAD_OF_MODERNBERT},
    ),
}
"""The checkpoints by name."""

PAIRED = ("bert-reranker",)
"""Those whose texts are pairs in the references, split at half of their tokens."""
