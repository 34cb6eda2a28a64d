"""Python code planted in a checkpoint, in every place from which a library can load it.

Code that runs leaves a witness: a file that it creates.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_NAMED: Mapping[str, object] = {
    **dict.fromkeys(
        (
            *("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"),
            *("AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor"),
        ),
        "planted.Class",
    ),
    "AutoTokenizer": ["planted.Class", "planted.Class"],
}

_SHADOWED = ("jinja2", "mlx_lm", "numpy", "PIL", "tokenization_utils", "transformers")
"""Modules that a library could take from a checkpoint's folder instead of its own."""

_ESCAPES = (
    "{{ cycler.__init__.__globals__.os.system(command) }}",
    "{{ lipsum.__globals__['os'].system(command) }}",
    "{{ self.__init__.__globals__.__builtins__.open(witness, 'w') }}",
    "{{ raise_exception.__globals__['__builtins__']['open'](witness, 'w') }}",
    "{{ strftime_now.__globals__['__builtins__']['open'](witness, 'w') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ('%s' % 1).format.__self__.__class__.__base__.__subclasses__() }}",
    "{% for key in messages.__class__.__base__.__subclasses__() %}{{ key(witness) }}{% endfor %}",
    "{% set _ = messages.append(namespace.__init__.__globals__) %}",
    "{% include witness %}",
    "{% import witness as planted %}",
)
"""Templates that reach for Python's modules, each by another way out of a sandbox."""


class _Pickled:
    """An object whose unpickling creates the witness."""

    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._witness), "w")


def _code(witness: Path) -> str:
    return (
        f"open({str(witness)!r}, 'w').close()\n"
        "class Class:\n"
        "    register_for_auto_class = from_pretrained = classmethod(lambda cls, *_, **__: cls())\n"
        "Model = ModelArgs = Class\n"
    )


def _change(path: Path, **keys: object) -> None:
    value: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**value, **keys}), encoding="utf-8")


def _auto_map(directory: Path, _: Path, *, file: str) -> None:
    _change(directory / file, auto_map=_NAMED)


def _nested(directory: Path, _: Path, *, part: str) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8"))
    inner = config.get(part)
    _change(path, **{part: {**(inner if isinstance(inner, dict) else {}), "auto_map": _NAMED}})


def _other_configuration(directory: Path, _: Path) -> None:
    """Plant a second configuration, which transformers reads where the first one names it."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    _change(directory / "config.4.0.0.json", **{**config, "auto_map": _NAMED})
    _change(directory / "config.json", configuration_files=["config.4.0.0.json"])


def _path(directory: Path, _: Path) -> None:
    _change(
        directory / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, f"{directory / 'planted'}.Class"]},
    )


def _repository(directory: Path, _: Path) -> None:
    _change(directory / "config.json", auto_map={"AutoConfig": "org/name--planted.Class"})


def _template(directory: Path, witness: Path, *, file: str) -> None:
    """Plant a template that tries every way out, and goes on where one is closed."""
    setting = f"{{% set witness = {str(witness)!r} %}}{{% set command = 'touch {witness}' %}}"
    # An error in one ends the template, so a message says which one it is to be.
    body = "".join(
        f"{{% {'elif' if number else 'if'} messages[0].content == '{number}' %}}{one}"
        for number, one in enumerate(_ESCAPES)
    )
    text = f"{setting}{body}{{% else %}}{{{{ messages[0].content }}}}{{% endif %}}"
    path = directory / file
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        _change(path, chat_template=text)
    else:
        path.write_text(text, encoding="utf-8")


def _pickled(directory: Path, witness: Path) -> None:
    content = pickle.dumps(_Pickled(witness))
    for name in (
        *(
            "pytorch_model.bin",
            "model.bin",
            "model.pt",
            "model.pth",
            "model.ckpt",
            "consolidated.00.pth",
        ),
        *("adapter_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl", "tokenizer.pkl"),
        *("weights.npz", "model.npz", "preprocessor.npy", "spiece.model.pkl", "vocab.bin"),
    ):
        (directory / name).write_bytes(content)


def _shadows(directory: Path, witness: Path) -> None:
    for name in _SHADOWED:
        (directory / f"{name}.py").write_text(_code(witness), encoding="utf-8")
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(_code(witness), encoding="utf-8")
    (directory / "sitecustomize.py").write_text(_code(witness), encoding="utf-8")
    _change(directory / "generation_config.json", custom_generate="custom_generate")


def _modules_of_libraries(directory: Path, _: Path) -> None:
    """Name modules of the checkpoint's where mlx-lm looks for its own."""
    _change(
        directory / "tokenizer_config.json",
        chat_template_type="..planted",
        tool_parser_type=f"{directory}/planted",
    )


NAMED_PLACES: Mapping[str, Callable[[Path, Path], None]] = {
    **{
        file: partial(_auto_map, file=file)
        for file in (
            *("config.json", "tokenizer_config.json", "processor_config.json"),
            *("preprocessor_config.json", "video_preprocessor_config.json"),
            *("generation_config.json", "adapter_config.json"),
        )
    },
    "text_config": partial(_nested, part="text_config"),
    "vision_config": partial(_nested, part="vision_config"),
    "another config.json": _other_configuration,
    "a path": _path,
    "another repository": _repository,
}
"""Places in which a file names classes of the checkpoint's own."""

OTHER_PLACES: Mapping[str, Callable[[Path, Path], None]] = {
    **{
        f"template in {file}": partial(_template, file=file)
        for file in (
            *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
            *("chat_template.json", "tokenizer_config.json"),
        )
    },
    "pickled files": _pickled,
    "modules of others' names": _shadows,
    "mlx-lm's modules": _modules_of_libraries,
}
"""Places from which a library might run code that no file asks for."""

TEMPLATE_ESCAPES = len(_ESCAPES)
"""Messages from "0" on, each of which has a planted template try another way out."""


def plant(directory: Path, witness: Path, *places: Callable[[Path, Path], None]) -> None:
    """Write code beside a checkpoint's files, and plant it in some places."""
    (directory / "planted.py").write_text(_code(witness), encoding="utf-8")
    for place in places:
        place(directory, witness)
