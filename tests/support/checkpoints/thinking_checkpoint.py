"""The tiny llama with a chat template that opens a thought, which the model closes now and then by itself."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from machd.engine.loading.embedded_tokenizer import EMBEDDED_VOCABULARY_TOKENS
from support.checkpoints.tiny_checkpoint import write_tiny_llama

_MARKERS = ("<think>", "</think>")
_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is not defined or enable_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
_CLOSING_GAIN = 1.9
"""On the logits of ``</think>``: thoughts of some ten to some hundred tokens."""


def write_thinking_llama(directory: Path) -> Path:
    """Write it in mlx-lm layout; returns the directory, which is made if it is not there."""
    write_tiny_llama(directory, vocabulary=EMBEDDED_VOCABULARY_TOKENS, added_tokens=_MARKERS)
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    path = str(directory / "model.safetensors")
    arrays = mx.load(path)
    assert isinstance(arrays, dict)
    embeddings = arrays[
        "model.embed_tokens.weight"
    ]  # [tokens, hidden]; logits, too, as they are tied
    embeddings[-1] *= _CLOSING_GAIN
    mx.eval(arrays)
    mx.save_safetensors(path, arrays, {"format": "mlx"})
    return directory
