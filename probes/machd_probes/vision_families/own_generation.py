"""Greedy answers of mlx-vlm's own generation, which a daemon's answers are compared with."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from machd_probes.vision_families.media import block_image

Untyped = Any

Turn = Sequence[int | str]
"""A user's message: texts, and seeds of images."""


def own_answers(
    checkpoint: Path, turns: Mapping[str, Turn], max_tokens: int, *, videos: Mapping[str, Path]
) -> dict[str, str]:
    """Generate an answer to each turn, alone, in float32.

    Args:
        checkpoint: What ``write_family`` wrote.
        turns: Messages by name; a text that is a key of ``videos`` stands for that video.
        max_tokens: Of each answer.
        videos: Files by name.
    """
    with warnings.catch_warnings():
        # mlx-vlm takes one that was made an error for a processor that cannot be loaded.
        warnings.simplefilter("ignore")
        return _answers(checkpoint, turns, max_tokens, videos)


def _answers(
    checkpoint: Path, turns: Mapping[str, Turn], max_tokens: int, videos: Mapping[str, Path]
) -> dict[str, str]:
    from mlx_vlm.utils import load  # noqa: PLC0415 - an extra, and takes a second

    model, processor = load(str(checkpoint))
    model.update(tree_map(_as_float32, model.parameters()))
    answers: dict[str, str] = {}
    for name, turn in turns.items():
        inputs = _inputs(processor, turn, videos)
        # Some models keep the last prompt's positions.
        for kept in ("_rope_deltas", "_position_ids"):
            setattr(model.language_model, kept, None)
        token_ids = _generate(model, inputs, max_tokens)
        answers[name] = _tokenizer(processor).decode(token_ids)
    return answers


def _as_float32(one: mx.array) -> mx.array:
    return one.astype(mx.float32) if mx.issubdtype(one.dtype, mx.floating) else one


def _tokenizer(processor: Untyped) -> Untyped:
    return getattr(processor, "tokenizer", processor)


def _inputs(processor: Untyped, turn: Turn, videos: Mapping[str, Path]) -> dict[str, Untyped]:
    """Run the processor as mlx-vlm does; with the bare prompt and images where its own call fails.

    mlx-vlm's processor of phi3_v drops the first token of the text behind an image, so it gets one to drop.
    """
    from mlx_vlm.utils import prepare_inputs  # noqa: PLC0415

    content = [_part(one, videos) for one in turn]
    text = _tokenizer(processor).apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if type(processor).__name__ == "Phi3VProcessor":
        text = re.sub(r"<\|image_\d+\|>", r"\g<0><|end|>", text)
    images = [block_image(one) for one in turn if isinstance(one, int)]
    shown = [str(videos[one]) for one in turn if isinstance(one, str) and one in videos]
    given = {name: media for name, media in (("images", images), ("videos", shown)) if media}
    try:
        inputs: dict[str, Untyped] = prepare_inputs(
            processor, prompts=text, add_special_tokens=False, **given
        )
    except ValueError:
        inputs = dict(processor(text=[text], **given))
    return inputs


def _part(one: int | str, videos: Mapping[str, Path]) -> dict[str, str]:
    if isinstance(one, int):
        return {"type": "image"}
    return {"type": "video"} if one in videos else {"type": "text", "text": one}


def _generate(model: Untyped, inputs: dict[str, Untyped], max_tokens: int) -> list[int]:
    from mlx_vlm.generate.ar import generate_step  # noqa: PLC0415

    arrays = {name: _as_mlx(one) for name, one in inputs.items()}
    steps = generate_step(
        arrays.pop("input_ids"),
        model,
        arrays.pop("pixel_values", None),
        arrays.pop("attention_mask", None),
        max_tokens=max_tokens,
        temperature=0.0,
        **arrays,
    )
    return [int(token) for (token, _), _ in zip(steps, range(max_tokens), strict=False)]


def _as_mlx(one: Untyped) -> Untyped:
    return mx.array(one) if hasattr(one, "__array__") and not isinstance(one, mx.array) else one
