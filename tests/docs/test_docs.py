"""Pages tell the truth: links, generated pages, command lines, names, and the style of errors."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from machd import errors
from machd.cli.commands import command_line
from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.errors import MachdError
from machd.settings.keys import setting_keys
from machd.telemetry.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))
PROGRAM = sorted((ROOT / "daemon" / "machd").rglob("*.py"))

_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_CONSOLE_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_OUR_COMMANDS = {"make", "machd"}
_VARIABLE = re.compile(r"[A-Z_]+=\S*")

# Put together from halves, so that this file names none of them either.
_INDEX_HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "pkg." + "dev",
    "index" + "-url",
    "nexus",
    "artifactory",
]
_MACHINE_PATHS = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|work)/")

ERROR_CLASSES = [
    one
    for _, one in inspect.getmembers(errors, inspect.isclass)
    if issubclass(one, MachdError)
]  # fmt: skip


def name_of(path: Path) -> str:
    """A page as a failing test names it."""
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Return what headings can be linked to, as forges spell it."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def generated_pages() -> dict[str, str]:
    """The pages with what is generated, by name, as the code writes them now."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: Iterator[tuple[Path, str]] = module._pages()
    return {path.stem: text for path, text in pages if path.suffix == ".md"}


@pytest.fixture(name="reference", scope="module")
def _reference() -> dict[str, str]:
    """The generated reference, made once."""
    return generated_pages()


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of every ``$ make …`` and ``$ machd …`` line, variables in front left out."""
    for block in _CONSOLE_BLOCK.findall(page.read_text("utf-8")):
        for line in block.splitlines():
            if not line.startswith("$ "):
                continue
            try:
                words = shlex.split(line[2:], comments=True)
            except ValueError:  # a quotation that goes on in the next line
                words = line[2:].split()
            while words and _VARIABLE.fullmatch(words[0]):
                words = words[1:]
            if words and words[0] in _OUR_COMMANDS:
                yield words


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def check_machd(words: list[str]) -> None:
    """Follow the words through the command line: subcommands first, then options."""
    command: click.Command = command_line
    context = click.Context(command, info_name="machd")
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"{' '.join(words)}: there is no command {rest[0]}"
        command, rest = inner, rest[1:]
    known = {
        spelling
        for param in command.get_params(context)
        for spelling in (*param.opts, *param.secondary_opts)
    }
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - known
    assert not unknown, f"{' '.join(words)}: there is no {unknown}"


def error_messages() -> Iterator[tuple[str, str]]:
    """Yield where an operating error is made in the program, and its message as far as it is constant."""
    names = {one.__name__ for one in ERROR_CLASSES}
    for path in PROGRAM:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            if node.func.id in names and (text := constant_text(node.args[0])) is not None:
                yield f"{name_of(path)}:{node.lineno}", text


def constant_text(node: ast.expr) -> str | None:
    """A literal's text, with ``{}`` for what an f-string fills in; of a list, its first item's."""
    if isinstance(node, ast.List) and len(node.elts) == 1:
        return constant_text(node.elts[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """Every relative link or picture of a page names a file that is there, and a heading that it has."""
    text = page.read_text("utf-8")
    broken = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file_part, _, anchor = target.partition("#")
        path = (page.parent / file_part) if file_part else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text("utf-8"))):
            broken.append(target)

    assert broken == []


def test_generated_files_are_what_the_code_says() -> None:
    """``docs/generate.py --check`` finds no stale page, example or schema."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_every_error_code_is_in_the_reference(reference: dict[str, str]) -> None:
    """A client that gets a code finds it on the page of error codes."""
    assert [one.code for one in ERROR_CLASSES if f"`{one.code}`" not in reference["errors"]] == []


def test_every_setting_is_in_the_reference(reference: dict[str, str]) -> None:
    """A key stands on the page of settings with each of its flags and variables."""
    spellings = [
        spelling
        for key in setting_keys()
        for spelling in (key.dotted, *key.flag_names, *key.environment_names)
    ]

    assert [one for one in spellings if f"`{one}`" not in reference["settings"]] == []


def test_every_metric_is_in_the_reference(reference: dict[str, str]) -> None:
    """A metric stands on the page of metrics under the name that it is exported by."""
    assert [spec.name for spec in METRICS if f"`{spec.name}`" not in reference["metrics"]] == []


