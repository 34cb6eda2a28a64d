"""A tiny encoder as it is served, and what its passes are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.encoding.encoder_files import EncoderFiles, find_encoder
from machd.engine.encoding.encoder_model import EncoderModel, build_encoder
from machd.engine.encoding.loading import load_encoder
from machd.engine.encoding.mlx_encoder import MlxEncoder
from machd.engine.encoding.sentence_modules import DenseModule, PoolingModule
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.encoder import Encoder, EncoderInput
from machd.engine.protocol.progress import SilentProgress

Vectors = NDArray[np.float64]
"""Vectors or logits: [texts, dimensions]."""


class EncoderSubject:
    """A checkpoint in memory, twice: as it is served, and as mlx's layers alone compute it."""

    def __init__(self, directory: Path) -> None:
        """Load a checkpoint.

        Raises:
            MachdError: It is no encoder's, or cannot be loaded here.
        """
        source = ModelSource(SourceKind.DIRECTORY, directory, directory.name)
        files = find_encoder(source)
        assert files is not None, "an encoder's"
        self._files: EncoderFiles = files
        self._encoder = load_encoder(
            files,
            model_id=directory.name,
            dtype="float32",
            blas=None,
            blas_refused=(),
            progress=SilentProgress(),
            share=None,
        )
        self._plain: EncoderModel = build_encoder(files)

    def __enter__(self) -> Self:
        """Return it; it is loaded."""
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Give back the weights."""
        self._encoder.close()

    @property
    def is_classifier(self) -> bool:
        """True if the encoder makes logits of a text, and no vector."""
        return self._files.is_classifier

    @property
    def packs(self) -> bool:
        """True if machd's own kernels compute it here."""
        return self._encoder.packs

    def compute(self, texts: Sequence[EncoderInput]) -> Vectors:
        """Compute a pass as it is served."""
        return _computed(self._encoder, texts)

    def compute_padded(self, texts: Sequence[EncoderInput]) -> Vectors:
        """Compute a pass with mlx's layers, all texts padded to the longest."""
        padded = MlxEncoder(self._files, self._plain, self._encoder.model, is_native=False)
        return _computed(padded, texts)

    def pooled(self, texts: Sequence[EncoderInput]) -> Vectors:
        """Compute vectors of texts alone, with mlx's layers, and with the sentence modules that the files list in numpy's float64."""
        return np.stack([self._behind_pooling(self._hidden(one)) for one in texts])

    def _hidden(self, text: EncoderInput) -> NDArray[np.float64]:
        """Return the hidden states of a text without padding: [tokens, hidden]."""
        tokens = len(text.token_ids)
        ids = mx.array([text.token_ids], mx.int32)
        hidden = self._plain.body(ids, mx.zeros_like(ids), mx.array([tokens], mx.int32))
        return np.array(hidden[0].astype(mx.float32)).astype(np.float64)

    def _behind_pooling(self, hidden: NDArray[np.float64]) -> NDArray[np.float64]:
        modules = self._files.modules
        assert modules.pooling is not None, "an embedder's"
        vector = _pooled(hidden, modules.pooling)
        dense = iter(self._plain.dense)
        for one in modules.after:
            if isinstance(one, DenseModule):
                computed = next(dense)(mx.array(vector[None].astype(np.float32)))
                vector = np.array(computed[0]).astype(np.float64)
            else:
                vector = vector / np.linalg.norm(vector)
        return vector


def _pooled(hidden: NDArray[np.float64], pooling: PoolingModule) -> NDArray[np.float64]:
    """Pool a text's hidden states, [tokens, hidden], as sentence-transformers documents each mode."""
    tokens = len(hidden)
    places = np.arange(1, tokens + 1)[:, None]
    pooled = {
        "cls": hidden[0],
        "last": hidden[-1],
        "max": hidden.max(axis=0),
        "mean": hidden.mean(axis=0),
        "mean_sqrt_len_tokens": hidden.sum(axis=0) / np.sqrt(tokens),
        "weightedmean": (hidden * places).sum(axis=0) / places.sum(),
    }
    return np.concatenate([pooled[mode] for mode in pooling.modes])


def _computed(encoder: Encoder, texts: Sequence[EncoderInput]) -> Vectors:
    made = encoder.encode(texts)
    return np.frombuffer(made.content, np.float32).reshape(made.shape).astype(np.float64)
