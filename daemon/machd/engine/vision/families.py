"""mlx-vlm's model families: which are served with images and videos, and why the others are not.

A family is served if its greedy tokens equal those of mlx-vlm's own generation, for images and text, alone and in a batch:
tests/integration/test_vision_families.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPARED_FAMILIES = frozenset(
    {
        *("aya_vision", "gemma3", "glm4v", "idefics3", "internvl_chat", "kimi_vl", "lfm2_vl"),
        *("llama4", "llava", "llava_onevision", "mistral3", "pixtral", "qwen2_5_vl", "qwen2_vl"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "phi3_v", "qwen3_vl_moe", "smolvlm"),
        *(
            "deepseek_vl_v2",
            "gemma4",
            "idefics2",
            "paligemma",
            "molmo",
            "llava_next",
            "granite_vision",
            "mllama",
        ),
    }
)
"""Families that take images."""

VIDEO_FAMILIES = frozenset(
    {
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "llava_onevision",
    }
)
"""Of these, families that take videos."""

ONE_TILE_FAMILIES = frozenset({"llama4"})
"""Families whose images are read as one tile, resized to the tower's size: mlx-vlm's processor writes tokens for an
overview beside several tiles, and gives the encoder none."""

IMAGE_TEXTS: Mapping[str, str] = {"phi3_v": "<|image_1|>"}
"""Text that stands for a prompt's first image, where the processor has no token for it."""
