"""A front opened in a process without mlx answers as the engine's own tokenizer and processor do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
from support import module_command
from support.checkpoints.kept_family import write_kept_family
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
from machd.engine.vision.mlx_vlm_import import is_installed
from machd.errors import ModelError

_FILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_CALLING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)


class _Front(NamedTuple):
    """A front to open, and what it has to say."""

    opening: Opening
    expected: Opened


def _opened(*openings: Opening) -> list[Opened]:
    """Open fronts in one fresh process."""
    done = subprocess.run(
        module_command("support.engines.opened_front"),
        input=msgspec.json.encode(openings),
        stdout=subprocess.PIPE,
        check=True,
        timeout=CEILING_S,
    )
    return msgspec.json.decode(done.stdout, type=list[Opened])


def _front(source: ModelSource, loaded: LoadedModel, image: bytes = b"") -> _Front:
    opening = Opening(source.kind, os.fspath(source.path), loaded.description, image)
    answers = answers_of(loaded.tokenizer)
    seen = None if loaded.vision is None else image_of(loaded.vision, image)
    return _Front(opening, Opened(answers, seen, []))


def _directory(path: Path) -> ModelSource:
    return ModelSource(SourceKind.DIRECTORY, path, path.name)


@pytest.fixture(name="fronts", scope="module")
def _fronts(
    embedded_model_path: Path, embedded_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, _Front]:
    """One of a GGUF file, one of a checkpoint with its own template, calls and fill tokens, and one that takes images."""
    folder = tmp_path_factory.mktemp("fronts")
    file = ModelSource(SourceKind.GGUF, embedded_model_path, EMBEDDED_MODEL_ID)
    fronts = {"file": _front(file, embedded_model)}

    source = _directory(write_tiny_llama(folder / "tiny", added_tokens=_FILL_TOKENS))
    (source.path / "chat_template.jinja").write_text(_CALLING_TEMPLATE, encoding="utf-8")
    loaded = load_model(source, dtype="float32")
    fronts["directory"] = _front(source, loaded)
    loaded.tokenizer.close()
    assert fronts["directory"].expected.answers.call
    assert fronts["directory"].expected.answers.fill

    if is_installed():
        source = _directory(write_kept_family("qwen2_vl", folder / "qwen2_vl"))
        loaded = load_model(source, dtype="float32")
        assert loaded.vision is not None
        fronts["vision"] = _front(source, loaded, image_files.deep_png())
        loaded.tokenizer.close()
        loaded.vision.close()
        assert fronts["vision"].expected.seen is not None
    return fronts


def test_fronts_answer_without_mlx(fronts: Mapping[str, _Front]) -> None:
    """They read and write texts, and decode images, as the engine does, and import nothing that computes."""
    opened = _opened(*(one.opening for one in fronts.values()))
    assert opened == [one.expected for one in fronts.values()]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "directory", "vision"])
def test_front_needs_nothing_of_another(fronts: Mapping[str, _Front], kind: str) -> None:
    """In a process of its own it answers the same."""
    if kind not in fronts:
        pytest.skip("the extra vision is not installed")
    front = fronts[kind]
    assert _opened(front.opening) == [front.expected]


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
