"""Encoders too small to cost anything, of every family and every kind of pooling and head: configurations and shapes.

Imports neither mlx nor numpy. The tests hold each to the vectors that transformers computes of the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shapes = Mapping[str, tuple[int, ...]]

VOCABULARY_TOKENS = 96
HIDDEN_NUMBERS = 32
_HIDDEN, _INNER, _HEADS, _LAYERS = HIDDEN_NUMBERS, 48, 2, 3
_HEAD_DIM = _HIDDEN // _HEADS

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
        norm_offset: What norms' weights are around: 0 where a layer adds 1 itself.
        prompts: Of ``config_sentence_transformers.json``.
    """

    config: Mapping[str, object]
    shapes: Shapes
    pooling: str = ""
    is_normalised: bool = True
    dense: tuple[str, ...] = ()
    norm_offset: float = 1.0
    prompts: Mapping[str, str] = field(default_factory=dict)


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
    prefix: str, *, head_norms: bool = False, four_norms: bool = False, has_bias: bool = False
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
        if has_bias:
            shapes[attention + "q_proj.bias"] = (_HEADS * _HEAD_DIM,)
            shapes[attention + "k_proj.bias"] = (_HEADS // 2 * _HEAD_DIM,)
            shapes[attention + "v_proj.bias"] = (_HEADS // 2 * _HEAD_DIM,)
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
    "camembert": TinyEncoder(
        {**_ROBERTA, "model_type": "camembert", "architectures": ["CamembertModel"]},
        _bert_shapes(64, 1),
        "mean_tokens",
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
    "llama_bidirec": TinyEncoder(
        {**_DECODER, "model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
        _decoder_shapes(""),
        "mean_tokens",
    ),
    "qwen2": TinyEncoder(
        {**_DECODER, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        _decoder_shapes("", has_bias=True),
        "lasttoken",
        is_normalised=False,
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
    "roberta-classifier": TinyEncoder(
        {
            **_ROBERTA,
            "model_type": "roberta",
            "architectures": ["RobertaForSequenceClassification"],
            "id2label": {"0": "no", "1": "perhaps", "2": "yes"},
        },
        _bert_shapes(64, 1, "roberta.") | _CLASSIFIER_OF_ROBERTA,
    ),
    "camembert-classifier": TinyEncoder(
        {
            **_ROBERTA,
            "model_type": "camembert",
            "architectures": ["CamembertForSequenceClassification"],
            "id2label": {"0": "non", "1": "peut-être", "2": "oui"},
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
