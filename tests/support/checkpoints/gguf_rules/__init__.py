"""How llama.cpp's converter writes each family: a module a family, with ``RULES``; :func:`every_rules` finds them all."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from support.checkpoints.gguf_checkpoint import GgufRules


def every_rules() -> list[GgufRules]:
    """Return the rules of every family."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    return [rules for module in modules for rules in getattr(module, "RULES", ())]
