"""Modules, classes, attributes and files that docstrings and pages name exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from inspect import get_annotations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (ROOT / "daemon", ROOT / "probes")
_PACKAGES = ("machd", "machd_bench", "machd_probes")
_ROOMS = sorted(
    one.relative_to(source)
    for source in _SOURCES
    for one in (*source.glob("machd*/*/"), *source.glob("machd*/"))
    if (one / "__init__.py").is_file()
)
_PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
_PAGES = [one for one in _PAGES if "decisions" not in one.parts]
"""Without those that may name what is gone."""

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")
_FILE = re.compile(r"`([\w/]+\.py)`")


def _modules(room: Path) -> list[str]:
    """The modules of a room; those of a package that are in no room, for the package itself."""
    source = next(one for one in _SOURCES if (one / room).is_dir())
    files = (source / room).glob("*.py") if len(room.parts) == 1 else (source / room).rglob("*.py")
    named = (one.relative_to(source).with_suffix("").parts for one in sorted(files))
    return [".".join(one).removesuffix(".__init__") for one in named if one[-1] != "__main__"]


def _docstrings(module: str) -> Iterator[tuple[str | None, str]]:
    """Every string that stands alone, with the name of the class that it stands in."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None

    def walk(node: ast.AST, owner: str | None) -> Iterator[tuple[str | None, str]]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield owner, text
                case ast.ClassDef(name=name):
                    yield from walk(child, name)
                case _:
                    yield from walk(child, owner)

    yield from walk(ast.parse(Path(spec.origin).read_text("utf-8")), None)


@cache
def _imported_names(module: str) -> dict[str, str]:
    """Return the origins of a module's imported names, those for the type checker included."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _has(value: object, names: Sequence[str]) -> bool:
    """Return whether an object has an attribute of an attribute; attributes set in ``__init__`` count."""
    for name in names:
        if not hasattr(value, name):
            if not inspect.isclass(value):
                return False
            declared = {one for base in value.__mro__ for one in get_annotations(base)}
            return name in declared or bool(re.search(rf"self\.{name}\b", inspect.getsource(value)))
        value = getattr(value, name)
    return True


def _is_there(name: str, module: str, owner: str | None) -> bool:
    """Return whether a name resolves, in full or within its module and class."""
    first, _, rest = name.removesuffix("()").partition(".")
    if first not in _PACKAGES:
        seen = import_module(module)
        if _has(seen, (first, *filter(None, rest.split(".")))):
            return True
        if owner is not None and _has(
            getattr(seen, owner, None), (first, *filter(None, rest.split(".")))
        ):
            return True
        imported = _imported_names(module).get(first)
        return imported is not None and _is_there(f"{imported}.{rest}".rstrip("."), module, owner)
    parts = name.removesuffix("()").split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return _has(found, parts[count:])
    return False


@pytest.mark.parametrize("room", _ROOMS, ids=str)
def test_names_in_docstrings_are_there(room: Path) -> None:
    """Each role of a docstring names what can be imported, or what its own module or class has."""
    gone = {
        f"{module}: {name}"
        for module in _modules(room)
        for owner, text in _docstrings(module)
        for name in _ROLE.findall(text)
        if not _is_there(name, module, owner)
    }
    assert gone == set()


@pytest.mark.parametrize("page", _PAGES, ids=lambda one: str(one.relative_to(ROOT)))
def test_files_of_a_page_are_there(page: Path) -> None:
    """A file of Python in backticks is one of the repository, by the end of its path."""
    files = {f"/{one.relative_to(ROOT)}" for one in _python_files()}
    named = set(_FILE.findall(page.read_text("utf-8")))
    assert {one for one in named if not any(file.endswith(f"/{one}") for file in files)} == set()


@cache
def _python_files() -> tuple[Path, ...]:
    folders = ("daemon", "probes", "tests", "docs", "scripts", "native")
    return tuple(one for folder in folders for one in (ROOT / folder).rglob("*.py"))