def test_every_public_endpoint_is_in_the_reference(reference: dict[str, str]) -> None:
    """A path stands on the page of endpoints."""
    paths = [one.path for one in PUBLIC_ENDPOINTS]
    assert [path for path in paths if f"`{path}`" not in reference["endpoints"]] == []


def test_the_readme_is_short() -> None:
    """The README installs and serves within the first screen, and has 90 lines at most."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 90
    assert lines.index('$ uv tool install "machd[cpu]"') < lines.index("$ machd serve") < 15


def test_every_command_is_in_the_reference(reference: dict[str, str]) -> None:
    """Each command of the command line has its help on the page of commands."""
    context = click.Context(command_line, info_name="machd")
    assert isinstance(command_line, click.Group)
    names = command_line.list_commands(context)

    assert [one for one in names if f"## machd {one}\n" not in reference["commands"]] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_exist(page: Path) -> None:
    """Every command line on a page is a target of the Makefile or a command with its options."""
    targets = make_targets()
    for words in command_lines(page):
        if words[0] == "machd":
            check_machd(words)
        else:
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, f"{' '.join(words)}: no such target"


def test_the_readme_shows_how_to_serve() -> None:
    """The README's first command of machd is ``machd serve``, so the check of command lines has work."""
    first = next(command_lines(ROOT / "README.md"))

    assert first == ["machd", "serve"]


@pytest.mark.parametrize("page", CONCEPTS, ids=name_of)
def test_a_concept_page_opens_with_a_picture_and_an_example(page: Path) -> None:
    """The first screens have a table or a drawing, and a block that a reader can run or write into a file."""
    opening = "\n".join(page.read_text("utf-8").splitlines()[:45])

    assert re.search(r"^(?:\|[-|]+\||```text)$", opening, re.MULTILINE), "a table or a drawing"
    assert re.search(r"^```(?:console|bash|python|toml)$", opening, re.MULTILINE), "an example"


def test_every_decision_is_in_the_index_once() -> None:
    """A record is one section, and one line of the index leads to it."""
    folder = ROOT / "docs" / "decisions"
    pages = {page.name: page.read_text("utf-8") for page in folder.glob("*.md")}
    index = re.findall(r"^\| \[(\d{4})\]\(([\w-]+\.md)#\1-", pages.pop("README.md"), re.MULTILINE)
    sections = [
        (number, name)
        for name, text in pages.items()
        for number in re.findall(r"^## (\d{4}) ", text, re.MULTILINE)
    ]

    assert len(index) > 60
    assert index == sorted(sections)


def test_there_are_at_most_eighty_pages() -> None:
    """Breadth costs a reader: a new page takes the place of another, or is a section."""
    assert len(list((ROOT / "docs").rglob("*.md"))) <= 80


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_package_index_or_a_developers_machine(page: Path) -> None:
    """Pages hold for every reader: no index host, and no path of one machine's users."""
    text = page.read_text("utf-8")

    assert [host for host in _INDEX_HOSTS if host in text.lower()] == []
    assert _MACHINE_PATHS.findall(text) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_one_title_in_sentence_case(page: Path) -> None:
    """A page begins with its only first-level heading, and no heading ends with a full stop."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^# (.*)$", text, re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)

    assert text.startswith("# ")
    assert len(titles) == 1
    assert [one for one in headings if one.endswith(".")] == []


@pytest.mark.parametrize("error_class", ERROR_CLASSES, ids=lambda one: one.__name__)
def test_an_error_class_says_what_happened_in_a_sentence(error_class: type[MachdError]) -> None:
    """The first line of the docstring, which the reference shows, is one whole sentence."""
    line = (inspect.getdoc(error_class) or "").splitlines()[0]

    assert line[0].isupper() or line[0] == "`"
    assert line.endswith(".")
    assert "|" not in line


def test_messages_of_errors_are_one_line_without_a_full_stop() -> None:
    """A message fits into a log line and a sentence: no line break, no outer space, no stop."""
    found = dict(error_messages())
    wrong = {
        where: text
        for where, text in found.items()
        if not text or text != text.strip() or "\n" in text or text.endswith((".", "!"))
    }

    assert len(found) > 50
    assert wrong == {}
