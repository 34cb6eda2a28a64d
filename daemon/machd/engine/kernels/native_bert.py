"""BERT-like encoders in one operation of machd's own kernels, over texts that lie behind one another without padding.

Products are computed in float32 with weights in panels of their own layout. A token's bits depend on the tokens of its text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import GELU
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Layer
from machd.engine.kernels.native_attention import HEAD_NUMBERS

_PANEL_OUTPUTS = 16
_BERT_CODE, _ROBERTA_CODE = "mlx_vlm.models.bert.bert", "mlx_vlm.models.xlm_roberta.xlm_roberta"
"""Modules whose classes have the layers that are computed here, and positions from 0 or from behind the padding token's number on."""


class NativeBert:
    """The embeddings and layers of mlx-vlm's ``bert`` or ``xlm_roberta``, in float32."""

    def __init__(self, model: Layer) -> None:
        """Take the weights of a model that :meth:`takes`, and its layers from it: they are not held twice."""
        embeddings = model.embeddings
        self._words: mx.array = embeddings.word_embeddings.weight
        positions: mx.array = embeddings.position_embeddings.weight
        types: mx.array = embeddings.token_type_embeddings.weight
        self._types, self._positions = types.shape[0], positions.shape[0]
        # One table for both, in which a token's sum is the same whatever the types of other texts.
        self._typed_positions = (types[:, None] + positions[None]).reshape(-1, types.shape[1])
        mx.eval(self._typed_positions)
        self._padding: int | None = getattr(embeddings, "padding_idx", None)
        layers = model.encoder.layer
        heads: int = layers[0].attention.self.num_attention_heads
        blocks = []
        while layers:
            blocks.append(_block(layers.pop(0)))
        self._layers = native_kernels().BertLayers(_norm(embeddings.LayerNorm), blocks, heads=heads)

    @staticmethod
    def takes(model: Layer) -> bool:
        """Return True for a model whose every layer the kernels compute; False where they are missing, too."""
        if native_kernels() is None:
            return False
        embeddings: Layer = getattr(model, "embeddings", None)
        if type(embeddings).__module__ not in {_BERT_CODE, _ROBERTA_CODE}:
            return False
        tables = (
            embeddings.word_embeddings,
            embeddings.position_embeddings,
            embeddings.token_type_embeddings,
        )
        are_tables = all(type(one) is Embedding and _is_float32(one.weight) for one in tables)
        layers = model.encoder.layer
        return are_tables and _is_norm(embeddings.LayerNorm) and all(map(_is_taken, layers))

    def __call__(
        self,
        token_ids: Sequence[int],
        lengths: Sequence[int],
        type_ids: Sequence[int] | None = None,
    ) -> mx.array:
        """Compute the last layer's hidden states, float32 [tokens, hidden], as the module does of each text alone.

        Args:
            token_ids: All texts' tokens, with special ones, one text behind another.
            lengths: Tokens of each text.
            type_ids: Of each token; 0 for all unless given.

        Raises:
            ValueError: A number is outside its table, or lengths are not those of texts.
        """
        ids = np.asarray(token_ids, dtype=np.int32)
        _check("token", ids, self._words.shape[0])
        if len(ids) != sum(lengths) or min(lengths, default=0) <= 0:
            raise ValueError("texts have tokens, and as many together as there are ids")
        positions = self._positions_of(ids, lengths)
        _check("position", positions, self._positions)
        if type_ids is not None:
            types = np.asarray(type_ids, dtype=np.int32)
            _check("type", types, self._types)
            positions = types * self._positions + positions
        embedded = self._words[mx.array(ids)] + self._typed_positions[mx.array(positions)]
        hidden: mx.array = self._layers(embedded, list(lengths))
        return hidden

    def _positions_of(self, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Number each text's tokens; RoBERTa begins behind its padding token's number, which padding tokens have."""
        begins = np.repeat(np.array([0, *accumulate(lengths)][:-1]), lengths)
        positions: np.ndarray = np.arange(len(ids)) - begins
        if self._padding is not None:
            counted = ids != self._padding
            before = np.concatenate([[0], np.cumsum(counted)])
            positions = (before[1:] - before[begins]) * counted + self._padding
        return positions.astype(np.int32)


def text_means(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
    """Return the mean of each text's tokens, float32 [texts, hidden].

    Args:
        hidden: float32 [tokens, hidden], one text behind another.
        lengths: Tokens of each text.

    Raises:
        ValueError: A text has no tokens, or all together have not as many as there are.
    """
    means: mx.array = native_kernels().text_means(hidden, list(lengths))
    return means


def _check(what: str, numbers: np.ndarray, rows: int) -> None:
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < rows):
        raise ValueError(f"a {what} is outside its table of {rows}")


def _is_taken(layer: Layer) -> bool:
    """Return True for a layer whose weights are float32, with sizes that the kernels compute."""
    attention, output = layer.attention, layer.output
    own = attention.self
    linear = (
        own.query,
        own.key,
        own.value,
        attention.output.dense,
        layer.intermediate.dense,
        output.dense,
    )
    activation = layer.intermediate.intermediate_act_fn
    return (
        all(map(_is_plain, linear))
        and own.head_dim % HEAD_NUMBERS == 0
        and _is_norm(attention.output.LayerNorm)
        and _is_norm(output.LayerNorm)
        and type(activation) is GELU
        and activation._approx == "none"  # noqa: SLF001 - said nowhere else
    )


def _is_plain(layer: Layer) -> bool:
    if type(layer) is not Linear or "bias" not in layer:
        return False
    are_float32 = _is_float32(layer.weight) and _is_float32(layer.bias)
    return are_float32 and layer.weight.shape[0] % _PANEL_OUTPUTS == 0


def _is_norm(layer: Layer) -> bool:
    if type(layer) is not LayerNorm or "weight" not in layer or "bias" not in layer:
        return False
    return _is_float32(layer.weight) and _is_float32(layer.bias)


def _is_float32(array: mx.array) -> bool:
    return bool(array.dtype == mx.float32)


def _block(layer: Layer) -> object:
    """Lay out a layer's weights for the kernels."""
    attention, own = layer.attention, layer.attention.self
    block: object = native_kernels().BertBlock(
        qkv=_panels(own.query, own.key, own.value),
        output=_panels(attention.output.dense),
        attention_norm=_norm(attention.output.LayerNorm),
        up=_panels(layer.intermediate.dense),
        down=_panels(layer.output.dense),
        output_norm=_norm(layer.output.LayerNorm),
    )
    return block


def _panels(*layers: Layer) -> object:
    """Put the weights of layers with the same inputs into panels of 16 outputs each, which lie together for each input."""
    native = native_kernels()
    weights = mx.concatenate([layer.weight for layer in layers])
    panels = weights.reshape(-1, _PANEL_OUTPUTS, weights.shape[1]).swapaxes(1, 2)
    bias = mx.concatenate([layer.bias for layer in layers])
    panels_of: object = native.PanelWeights(native.in_large_pages(mx.contiguous(panels)), bias)
    return panels_of


def _norm(layer: LayerNorm) -> object:
    norm: object = native_kernels().NormWeights(layer.weight, layer.bias, layer.eps)
    return norm
