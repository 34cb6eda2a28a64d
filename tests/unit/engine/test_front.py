"""A front opened in a process without mlx answers as the engine's own tokenizer and processor do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from support import module_command
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients import image_files
from support.clocks.polling import CEILING_S
from support.engines.fake_engine import FakeEngine
from support.engines.opened_front import Opened, Opening, answers_of, image_of

from machd.engine import front
from machd.engine.loading.embedded import EMBEDDED_MODEL_ID
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.loader import LoadedModel, load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import ModelError
from machd.user_directories import user_cache_directory

_FILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_CALLING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)


def _opened(source: ModelSource, loaded: LoadedModel, image: bytes = b"") -> Opened:
    """Open the front of a loaded model in a fresh process."""
    opening = Opening(source.kind, os.fspath(source.path), loaded.description, image)
    done = subprocess.run(
        module_command("support.engines.opened_front"),
        input=msgspec.json.encode(opening),
        stdout=subprocess.PIPE,
        check=True,
        timeout=CEILING_S,
    )
    return msgspec.json.decode(done.stdout, type=Opened)


def _directory(path: Path) -> ModelSource:
    return ModelSource(SourceKind.DIRECTORY, path, path.name)


def test_front_of_the_embedded_model_answers_without_mlx(
    embedded_model_path: Path, embedded_model: LoadedModel
) -> None:
    """The front of a GGUF file reads and writes text as the engine does, and imports nothing that computes."""
    source = ModelSource(SourceKind.GGUF, embedded_model_path, EMBEDDED_MODEL_ID)
    opened = _opened(source, embedded_model)
    assert opened == Opened(answers_of(embedded_model.tokenizer), None, [])


def test_front_of_a_directory_answers_without_mlx(tmp_path: Path) -> None:
    """The front of a checkpoint knows its own template, calls and fill tokens as the engine does."""
    source = _directory(write_tiny_llama(tmp_path / "tiny", added_tokens=_FILL_TOKENS))
    (source.path / "chat_template.jinja").write_text(_CALLING_TEMPLATE, encoding="utf-8")
    loaded = load_model(source, dtype="float32")
    answers = answers_of(loaded.tokenizer)
    loaded.tokenizer.close()
    assert answers.call
    assert answers.fill
    assert _opened(source, loaded) == Opened(answers, None, [])


def test_front_of_a_model_with_vision_processes_images_without_mlx(tmp_path: Path) -> None:
    """The front's own process decodes an image to the tokens and arrays that the engine was loaded with."""
    pytest.importorskip("mlx_vlm")
    from machd_probes.vision_families.checkpoint import write_family  # noqa: PLC0415 - needs mlx-vlm

    written = write_family("qwen2_vl", tmp_path / "qwen2_vl", user_cache_directory(os.environ))
    source, image = _directory(written), image_files.deep_png()
    loaded = load_model(source, dtype="float32")
    assert loaded.vision is not None
    expected = Opened(answers_of(loaded.tokenizer), image_of(loaded.vision, image), [])
    loaded.tokenizer.close()
    loaded.vision.close()
    assert _opened(source, loaded, image) == expected


def test_processor_of_a_model_that_takes_no_images_after_all_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started beside the loading, of which ranks or a missing chat template come out without images."""
    source = _directory(write_tiny_llama(tmp_path / "tiny"))
    files = Mock()
    monkeypatch.setattr(Checkpoint, "takes_images", True)
    monkeypatch.setattr(front, "ProcessorFiles", files)
    texts = front.Texts(source, chat_template=None, trust_remote_code=False)
    files.assert_called_once_with(source.path, trust_remote_code=False)
    files.return_value.close.assert_not_called()

    opened = texts.front(FakeEngine().model, FakeEngine().grammars)

    assert opened.media is None
    files.return_value.close.assert_called_once_with()
    opened.close()


def test_processor_is_ended_when_there_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine process says why the model is not served."""
    source = _directory(write_tiny_llama(tmp_path / "tiny"))
    (source.path / "tokenizer.json").write_text("{}", encoding="utf-8")
    files = Mock()
    monkeypatch.setattr(Checkpoint, "takes_images", True)
    monkeypatch.setattr(front, "ProcessorFiles", files)

    with pytest.raises(ModelError):
        front.Texts(source, chat_template=None, trust_remote_code=False)

    files.return_value.close.assert_called_once_with()
