"""A GGUF file of every family answers as the same weights in mlx-lm layout, and faults of a converter would be noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints.gguf_checkpoint import (
    GgufRules,
    round_tensors,
    write_gguf_checkpoint,
)
from support.checkpoints.gguf_rules import every_rules
from support.checkpoints.gguf_rules.common import with_key
from support.every_run import sampled

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.experts.residency import Residency
from machd.engine.loading.formats.gguf.families.known import FAMILIES
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import ModelSource
from machd.errors import ModelError, ModelFormatError

import_mlx_lm()

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

RULES = every_rules()

_PROMPT = [(37 * position) % 251 + 3 for position in range(24)]
"""Longer than the windows of the tiny models, and than the contexts that their rotary positions were scaled from."""

_STEPS = 8
_ROUNDING = 1e-4
"""Share of the largest logit that computing with packed weights in another order rounds."""

_NOTICED = 1e-3
"""The same share, at least, that a fault changes."""

_ROUNDING_OF_EXPANDED = 1e-2
"""The same, of weights that are expanded to float16."""


def _greedy(source: ModelSource, dtype: str, steps: int = _STEPS) -> tuple[list[int], mx.array]:
    """Generate tokens behind the prompt; the logits of the prompt and of each token, [steps, vocabulary]."""
    model = load_model(source, dtype=dtype).model
    cache = make_prompt_cache(model)
    rows = [model(mx.array([_PROMPT]), cache=cache)[0]]
    token_ids: list[int] = []
    for _ in range(steps):
        token_ids.append(int(np.argmax(np.array(rows[-1][-1]))))
        rows.append(model(mx.array([token_ids[-1:]]), cache=cache)[0])
    logits = mx.concatenate(rows).astype(mx.float32)
    mx.eval(logits)
    return token_ids, logits


_CASES = [(rules, kind) for rules in RULES for kind in rules.kinds]
_CASES_OF_EVERY_RUN = (
    *("llama-F32", "llama-F16", "llama-Q8_0", "llama-3.1-F32"),
    *("gemma3-Q8_0", "gpt-oss-MXFP4", "deepseek2-F32", "qwen3moe-F16"),
    *("lfm2-F32", "qwen3next-F32", "qwen35-Q8_0"),
)
"""Each type of numbers, scaled positions, windows, latent attention, experts, and each kind of state."""


@pytest.mark.parametrize(
    ("rules", "kind"),
    sampled(_CASES, _CASES_OF_EVERY_RUN, [f"{rules.title}-{kind}" for rules, kind in _CASES]),
)
def test_gguf_answers_as_the_directory_of_the_same_numbers(
    tmp_path: Path, rules: GgufRules, kind: str
) -> None:
    """Greedy tokens are the same; logits, too, to the bit where weights are floats in mlx-lm's order."""
    checkpoint = write_gguf_checkpoint(tmp_path, rules, kind)
    expected, expected_logits = _greedy(checkpoint.directory, "float32")
    is_float = kind in ("F32", "F16")
    found, logits = _greedy(checkpoint.file, "float32" if is_float else "auto")
    assert found == expected
    difference = float(mx.abs(logits - expected_logits).max())
    largest = float(mx.abs(expected_logits).max())
    assert difference <= (0 if is_float and not rules.is_rounded else largest * _ROUNDING)


@pytest.mark.parametrize(
    "rules", [rules for rules in RULES if rules.floats], ids=lambda rules: rules.title
)
def test_tensor_is_expanded_where_its_columns_become_rows(tmp_path: Path, rules: GgufRules) -> None:
    """A packed file answers as one of the same numbers as floats, though no tensor is excepted from packing."""
    packed = write_gguf_checkpoint(tmp_path / "packed", replace(rules, floats=()), "Q8_0")
    every = replace(rules, floats=("",))
    floats = write_gguf_checkpoint(tmp_path / "floats", every, "Q8_0", fault=round_tensors)
    expected, expected_logits = _greedy(floats.file, "float32")
    found, logits = _greedy(packed.file, "float32")
    assert found == expected
    largest = float(mx.abs(expected_logits).max())
    assert float(mx.abs(logits - expected_logits).max()) <= largest * _ROUNDING_OF_EXPANDED


