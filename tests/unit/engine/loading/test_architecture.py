"""mlx-lm's settings for tokenizers, read without importing its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.architecture import _module_name, tokenizer_defaults

import_mlx_lm()
from mlx_lm import utils  # noqa: E402 - after import_mlx_lm()

_SOURCES = sorted((Path(utils.__file__).parent / "models").glob("*.py"))
_SET = [one.stem for one in _SOURCES if "TOKENIZER_DEFAULTS" in one.read_text("utf-8")]


@pytest.mark.parametrize("model_type", [*_SET, "llama", "mistral", "no_such", "../models/llama"])
def test_tokenizer_defaults_are_those_of_mlx_lm(model_type: str, tmp_path: Path) -> None:
    """Every architecture whose source has them, and some that have none."""
    config = {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert tokenizer_defaults(config) == utils._tokenizer_defaults(tmp_path)
    assert (tokenizer_defaults(config) is not None) == (model_type in _SET)


@pytest.mark.parametrize(
    ("model_type", "architectures"),
    [
        *((model_type, []) for model_type in utils.MODEL_REMAPPING),
        *((model_type, ["Other", name]) for model_type, name in utils.MODEL_ARCHITECTURE_REMAPPING),
        *((model_type, name) for model_type, name in utils.MODEL_ARCHITECTURE_REMAPPING),
    ],
)
def test_module_of_a_renamed_architecture_is_that_of_mlx_lm(
    model_type: str, architectures: object
) -> None:
    """Several names of a configuration lead to one module, as mlx-lm's own tables say."""
    config = {"model_type": model_type, "architectures": architectures}
    classes = utils._get_classes(config)
    found = _module_name(config, Path(utils.__file__))
    assert classes[0].__module__ == f"mlx_lm.models.{found}"
