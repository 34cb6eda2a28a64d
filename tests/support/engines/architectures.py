"""mlx-lm's architectures as parameters of tests: a few for every run, all of them for the long one."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import pytest

from machd_probes.catalogue import architecture_names
from machd_probes.tiny import tiny_variants

NEED_METAL = {
    "bitnet": "its ternary layers multiply in a Metal kernel of mlx-lm's",
    "muse_spark": "its queries and keys are normed and rotated in a Metal kernel of mlx-lm's",
}

ONE_OF_EACH_KIND = (
    "smollm3",
    "gemma3_text",
    "qwen3_5",
    "lfm2",
    "mamba",
    "llama4",
    "deepseek_v41",
    "falcon_h1",  # nested: recurrent state beside keys and values
    "deepseek_v32",  # nested: keys and values of two widths
)
"""One tiny model or more for each :class:`~machd.capabilities.facts.KvCacheKind`."""

MENDED = (
    "afm7",
    "gemma2",
    "gpt_bigcode",
    "gpt_bigcode+many_keys",
    "internlm2+dynamic",
    "internlm3+dynamic",
    "minimax_m3_vl",
    "olmo",
    "olmo_hybrid",
    "phi3small",
    "plamo3",
    "recurrent_gemma",
)
"""Tiny models with a layer that machd replaces, because mlx-lm's is wrong in a batch."""


@cache
def buildable_variants() -> tuple[str, ...]:
    """Names of all tiny models that can be built without Metal."""
    variants = (variant for name in architecture_names() for variant in tiny_variants(name))
    return tuple(variant for variant in variants if variant not in NEED_METAL)


def each_architecture(every_run: Collection[str] = ONE_OF_EACH_KIND) -> pytest.MarkDecorator:
    """Parametrise ``variant`` over all tiny models; those that are not of ``every_run`` have the marker ``long``."""
    return pytest.mark.parametrize(
        "variant",
        [
            pytest.param(variant, marks=() if variant in every_run else pytest.mark.long)
            for variant in buildable_variants()
        ],
    )
