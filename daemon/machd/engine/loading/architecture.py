"""Whether the installed mlx-lm has a model's architecture, asked before its weights are read."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType

from machd.engine.backend.untyped import LanguageModel
from machd.errors import ModelArchitectureError

_MODULE_NAME = re.compile(r"\w[\w-]*")
_PACKAGE = "mlx_lm.models."
_ASKED_FOR = {"olmo": "hf_olmo"}
"""Packages that a module only looks for, to leave the process if it does not find them: ai2-olmo
registers a tokenizer with transformers, which checkpoints in Hugging Face layout bring along."""


def check_architecture(config: dict[str, object]) -> None:
    """Look up the classes that mlx-lm would build, and build nothing.

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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module's import does anything
            # One architecture calls sys.exit when an optional package is missing.
            problem = f"mlx-lm cannot import it here: {error}"
        else:
            return
    raise ModelArchitectureError(f"model_type {model_type}: {problem}")


def architecture_name(model: LanguageModel, model_type: str) -> str:
    """mlx-lm's name of the architecture, which several model types may share."""
    module = type(model).__module__
    return module.removeprefix(_PACKAGE) if module.startswith(_PACKAGE) else model_type


def import_architecture(name: str) -> ModuleType:
    """mlx-lm's module of an architecture.

    Raises:
        BaseException: Whatever the module's import raises, ``SystemExit`` among it.
    """
    _stand_in(name)
    return importlib.import_module(_PACKAGE + name)


def _stand_in(name: str) -> None:
    """Put an empty module where an architecture only looks whether there is one."""
    asked_for = _ASKED_FOR.get(name)
    if asked_for is None or asked_for in sys.modules:
        return
    if importlib.util.find_spec(asked_for) is None:
        sys.modules[asked_for] = ModuleType(asked_for)
