"""The architectures of the installed mlx-lm."""

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
"""Architecture to a package that its module looks for and calls ``sys.exit`` without. The package
registers a tokenizer with transformers, which checkpoints in Hugging Face layout bring along."""


def check_architecture(config: dict[str, object]) -> None:
    """Look up the classes that mlx-lm would build a configuration's model of.

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
    """Put an empty module in the place of a package that an architecture only looks for."""
    asked_for = _ASKED_FOR.get(name)
    if asked_for is None or asked_for in sys.modules:
        return
    if importlib.util.find_spec(asked_for) is None:
        sys.modules[asked_for] = ModuleType(asked_for)
