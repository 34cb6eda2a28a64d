"""The architectures of the installed mlx-lm."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from machd.engine.backend.untyped import LanguageModel
from machd.errors import ModelArchitectureError

_MODULE_NAME = re.compile(r"\w[\w-]*")
_PACKAGE = "mlx_lm.models."
_ASKED_FOR = {"olmo": "hf_olmo"}
"""Architecture to the package without which its module calls ``sys.exit``. The package only registers a
tokenizer with transformers, which checkpoints in Hugging Face layout contain anyway."""


def check_architecture(config: dict[str, object]) -> None:
    """Check that mlx-lm has the classes of a configuration's model.

    Raises:
        ModelArchitectureError: mlx-lm has no such architecture, or cannot import it here.
    """
    from mlx_lm.utils import _get_classes  # noqa: PLC0415 - imported by the loader

    model_type = str(config["model_type"])
    problem = "the installed mlx-lm has no such architecture; a newer one may"
    if _MODULE_NAME.fullmatch(model_type):
        try:
            _stand_in(model_type)
            _get_classes(config)
        except (ValueError, AttributeError):
            pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module's import raises anything
            problem = f"mlx-lm cannot import it here: {error}"
        else:
            return
    raise ModelArchitectureError(f"model_type {model_type}: {problem}")


def tokenizer_defaults(config: Mapping[str, object]) -> dict[str, Any] | None:
    """Return mlx-lm's settings for the tokenizers of an architecture whose checkpoints lack them; None for most.

    They are read from the source of mlx-lm, because importing the architecture imports mlx.
    """
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None, "machd depends on it"
    folder = Path(next(iter(spec.submodule_search_locations or [])))
    name = _module_name(config, folder / "utils.py")
    module = folder / "models" / f"{name}.py"
    if not _MODULE_NAME.fullmatch(name) or not module.is_file():
        return None
    defaults: dict[str, Any] | None = _constant(module, "TOKENIZER_DEFAULTS")
    return defaults


def _module_name(config: Mapping[str, object], utils: Path) -> str:
    """Find the name of the module that ``mlx_lm.utils._get_classes`` imports for a configuration."""
    model_type = str(config["model_type"])
    architectures = config.get("architectures") or ()
    listed = architectures if isinstance(architectures, list) else [architectures]
    renamed = _constant(utils, "MODEL_ARCHITECTURE_REMAPPING")
    found = (renamed.get((model_type, one)) for one in listed if isinstance(one, str))
    by_type = _constant(utils, "MODEL_REMAPPING").get(model_type, model_type)
    return str(next((one for one in found if one is not None), by_type))


def _constant(source: Path, name: str) -> Any:  # noqa: ANN401 - any literal
    """Read a constant of a module from its source; None where it has none of that name."""
    for statement in ast.parse(source.read_bytes()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return ast.literal_eval(statement.value)
    return None


def architecture_name(model: LanguageModel, model_type: str) -> str:
    """Find mlx-lm's name of the architecture, which several model types may share."""
    module = type(model).__module__
    return module.removeprefix(_PACKAGE) if module.startswith(_PACKAGE) else model_type


def import_architecture(name: str) -> ModuleType:
    """Import mlx-lm's module of an architecture.

    Raises:
        BaseException: Any error of the module's import, ``SystemExit`` included.
    """
    _stand_in(name)
    return importlib.import_module(_PACKAGE + name)


def _stand_in(name: str) -> None:
    """Replace a package that an architecture imports and never uses with an empty module."""
    asked_for = _ASKED_FOR.get(name)
    if asked_for is None or asked_for in sys.modules:
        return
    if importlib.util.find_spec(asked_for) is None:
        sys.modules[asked_for] = ModuleType(asked_for)
