"""Adapters that must not be served are refused with the reason, without much memory or time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints.adapters import (
    BASE,
    EXPERTS,
    gguf_metadata,
    gguf_tensors,
    mlx_lm_config,
    mlx_lm_tensors,
    peft_config,
    peft_tensors,
    random_adapter,
    stored,
    write_gguf_adapter,
    write_mlx_lm,
    write_peft,
)
from support.checkpoints.hostile_adapters import (
    HOSTILE_GGUF,
    HOSTILE_MLX_LM,
    HOSTILE_PEFT,
    MadeAdapter,
    Q,
    refused,
    renamed,
    setting,
    with_tensor,
    without,
)

from machd.engine.adapters.adapter_files import adapter_digest, read_adapter
from machd.engine.adapters.low_rank import BaseLayer
from machd.errors import AdapterError


@pytest.mark.parametrize("case", HOSTILE_PEFT)
def test_hostile_peft_adapter_is_refused(tmp_path: Path, case: str) -> None:
    """What PEFT's files may not hold is refused by name."""
    change, words = HOSTILE_PEFT[case]
    adapter = random_adapter()
    made = MadeAdapter(peft_tensors(adapter), peft_config(adapter))
    change(made)
    refused(write_peft(tmp_path / "x", made.tensors, made.config), words)


@pytest.mark.parametrize("case", HOSTILE_MLX_LM)
def test_hostile_mlx_lm_adapter_is_refused(tmp_path: Path, case: str) -> None:
    """What mlx-lm's files may not hold is refused by name."""
    change, words = HOSTILE_MLX_LM[case]
    adapter = random_adapter()
    made = MadeAdapter(mlx_lm_tensors(adapter), mlx_lm_config(adapter))
    change(made)
    refused(write_mlx_lm(tmp_path / "x", made.tensors, made.config), words)


@pytest.mark.parametrize("case", HOSTILE_GGUF)
def test_hostile_gguf_adapter_is_refused(tmp_path: Path, case: str) -> None:
    """What a GGUF adapter may not hold is refused by name."""
    change, words = HOSTILE_GGUF[case]
    adapter = random_adapter()
    made = MadeAdapter(gguf_tensors(adapter), gguf_metadata(adapter))
    change(made)
    refused(write_gguf_adapter(tmp_path / "x.gguf", made.tensors, made.config), words)


def test_large_rank_of_a_small_layer_is_read(tmp_path: Path) -> None:
    """A rank beyond a layer's width is no error below the limit, as training tools allow it."""
    base = {Q: BaseLayer(4, 8)}
    adapter = random_adapter(base, rank=1024)
    path = write_peft(tmp_path / "x", peft_tensors(adapter), peft_config(adapter))
    assert read_adapter(path, adapter_digest(path), base)[Q].a.shape == (1024, 8)
    adapter = random_adapter(base, rank=1025)
    path = write_peft(tmp_path / "y", peft_tensors(adapter), peft_config(adapter))
    with pytest.raises(AdapterError, match="rank 1,025 is larger than"):
        read_adapter(path, adapter_digest(path), base)


def test_experts_have_to_be_complete(tmp_path: Path) -> None:
    """An adapter of some experts of a layer is refused, and one of differing ranks or scales."""
    adapter = random_adapter(EXPERTS)
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_{}.weight"
    for case, (change, words) in enumerate(
        (
            (without(name.format("A"), name.format("B")), "it changes 2 experts"),
            (renamed("experts.2", "experts.3"), "it changes 3 experts"),
            (renamed("experts.", "experts.7"), "it changes 3 experts"),
            (setting(alpha_pattern={"experts.1.up_proj": 7}), "different scales"),
            (
                lambda made: (
                    with_tensor(name.format("A"), 2, 32)(made),
                    with_tensor(name.format("B"), 48, 2)(made),
                    setting(
                        rank_pattern={"experts.1.up_proj": 2},
                        alpha_pattern={"experts.1.up_proj": 4},
                    )(made),
                ),
                "different ranks",
            ),
        )
    ):
        made = MadeAdapter(peft_tensors(adapter), peft_config(adapter))
        change(made)
        path = write_peft(tmp_path / str(case), made.tensors, made.config)
        with pytest.raises(AdapterError, match=words):
            read_adapter(path, adapter_digest(path), EXPERTS)


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    """An adapter of three experts does not fit a model of four."""
    adapter = random_adapter(EXPERTS)
    path = write_mlx_lm(tmp_path, mlx_lm_tensors(adapter), mlx_lm_config(adapter))
    base = {name: BaseLayer(one.outputs, one.inputs, 4) for name, one in EXPERTS.items()}
    with pytest.raises(AdapterError, match=r"3 experts of .* model's is 4 experts of"):
        read_adapter(path, adapter_digest(path), base)


def test_llama_order_without_heads_is_refused(tmp_path: Path) -> None:
    """Rows in llama.cpp's order are not guessed where the model does not tell its heads."""
    adapter = random_adapter()
    path = write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(adapter), gguf_metadata(adapter))
    base = {name: BaseLayer(one.outputs, one.inputs) for name, one in BASE.items()}
    with pytest.raises(AdapterError, match=r"4 of 14 layers .* does not tell its heads"):
        read_adapter(path, adapter_digest(path), base)


def test_magnitudes_of_another_width_are_refused(tmp_path: Path) -> None:
    """DoRA's magnitudes are one for each output."""
    adapter = random_adapter(dora=True)
    tensors = peft_tensors(adapter)
    tensors[f"base_model.model.{Q}.lora_magnitude_vector"] = stored(np.ones((1, 64), np.float32))
    path = write_peft(tmp_path / "x", tensors, peft_config(adapter))
    refused(path, r"magnitudes \[1, 64\] are not one for each")
