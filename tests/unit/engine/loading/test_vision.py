"""Checkpoints that are served with their vision tower, and why others are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints.kept_family import write_kept_family

from machd.capabilities.fit import MemoryNeeds
from machd.engine.backend.safetensors_header import StoredTensor
from machd.engine.loading.formats import checkpoint as checkpoints
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.loader import MemoryShare, load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.vision.media_processor import ProcessorFiles
from machd.errors import ModelFormatError
from machd.installed import how_to_install

_TENSOR = (Path("model.safetensors"), StoredTensor(0, 4))
_WHOLE = Checkpoint(
    path=Path("model"),
    config={"model_type": "qwen2_vl", "vision_config": {"depth": 2}},
    weight_files=(),
    stored_bytes=4,
    tensors={"visual.patch_embed.proj.weight": _TENSOR},
    code_files=(),
)


def test_vision_is_loaded_for_a_compared_family() -> None:
    """A checkpoint with a tower, its weights and a family that was compared is served with it."""
    assert _WHOLE.takes_images
    assert not _WHOLE.vision_reason


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (replace(_WHOLE, tensors={"lm_head.weight": _TENSOR}), "the weights hold none"),
        (replace(_WHOLE, config={**_WHOLE.config, "model_type": "paligemma"}), "attends to all"),
        (replace(_WHOLE, config={**_WHOLE.config, "model_type": "new_vl"}), "not compared"),
        (
            replace(
                _WHOLE,
                config={
                    **_WHOLE.config,
                    "model_type": "gemma4",
                    "text_config": {"use_bidirectional_attention": "vision"},
                },
            ),
            "in one pass",
        ),
    ],
    ids=["text weights alone", "a refused family", "an unknown family", "both directions"],
)
def test_vision_is_left_out_with_a_reason(checkpoint: Checkpoint, said: str) -> None:
    """The operator is told why such a checkpoint takes text only."""
    assert not checkpoint.takes_images
    assert said in checkpoint.vision_reason


def test_vision_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mlx-vlm the text is served, and the command that installs it is named."""
    monkeypatch.setattr(checkpoints, "is_installed", lambda: False)
    assert not _WHOLE.takes_images
    assert how_to_install("vision") in _WHOLE.vision_reason


def test_a_text_model_has_no_reason() -> None:
    """Nothing is said of a model without a tower."""
    assert not replace(_WHOLE, config={"model_type": "llama"}).vision_reason


def test_processor_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    """An error of mlx-vlm's or transformers' in the processor's process is a message, without its traceback."""
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    files = ProcessorFiles(tmp_path)
    try:
        with pytest.raises(ModelFormatError, match="cannot be loaded") as caught:
            files.ready()
    finally:
        files.close()
    assert "\n" not in caught.value.message


def test_what_is_kept_of_images_is_among_the_needs_of_a_model_among_others(tmp_path: Path) -> None:
    """Processed images and their embeddings have as much memory each."""
    path = write_kept_family("qwen2_vl", tmp_path / "qwen2_vl")
    source = ModelSource(SourceKind.DIRECTORY, path, path.name)
    asked = list[MemoryNeeds]()
    for media_bytes in (0, 1_000_000):
        load_model(source, media_bytes=media_bytes, share=MemoryShare(1 << 40, asked.append))
    none, some = asked
    assert some.working_bytes == none.working_bytes + 2_000_000
