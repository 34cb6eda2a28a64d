"""The import of mlx-lm, whole or its tokenizers alone, without its side effects on the process.

``mlx_lm.utils`` sets the limit of open files to (2048, 4096) when it is imported: it takes files
away from a daemon that was given more, forbids an unprivileged process to ask for them again, and
fails the import where the hard limit is lower. mlx-lm 0.32.2; the limit is the operator's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import sys
from types import ModuleType

from machd.engine.backend.transformers_import import import_transformers


def import_mlx_lm() -> None:
    """Import mlx-lm and leave the limit of open files alone. Call it before any other import of it.

    It imports mlx too, so a BLAS and a scratch directory are chosen before. Takes about 0.9 s, and
    nothing the second time.
    """
    package = sys.modules.get("mlx_lm")
    if package is not None and "load" in vars(package):
        return
    import_transformers()
    set_limit = resource.setrlimit
    resource.setrlimit = _keep_limit
    try:
        if package is None:
            import mlx_lm  # noqa: F401, PLC0415 - this is the one place
        else:
            importlib.reload(package)  # run for the first time, after import_mlx_lm_tokenizers()
    finally:
        resource.setrlimit = set_limit


def import_mlx_lm_tokenizers() -> None:
    """Import mlx-lm's tokenizers without mlx, which only the package's ``__init__`` and the models import.

    The package is in place and has not run, so ``mlx_lm.tool_parsers`` and ``mlx_lm.chat_templates`` can be imported
    afterwards, and :func:`import_mlx_lm` runs it. Does nothing where mlx-lm has been imported whole.
    """
    import_transformers()
    if "mlx_lm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        assert spec is not None, "machd depends on it"
        sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
    # One text at a time needs no pool of threads, which could not be started later where memory is short.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251 - written for a library, not read
    import mlx_lm.tokenizer_utils  # noqa: F401, PLC0415 - this is the one place


def import_mlx_lm_without_tokenizers() -> None:
    """Import mlx-lm in half the time, for a process that builds models and loads no tokenizer.

    mlx-lm imports all of transformers for its tokenizers' classes. Here packages stand in that
    have its files and none of its classes, so that single modules of it can still be imported.
    """
    if "mlx_lm" in sys.modules or "transformers" in sys.modules:
        import_mlx_lm()
        return
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "mlx-lm depends on it"
    folder = next(iter(spec.submodule_search_locations or []))
    package = _package("transformers", folder)
    package.utils = _package("transformers.utils", f"{folder}/utils")  # type: ignore[attr-defined]
    base = sys.modules["transformers.tokenization_utils_base"] = ModuleType(
        "transformers.tokenization_utils_base"
    )
    base.PreTrainedTokenizerBase = _NoTokenizer  # type: ignore[attr-defined]
    for name in ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"):
        setattr(package, name, _NoTokenizer)
    import_mlx_lm()


class _NoTokenizer:
    apply_chat_template = None

    @classmethod
    def register(cls, *_: object, **__: object) -> None:
        """Do nothing: the class is never looked up."""


def _package(name: str, folder: str) -> ModuleType:
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [folder]
    return package


def _keep_limit(_which: int, _limits: tuple[int, int], /) -> None:
    """Do nothing, in place of ``resource.setrlimit`` during the import."""
