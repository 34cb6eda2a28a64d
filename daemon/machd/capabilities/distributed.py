"""The verdict on several ranks: whether they can share a model, and in which way."""

from __future__ import annotations

from collections.abc import Sequence

from machd.capabilities.verdict import Support, Verdict

COMPARED_ARCHITECTURES = {
    "tensor": frozenset(
        [
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v41",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "gpt_oss",
            "iquestloopcoder",
            "kimi_k25",
            "kimi_k3",
            "llama",
            "longcat_flash",
            "longcat_flash_ngram",
            "minimax",
            "minimax_m3_vl",
            "ministral3",
            "mistral4",
            "qwen2",
            "qwen3",
            "qwen3_5",
            "qwen3_moe",
            "step3p5",
        ]
    ),
    "pipeline": frozenset(
        [
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v41",
            "glm4_moe",
            "glm4_moe_lite",
            "minimax_m3_vl",
            "ministral3",
            "mistral4",
            "qwen2",
            "qwen3_moe",
        ]
    ),
}
"""Architectures of which two ranks were compared with one process, by ``distributed.mode``."""


def distributed(architecture: str, modes: Sequence[str], *, has_vision: bool = False) -> Verdict:
    """Judge whether several ranks can share a model.

    ``modes`` are the ways in which the model's code can cut it, the better one first.
    """
    if has_vision:
        return Verdict(Support.BLOCKED, "a model with vision is served by one rank")
    if not modes:
        return Verdict(
            Support.BLOCKED,
            f"mlx-lm cannot cut {architecture} for several ranks; serve it with one",
        )
    ways = " and by ".join(modes)
    compared = [mode for mode in modes if architecture in COMPARED_ARCHITECTURES[mode]]
    if not compared:
        return Verdict(
            Support.UNKNOWN,
            f"mlx-lm can cut {architecture} by {ways}, but its ranks were not compared with one process",
        )
    return Verdict(Support.SUPPORTED, f"mlx-lm cuts {architecture} by {ways}")
