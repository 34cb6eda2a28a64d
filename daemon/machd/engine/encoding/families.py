"""The families of encoders that machd computes, and the values of ``config.json`` that their modules assume.

Imports no mlx. The modules are mlx-vlm's and mlx-lm's. They leave out what most checkpoints do not use, an activation or a
kind of positions, and compute the usual thing whatever the configuration says: so a checkpoint that asks for another is
refused by the name of the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from machd.engine.backend.model_files import shortened
from machd.errors import ModelFormatError

Config = Mapping[str, object]


class Layers(StrEnum):
    """Kinds of layers, each with a forward pass of its own."""

    BERT = "bert"
    MODERNBERT = "modernbert"
    DECODER = "decoder"
    GEMMA = "gemma"
    LFM2 = "lfm2"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders.

    Attributes:
        module: Python module of the layers.
        prefixes: Prefixes of tensor names that a checkpoint may have in front of the module's names; the first that fits is removed.
        unused: Beginnings of the names, without prefix, of tensors that embedding needs none of.
        fixed: The values of ``config.json`` that the module assumes; the first is the default of transformers.
        is_encoder_only: No model of this type generates, so that its type alone says what it is.
        is_causal: A token sees those before it only, unless the configuration says otherwise.
        has_padded_positions: Positions begin behind the id of the padding token, as RoBERTa's do.
        classifiers: Architectures with a classification head.
    """

    model_type: str
    layers: Layers
    module: str
    prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    is_encoder_only: bool = False
    is_causal: bool = False
    has_padded_positions: bool = False
    classifiers: tuple[str, ...] = ()

    @property
    def needs_mlx_vlm(self) -> bool:
        """True if the layers are mlx-vlm's, which is the extra ``vision``."""
        return self.module.startswith("mlx_vlm.")

    def refuse_other_values(self, config: Config) -> None:
        """Refuse a configuration for which the module would compute something else than transformers.

        Raises:
            ModelFormatError: It names the key, its value and the values that are computed.
        """
        for key, values in self.fixed.items():
            value = config.get(key, values[0])
            if not any(_is_same(value, one) for one in values):
                shown = " or ".join(json.dumps(one) for one in values)
                raise ModelFormatError(
                    f"config.json says {key} = {shortened(json.dumps(value))}, and machd computes {self.model_type} "
                    f"with {shown} only"
                )


def _is_same(value: object, wanted: object) -> bool:
    """Compare JSON values, of which 0 and false differ."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


_BERT_FIXED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "embedding_size": (None,),
}
_LLAMA_FIXED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attn_logit_softcapping": (None,),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, 1, None),
}
_DECODER_UNUSED = ("lm_head.", "rotary_emb.", "model.rotary_emb.", "score.")

_ROBERTA = EncoderFamily(
    "xlm-roberta",
    Layers.BERT,
    "mlx_vlm.models.xlm_roberta",
    prefixes=("roberta.",),
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    fixed=_BERT_FIXED,
    is_encoder_only=True,
    has_padded_positions=True,
    classifiers=("XLMRobertaForSequenceClassification",),
)

_LLAMA = EncoderFamily(
    "llama",
    Layers.DECODER,
    "mlx_lm.models.llama",
    prefixes=("model.", "language_model.model.", "language_model."),
    unused=_DECODER_UNUSED,
    fixed=_LLAMA_FIXED,
    is_causal=True,
)


def _families() -> Iterator[EncoderFamily]:
    yield EncoderFamily(
        "bert",
        Layers.BERT,
        "mlx_vlm.models.bert",
        prefixes=("bert.",),
        unused=("pooler.", "cls.", "embeddings.position_ids"),
        fixed=_BERT_FIXED,
        is_encoder_only=True,
        classifiers=("BertForSequenceClassification",),
    )
    yield _ROBERTA
    yield _named(_ROBERTA, "roberta", "RobertaForSequenceClassification")
    yield _named(_ROBERTA, "camembert", "CamembertForSequenceClassification")
    yield EncoderFamily(
        "modernbert",
        Layers.MODERNBERT,
        "mlx_vlm.models.modernbert",
        prefixes=("model.",),
        unused=("head.", "decoder.", "pooler."),
        fixed={
            "hidden_activation": ("gelu",),
            "classifier_activation": ("gelu",),
            "classifier_pooling": ("cls", "mean"),
        },
        is_encoder_only=True,
        classifiers=("ModernBertForSequenceClassification",),
    )
    yield EncoderFamily(
        "gemma3_text",
        Layers.GEMMA,
        "mlx_lm.models.gemma3_text",
        prefixes=("model.",),
        unused=_DECODER_UNUSED,
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False, None),
            "attn_logit_softcapping": (None,),
        },
        is_causal=True,
    )
    yield EncoderFamily(
        "qwen3",
        Layers.DECODER,
        "mlx_lm.models.qwen3",
        prefixes=_LLAMA.prefixes,
        unused=_DECODER_UNUSED,
        fixed={**_LLAMA_FIXED, "attention_bias": (False, None)},
        is_causal=True,
    )
    yield EncoderFamily(
        "qwen2",
        Layers.DECODER,
        "mlx_lm.models.qwen2",
        prefixes=_LLAMA.prefixes,
        unused=_DECODER_UNUSED,
        fixed=_LLAMA_FIXED,
        is_causal=True,
    )
    yield _LLAMA
    yield _named(_LLAMA, "mistral")


def _named(family: EncoderFamily, model_type: str, *classifiers: str) -> EncoderFamily:
    return replace(family, model_type=model_type, classifiers=classifiers)


FAMILIES: Mapping[str, EncoderFamily] = {one.model_type: one for one in _families()}
"""The families by ``model_type``."""
