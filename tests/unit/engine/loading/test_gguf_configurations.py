"""Configurations of GGUF files: what mlx-lm's architectures lack is refused by name, before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.checkpoints.gguf_checkpoint import GgufRules, Metadata, Tensors, write_gguf_checkpoint
from support.checkpoints.gguf_rules import every_rules

from machd.engine.loading.formats.gguf.header import GgufHeader, read_gguf_header
from machd.engine.loading.formats.gguf.reading import check_gguf, gguf_config
from machd.errors import ModelFormatError

_RULES = {rules.title: rules for rules in every_rules()}

_WIDE = {"attention.key_length": 64, "attention.value_length": 64}
"""Heads of another width than the hidden state's share, 32."""


def _header(path: Path, rules: GgufRules, changes: Mapping[str, object]) -> GgufHeader:
    """Write a file with other metadata, and read its header."""

    def change(metadata: Metadata, _tensors: Tensors) -> None:
        metadata.update({f"{rules.architecture}.{key}": value for key, value in changes.items()})

    path.mkdir()
    return read_gguf_header(write_gguf_checkpoint(path, rules, fault=change).file.path)


@pytest.mark.parametrize(
    ("title", "changes", "message"),
    [
        ("gemma", {"rope.scaling.factor": 2.0}, "scaled rotary positions"),
        ("gemma", {"rope.dimension_count": 16}, "partial rotary positions"),
        ("gemma2", {"rope.scale_linear": 2.0}, "scaled rotary positions"),
        ("gemma2", {"final_logit_softcapping": 0.0}, r"final_logit_softcapping is 0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping"),
        ("gemma3", {"rope.freq_base": None}, r"no gemma3\.rope\.freq_base"),
        ("gemma3", {"rope.dimension_count": 16}, "partial rotary positions"),
        ("starcoder2", {"attention.key_length": 64}, r"starcoder2\.attention\.key_length"),
        ("starcoder2", {"attention.layer_norm_epsilon": None}, r"layer_norm_epsilon"),
        ("stablelm", {"rope.scaling.factor": 2.0}, "scaled rotary positions"),
        ("stablelm", {"rope.dimension_count": 15}, r"rope\.dimension_count is 15 for heads of 32"),
        ("stablelm", {"rope.dimension_count": 48}, r"rope\.dimension_count is 48 for heads of 32"),
        ("command-r", {"logit_scale": None}, r"no command-r\.logit_scale"),
        ("cohere2", {"attention.sliding_window": None}, r"no cohere2\.attention\.sliding_window"),
        ("cohere2", {"rope.dimension_count": 16}, "partial rotary positions"),
        ("glm4", {"rope.scaling.factor": 4.0}, "scaled rotary positions"),
        ("granite", {"logit_scale": None}, r"no granite\.logit_scale"),
        ("granite", _WIDE | {"rope.dimension_count": 64}, r"granite\.attention\.key_length"),
        ("granite", {"rope.scaling.finetuned": False}, "granite without rotary positions"),
        ("llama", {"rope.dimension_count": 16}, "partial rotary positions"),
        ("llama", {"attention.value_length": 16}, r"llama\.attention\.value_length"),
        ("llama", {"rope.scaling.type": "longrope"}, "rotary scaling longrope"),
        ("llama-mixtral", _WIDE | {"rope.dimension_count": 64}, r"llama\.attention\.key_length"),
        ("llama-mixtral", {"rope.scaling.factor": 2.0}, "scaled rotary positions"),
        ("llama-mixtral", {"expert_used_count": None}, r"no llama\.expert_used_count"),
        ("olmo2-olmo3", {"rope.freq_base_swa": 500.0}, r"olmo2\.rope\.freq_base_swa"),
        ("olmo2-olmo3", {"attention.sliding_window_pattern": [True]}, "an entry for each layer"),
        ("gpt-oss", {"rope.freq_base_swa": 500.0}, r"gpt-oss\.rope\.freq_base_swa"),
        ("gpt-oss", {"attention.sliding_window_pattern": 1}, "sliding_window_pattern is 1"),
        ("gpt-oss", {"attention.sliding_window": None}, r"no gpt-oss\.attention\.sliding_window"),
        ("gpt-oss", {"expert_feed_forward_length": None}, r"no gpt-oss\.expert_feed_forward"),
        ("deepseek2", {"expert_weights_norm": True}, r"deepseek2\.expert_weights_norm"),
        ("deepseek2", {"expert_gating_func": 4}, "expert_gating_func is 4"),
        ("deepseek2", {"rope.scaling.type": "linear"}, r"rope\.scaling\.type linear"),
        ("deepseek2", {"rope.scaling.yarn_log_multiplier": None}, r"yarn_log_multiplier"),
        ("deepseek2", {"rope.dimension_count": 64}, "rope.dimension_count is 64"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, r"attention\.temperature_scale"),
        ("deepseek2", {"attention.kv_lora_rank": None}, r"no deepseek2\.attention\.kv_lora_rank"),
        ("qwen3next", {"ssm.group_count": 4}, "4 heads of keys do not divide 6"),
        ("qwen35", {"ssm.state_size": None}, r"no qwen35\.ssm\.state_size"),
        ("qwen35moe", {"nextn_predict_layers": 4}, "4 of 4 layers"),
        ("lfm2", {"attention.head_count_kv": [2, 4, 0, 2]}, r"lfm2\.attention\.head_count_kv"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, r"lfm2\.attention\.head_count_kv"),
        ("lfm2", {"attention.sliding_window": 64}, r"lfm2\.attention\.sliding_window"),
        ("lfm2", {"rope.scaling.factor": 2.0}, "scaled rotary positions"),
        ("qwen2", _WIDE, r"qwen2\.attention\.key_length"),
        ("qwen2moe", {"rope.scaling.factor": 2.0}, "scaled rotary positions"),
        ("qwen2moe", {"expert_count": None}, r"no qwen2moe\.expert_count"),
        ("qwen3-yarn", {"rope.scaling.attn_factor": 2.0}, r"scaling\.attn_factor is not"),
        ("qwen3-yarn", {"rope.scaling.yarn_attn_factor": 2.0}, "only as 1.0693"),
        ("qwen3-yarn", {"rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor is not supported"),
        ("qwen3moe", {"rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ("smollm3", {"rope.dimension_count": 16}, "partial rotary positions"),
        ("phi3", {"rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ("phi3-long", {"rope.scaling.attn_factor": None}, r"attn_factor is 1, where mlx-lm"),
        ("phi3-long", {"rope.scaling.original_context_length": None}, "original_context_length"),
    ],
)
def test_what_the_architecture_lacks_is_named(
    tmp_path: Path, title: str, changes: dict[str, object], message: str
) -> None:
    """The message has the key or the feature, and the file as it was is read."""
    rules = _RULES[title]
    check_gguf(_header(tmp_path / "right", rules, {}))
    wrong = _header(tmp_path / "wrong", rules, changes)
    with pytest.raises(ModelFormatError, match=message):
        check_gguf(wrong)


def test_vision_file_is_told_apart_from_a_language_model(tmp_path: Path) -> None:
    """A file of llama.cpp's that is called mmproj is no unknown model; the message says which file to take."""

    def clip(metadata: Metadata, _tensors: Tensors) -> None:
        metadata["general.architecture"] = "clip"

    path = write_gguf_checkpoint(tmp_path, _RULES["gemma3"], fault=clip).file.path
    with pytest.raises(ModelFormatError, match="give the file of the language model"):
        check_gguf(read_gguf_header(path))


def test_vision_tensors_beside_a_language_model_are_named(tmp_path: Path) -> None:
    """Ollama's files of Gemma 3 hold both, which the message says."""

    def with_vision(_metadata: Metadata, tensors: Tensors) -> None:
        tensors["v.blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"]

    path = write_gguf_checkpoint(tmp_path, _RULES["gemma3"], fault=with_vision).file.path
    with pytest.raises(ModelFormatError, match=r"vision part .* \(v\.blk\.0\.attn_q\.weight\)"):
        check_gguf(read_gguf_header(path))


def test_rotary_part_of_a_head_is_the_files_number_after_rounding_down(tmp_path: Path) -> None:
    """mlx-lm multiplies the part by a head's width and cuts: 30 of 44 dimensions would become 29."""
    changes = {"attention.key_length": 44, "rope.dimension_count": 30}
    found = gguf_config(_header(tmp_path / "glm4", _RULES["glm4"], changes))
    assert isinstance(found["partial_rotary_factor"], float)
    assert int(44 * (30 / 44)) == 29
    assert int(44 * found["partial_rotary_factor"]) == 30


@pytest.mark.parametrize(
    ("family", "layers", "scalar"),
    [("gemma2", 42, 64), ("gemma2", 46, 32), ("gemma3", 48, 64), ("gemma3", 62, 32)],
)
def test_scale_of_queries_follows_the_size(
    tmp_path: Path, family: str, layers: int, scalar: int
) -> None:
    """The 27B sizes divide the hidden state, 128, by 4 heads; others take a head's width. No key says it, as in llama.cpp."""
    changes = {"attention.key_length": 64, "block_count": layers}
    found = gguf_config(_header(tmp_path / family, _RULES[family], changes))
    assert found["query_pre_attn_scalar"] == scalar


def test_gemma_3_without_a_window_sees_the_whole_context_in_every_layer(tmp_path: Path) -> None:
    """llama.cpp uses no windows where the key is 0 or absent."""
    for window in (0, None):
        header = _header(
            tmp_path / str(window), _RULES["gemma3"], {"attention.sliding_window": window}
        )
        assert gguf_config(header)["sliding_window_pattern"] == 1


@pytest.mark.parametrize(
    ("pattern", "slides"), [(None, [1, 1, 1, 0, 1]), (2, [1, 0, 1, 0, 1]), (0, [1, 1, 1, 1, 1])]
)
def test_period_of_windows_says_which_layers_have_one(
    tmp_path: Path, pattern: int | None, slides: list[int]
) -> None:
    """A number is the period whose last layer sees the whole context, by default 4; with 0 none does. llama.cpp counts so."""
    changes = {"block_count": len(slides), "attention.sliding_window_pattern": pattern}
    found = gguf_config(_header(tmp_path / "olmo3", _RULES["olmo2-olmo3"], changes))
    assert found["layer_types"] == [
        "sliding_attention" if one else "full_attention" for one in slides
    ]


def test_factors_that_a_granite_lacks_are_1(tmp_path: Path) -> None:
    """And scores are divided by the root of a head's width, where the file has no scale or 0, as in llama.cpp."""
    changes = {"embedding_scale": None, "residual_scale": 0.0, "attention.scale": 0.0}
    found = gguf_config(_header(tmp_path / "granite", _RULES["granite"], changes))
    assert (found["embedding_multiplier"], found["residual_multiplier"]) == (1, 1)
    assert found["attention_multiplier"] == 32**-0.5
