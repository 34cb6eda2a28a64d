"""The real all-MiniLM-L6-v2, from texts to vectors, against sentence-transformers.

``minilm_vectors.npy`` has what ``SentenceTransformer(directory, device="cpu").encode(ODD_TEXTS)`` of sentence-transformers
6.2.0 and torch 2.13.0 gives: float32, [texts, 384].
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints.minilm import minilm_directory
from support.engines.loaded_encoder import (
    encoder_files,
    least_cosine,
    loaded_encoder,
    vectors,
)

from machd.engine.encoding.input_tokenizer import open_inputs
from machd.user_directories import user_cache_directory

ODD_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "How do I reset my password?",
    "def add(a, b):\n    return a + b",
    "",
    " ",
    "\t\n",
    "\x00",
    "\x00\x01\x02\x1b[31mred\x7f",
    "a",
    ".",
    "\U0001f600",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f3f3\ufe0f\u200d\U0001f308",
    "\u200b",
    "\ufefftext",
    "e\u0301e\u0302" * 20,
    "\u0130stanbul",
    "Stra\u00dfe na\u00efve co\u00f6perate \ufb01",
    "\ufffd" * 5,
    "[CLS] [SEP] [PAD] [MASK] [UNK]",
    "[PAD]" * 10,
    "##ing ##ed",
    "a" * 10_000,
    "word " * 2_000,
    "\u4f60\u597d" * 5_000,
    "\U0001f600" * 3_000,
    "0123456789" * 100,
    "\u202eright to left\u202c",
    "\r\n\r\n",
    "a\u00a0b\u2003c\u3000d",
    "x" * 101 + " y",
    "\ud7ff\ue000\uffff",
    "\U0001d573\U0001d58a\U0001d591\U0001d591\U0001d594 \U0001d7d9\U0001d7da",
    "\u4eca\u65e5\u306f \uc548\ub155\ud558\uc138\uc694 \u0e44\u0e17\u0e22",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
)

_SAME = 0.99999


@pytest.fixture(name="minilm", scope="module")
def _minilm() -> Path:
    try:
        return minilm_directory(user_cache_directory(os.environ))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"the wheel is not at hand: {type(error).__name__}")


def test_odd_texts_have_the_vectors_of_sentence_transformers(minilm: Path) -> None:
    """Emoji, nothing, control characters, CJK and texts of 10,000 characters have the reference's vectors, alone and together."""
    wanted = np.load(Path(__file__).with_name("minilm_vectors.npy")).astype(np.float64)
    files, encoder = encoder_files(minilm), loaded_encoder(minilm)
    inputs = open_inputs(files).encode(ODD_TEXTS, truncates=True)
    assert max(len(one.token_ids) for one in inputs) == files.description.max_input_tokens == 256
    alone = np.concatenate([vectors(encoder, [one]) for one in inputs])
    assert least_cosine(alone, wanted) > _SAME
    assert least_cosine(vectors(encoder, inputs), wanted) > _SAME
    assert np.abs(np.linalg.norm(alone, axis=1) - 1).max() < 1e-6