def _faults() -> list[tuple[GgufRules, str]]:
    return [(rules, fault) for rules in RULES for fault in (*rules.changes, *rules.faults)]


_FAULTS_OF_EVERY_RUN = (
    # Changes that are left out: of order, of numbers, of shape.
    *("llama q_proj.weight", "llama-3.1 k_proj.bias", "gemma3 norm.weight", "qwen3next A_log"),
    *("qwen35 in_proj_qkv.weight", "qwen35 linear_attn.conv1d.weight", "qwen35 out_proj.weight"),
    # Tensors for one another.
    *("llama gate for up", "qwen2 keys for values", "qwen3 norms exchanged"),
    *("qwen35 beta for alpha", "stablelm-12b heads in another order"),
    # Positions.
    *("llama another base of the rotary positions", "llama-3.1 no divisors"),
    *("qwen3-yarn another factor", "phi3 whole heads rotate", "phi3-long factors exchanged"),
    *("glm4 positions in sections", "mistral3-ministral3 another beta"),
    # Attention and layers.
    *("gemma3 another window", "gemma2 another bound of attention", "cohere2 another scale"),
    *("granite another logit_scale", "lfm2 layers of the other kind", "starcoder2 no epsilon"),
    "qwen35moe-with a layer of further tokens one layer more",
    # Experts.
    *("deepseek2 another scale of experts", "deepseek2-groups groups not used"),
    *("deepseek2-sigmoid softmax", "llama-mixtral another number of experts for a token"),
)
"""One of each kind of fault."""

_expected_logits: dict[str, mx.array] = {}
"""By the rules' title."""


@pytest.mark.parametrize(
    ("rules", "fault"),
    sampled(
        _faults(), _FAULTS_OF_EVERY_RUN, [f"{rules.title} {fault}" for rules, fault in _faults()]
    ),
)
def test_fault_of_a_converter_is_noticed(tmp_path: Path, rules: GgufRules, fault: str) -> None:
    """A change that is left out, or what the family's rules plant, gives other logits or is refused."""
    if fault in rules.changes:
        checkpoint = write_gguf_checkpoint(tmp_path, rules, converter=rules.without(fault))
    else:
        checkpoint = write_gguf_checkpoint(tmp_path, rules, fault=rules.faults[fault])
    # The directory has no fault.
    if rules.title not in _expected_logits:
        _, _expected_logits[rules.title] = _greedy(checkpoint.directory, "float32", steps=0)
    expected = _expected_logits[rules.title]
    try:
        _, logits = _greedy(checkpoint.file, "float32", steps=0)
    except ModelError:
        return
    difference = float(mx.abs(logits - expected).max())
    assert difference > _NOTICED * float(mx.abs(expected).max())


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """A file whose tensors contradict its metadata is refused when it is opened, by the tensor and its shape."""
    (rules,) = (one for one in RULES if one.title == "gpt-oss")
    fault = with_key("gpt-oss.expert_count", 3)
    file = write_gguf_checkpoint(tmp_path, rules, fault=fault).file
    with pytest.raises(ModelFormatError, match=r"\.weight of the shape \(4, "):
        load_model(file)


def test_every_family_is_proved() -> None:
    """A family that machd reads has rules here."""
    assert {rules.architecture for rules in RULES} == set(FAMILIES)


@pytest.mark.parametrize(
    ("title", "note"),
    [("gpt-oss", "experts of a GGUF file stay in memory"), ("llama", "the model has no experts")],
)
def test_note_says_why_experts_are_not_left_on_disk(tmp_path: Path, title: str, note: str) -> None:
    """A file with experts and one without are served from memory, each with its own reason."""
    (rules,) = (one for one in RULES if one.title == title)
    file = write_gguf_checkpoint(tmp_path, rules).file
    (found,) = load_model(file, residency=Residency("auto", 0)).notes
    assert note in found
