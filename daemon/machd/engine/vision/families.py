"""mlx-vlm's model families: which are served with images and videos, and why others are not.

A family is served if its greedy tokens equal those of mlx-vlm's own generation, for images and text, alone and in a batch:
tests/integration/test_vision_families.py compares them. Keys are ``model_type`` of ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPARED_FAMILIES = frozenset(
    {
        *("aya_vision", "gemma3", "gemma4", "glm4v", "idefics3", "internvl_chat", "kimi_vl"),
        *("lfm2_vl", "llama4", "llava", "llava_onevision", "mistral3", "phi3_v", "pixtral"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        "smolvlm",
    }
)
"""Families that take images."""

VIDEO_FAMILIES = frozenset(
    {
        *("gemma4", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_vl", "qwen3_vl_moe"),
    }
)
"""Of these, families that take videos."""

_WRONG_MERGE = "mlx-vlm puts its images' embeddings in the wrong places of a prompt"
_TOO_LARGE = (
    "mlx-vlm fixes the sizes of its vision tower in code, so no small checkpoint could be compared"
)

REFUSED_FAMILIES: Mapping[str, str] = {
    "deepseek_vl_v2": "its processor writes the beginning of a prompt, which a chat template does elsewhere",
    "fastvlm": _TOO_LARGE,
    "gemma3n": _TOO_LARGE,
    "granite_vision": _WRONG_MERGE,
    "idefics2": "its processor changes the text behind an image",
    "llava_next": _WRONG_MERGE,
    "mllama": "its layers read images by cross-attention, whose states machd does not keep",
    "molmo": "its processor puts images in front of the whole prompt",
    "paligemma": "every token of a prompt attends to all others, so no part of it can be computed alone",
}
"""Why the images of a family are not served, to follow "images are not served: "."""

ONE_TILE_FAMILIES = frozenset({"llama4"})
"""Families whose images are read as one tile, resized to the tower's size: mlx-vlm's processor writes tokens for an
overview beside several tiles, and gives the encoder none."""

IMAGE_TEXTS: Mapping[str, str] = {"phi3_v": "<|image_1|>"}
"""Text that stands for a prompt's first image, where the processor has no token for it."""

_NOT_COMPARED = "answers of its family were not compared with mlx-vlm's own"
_BIDIRECTIONAL = (
    "an image's tokens attend to those behind them, so the whole prompt is needed in one pass "
    "(text_config.use_bidirectional_attention)"
)


def why_refused(config: Mapping[str, object]) -> str:
    """Return why a checkpoint's images are not served, empty if they are."""
    model_type = str(config["model_type"])
    if model_type not in COMPARED_FAMILIES:
        return REFUSED_FAMILIES.get(model_type, _NOT_COMPARED)
    text = config.get("text_config")
    is_bidirectional = (
        isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    )
    return _BIDIRECTIONAL if is_bidirectional else ""
