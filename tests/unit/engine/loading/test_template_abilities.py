"""The abilities of a chat template are found by trying it, and trying it is safe."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints.header_checkpoint import write_header_checkpoint, write_tokenizer_files
from unit.engine.tiny_llama import CONFIG, TinyLlama

from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.loading.template_abilities import TemplateAbilities
from machd.engine.protocol.chat_format import SystemMessages
from machd.errors import ModelFormatError, SettingsError

pytestmark = pytest.mark.usefixtures("quick_inspections")

SMALL = {
    **CONFIG,
    "hidden_size": 64,
    "vocab_size": 264,
    "tie_word_embeddings": False,
}


def inspected(path: Path, *, chat_template: str | None = None) -> TemplateAbilities:
    """Inspect a directory, and return the abilities of its template."""
    source = ModelSource(SourceKind.DIRECTORY, path, path.name)
    return inspect_model(source, chat_template=chat_template).template


def abilities(directory: Path, template: str | None, *added: str) -> TemplateAbilities:
    """Inspect a chat template, with some added tokens."""
    path = write_header_checkpoint(directory, config=SMALL)
    write_tokenizer_files(path, template=template, added=added)
    return inspected(path)


def test_model_without_template_is_reported(tmp_path: Path) -> None:
    """A model that takes prompts only is no error."""
    found = abilities(tmp_path / "plain", None)
    assert not found.present
    assert "no chat template" in found.problem
    assert "`--model-chat-template none`" in found.problem


def test_model_served_without_chat_is_reported(tmp_path: Path) -> None:
    """The hint to serve without chat is left out where the settings say so already."""
    path = write_header_checkpoint(tmp_path / "plain", config=SMALL)
    found = inspected(path, chat_template="none")
    assert found.problem == "served without chat, as model.chat_template says"


def test_a_template_without_end_is_not_read_to_its_end(tiny: TinyLlama, tmp_path: Path) -> None:
    """Neither the model's own nor the one that the settings name, to check it or to load it."""
    endless = tmp_path / "endless.jinja"
    with endless.open("wb") as opened:
        opened.truncate(3 << 30)
    for read in (inspect_model, load_model):
        with pytest.raises(SettingsError, match="larger than"):
            read(tiny.source, chat_template=str(endless))
    endless.rename(tiny.path / "chat_template.jinja")
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match="larger than"):
            read(tiny.source)


def test_lines_of_a_template_end_as_transformers_reads_them(tiny: TinyLlama) -> None:
    """A template that was written on Windows makes the prompt that it makes anywhere."""
    windows = tiny.path / "windows.jinja"
    windows.write_bytes(b"{{ messages[0].content }}\r\n{{ messages[-1].content }}")
    tokenizer = load_model(tiny.source, chat_template=str(windows)).tokenizer
    prompt = tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert prompt == "a\na"


def test_a_system_message_is_seen_or_refused(tmp_path: Path) -> None:
    """Told by what reaches the prompt, not by what the template mentions."""
    shown = abilities(tmp_path / "one", "{{ messages[0].content }}").system_messages
    assert shown is SystemMessages.FIRST
    mentions = "{# system #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert abilities(tmp_path / "two", mentions).system_messages is SystemMessages.NONE
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    refused = abilities(tmp_path / "three", refuses + "{{ messages[0].content }}")
    assert refused.system_messages is SystemMessages.NONE
    assert not refused.problem


def test_tools_and_how_they_are_called(tmp_path: Path) -> None:
    """The template has to show them; mlx-lm knows how calls are written."""
    shows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    unknown = abilities(tmp_path / "one", shows)
    assert (unknown.tools, unknown.tool_format) == (True, None)
    known = abilities(tmp_path / "two", shows + "{% if false %}[TOOL_CALLS]{% endif %}")
    assert (known.tools, known.tool_format) == (True, "mistral")
    assert not abilities(tmp_path / "three", "{{ messages[0].content }}").tools


def test_reasoning_and_its_switch(tmp_path: Path) -> None:
    """The tags are tokens; the switch is what changes the prompt."""
    tags = ("<think>", "</think>")
    plain = abilities(tmp_path / "one", "{{ messages[0].content }}", *tags)
    assert (plain.reasoning_tags, plain.reasoning_switch) == (tags, False)
    switch = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    assert abilities(tmp_path / "two", switch, *tags).reasoning_switch
    assert abilities(tmp_path / "three", switch).reasoning_tags is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**11 }}{{ messages[0].content }}",
        "{% set x = namespace(s='a') %}{% for i in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10**(10**8) }}",
        "{{ (10**(10**8)) % 7 }}{{ messages[0].content }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% for m in messages %}{{ m.content",
        "{{ raise_exception('never') }}",
        "{{ messages[7].content.nothing }}",
    ],
)
def test_hostile_template_is_reported(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may not take the process's time or memory, nor look behind the sandbox."""
    monkeypatch.setattr("machd.engine.loading.template_abilities._RENDER_LIMIT_S", 0.3)
    found = abilities(tmp_path / "hostile", template)
    assert found.present
    assert found.problem.startswith("the chat template fails:")


def test_template_settings_are_those_of_serve(tiny: TinyLlama, tmp_path: Path) -> None:
    """Another template replaces the model's, and the word none takes it away."""
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[-1].content }}", encoding="utf-8")
    replaced = inspected(tiny.path, chat_template=str(other))
    assert replaced.system_messages is SystemMessages.NONE
    assert not inspected(tiny.path, chat_template="none").present
    with pytest.raises(SettingsError):
        inspected(tiny.path, chat_template=str(tmp_path / "absent"))
