"""Names in backticks exist: settings, variables, metrics, events, endpoints, commands, flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from machd.admin.endpoints import ADMIN_ENDPOINTS
from machd.cli.commands import command_line
from machd.dialects.endpoints import PUBLIC_ROUTES
from machd.errors import MachdError
from machd.settings.keys import setting_keys
from machd.telemetry.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("systemd/*.md")}
    - {ROOT / "CHANGELOG.md"}
)
"""The changelog may name what is gone."""

KEYS = {key.dotted for key in setting_keys()}
SECTIONS = {key.partition(".")[0] for key in KEYS}
VARIABLES = {name for key in setting_keys() for name in key.environment_names}
METRIC_NAMES = {spec.name for spec in METRICS}

_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_METRIC = re.compile(r"machd_[a-z0-9_]*(?:[a-z0-9](?!_?\*)|_\*)")
_VARIABLE = re.compile(r"LME_[A-Z0-9_]*[A-Z0-9]")
_DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+(?![\w./(-])")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PATH = re.compile(r"^(?:(?:GET|POST|PUT|PATCH|DELETE) )?(/[\w{}/.:-]*)$")
_QUERY = re.compile(r"\{.*?\}|\?.*$")
_HISTOGRAM_PARTS = re.compile(r"_(?:bucket|sum|count)$")

_EXAMPLES = {"LME_CONFIG", "LME_SECTION_NAME", "LME_A_B", "LME_SERVER_PROT"}
"""Names that stand for others, one that is misspelt on purpose, and the file's own."""

_NOT_METRICS = {"machd_probes", "machd_bench", "machd_guarantees", MachdError.code}

_OTHERS_FLAGS = {
    "--require-hashes", "--no-deps", "--no-build-isolation", "--offline", "--system", "--user",
    "--check", "--matrix", "--strict", "--dev", "--now", "--a-b", "--section-name", "--threshold",
}  # fmt: skip
"""Of pip, systemd and this repository's scripts."""

_ENDPOINTS = re.compile(
    r"^/(?:v1|health|metrics|openapi|admin|tokenize|detokenize|tokenizer_info)\b"
)
"""Paths that begin like this are machd's; others are of the file system."""


def name_of(path: Path) -> str:
    """A page as a failing test names it."""
    return str(path.relative_to(ROOT))


def spans(page: Path) -> list[str]:
    """Return what stands in backticks, outside of blocks."""
    return _CODE.findall(_FENCE.sub("", page.read_text("utf-8")))


def words_of_the_program() -> str:
    """Every module of the program, for names that only stand in the code."""
    files = [
        *(ROOT / "daemon").rglob("*.py"),
        *(ROOT / "probes").rglob("*.py"),
    ]
    return "\n".join(path.read_text("utf-8") for path in sorted(files))


def is_module(dotted: str) -> bool:
    """Return whether a module of machd is called so, without the package's own name."""
    return (ROOT / "daemon" / "machd" / f"{dotted.replace('.', '/')}.py").is_file()


@pytest.fixture(name="program", scope="module")
def _program() -> str:
    """The text of the program, read once."""
    return words_of_the_program()


def commands(command: click.Command, path: str = "machd") -> Iterator[tuple[str, set[str]]]:
    """Every command with its flags."""
    context = click.Context(command, info_name=path)
    flags = {
        spelling
        for param in command.get_params(context)
        for spelling in (*param.opts, *param.secondary_opts)
    }
    yield path, flags
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}")


@pytest.fixture(name="known_commands", scope="module")
def _known_commands() -> dict[str, set[str]]:
    """Every command of machd with its flags; only here are all their modules needed."""
    return dict(commands(command_line))


def _shape(path: str) -> str:
    """A path with its parameters alike: ``/v1/models/{id}`` and ``/v1/models/{model_id:str}``."""
    return re.sub(r"\{[^}]*\}|\b(?:ID|MODEL)\b", "{}", path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_and_events_exist(page: Path, program: str) -> None:
    """A dotted name that begins with a section is a key, a logged event, or a module."""
    named = {name for span in spans(page) for name in _DOTTED.findall(span)}
    unknown = {name for name in named - KEYS if f'"{name}"' not in program}

    files = {name for name in unknown if name.endswith(".py")}
    assert {name for name in unknown - files if not is_module(name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_variables_exist(page: Path) -> None:
    """A variable in backticks is one that machd reads."""
    named = {name for span in spans(page) for name in _VARIABLE.findall(span)}

    assert named - VARIABLES - _EXAMPLES == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_exist(page: Path) -> None:
    """A metric in backticks is exported; so is one at least that begins as ``machd_some_*``."""
    named = {name for span in spans(page) for name in _METRIC.findall(span)} - _NOT_METRICS
    whole = {name for name in named if not name.endswith("_*")}
    beginnings = {name.removesuffix("*") for name in named - whole}
    unknown = {name for name in whole if _HISTOGRAM_PARTS.sub("", name) not in METRIC_NAMES}

    assert unknown - METRIC_NAMES == set()
    assert [one for one in beginnings if not any(n.startswith(one) for n in METRIC_NAMES)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_endpoints_exist(page: Path) -> None:
    """A path of machd's in backticks, with a method or without, is served."""
    paths = [one.path for one in PUBLIC_ROUTES] + [one.path for one in ADMIN_ENDPOINTS]
    known = {_shape(path) for path in paths} | {"/v1"}  # what clients put before a path
    named = {
        match[1]
        for span in spans(page)
        if (match := _PATH.match(span)) and _ENDPOINTS.match(match[1])
    }

    assert {path for path in named if _shape(path) not in known} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_flags_exist(page: Path, known_commands: dict[str, set[str]]) -> None:
    """A command in backticks is one of machd's with its options; so is a flag that stands alone."""
    known_flags = {flag for flags in known_commands.values() for flag in flags} | _OTHERS_FLAGS
    wrong = set()
    for span in spans(page):
        words = span.split()
        if ";" in span or not words:  # a message, a fence
            continue
        if words[0] == "machd" and len(words) > 1 and words[1][0] != "-":
            depth = max(
                (n for n in range(1, len(words) + 1) if " ".join(words[:n]) in known_commands),
                default=0,
            )
            is_group = any(
                name.startswith(" ".join(words[:depth]) + " ") for name in known_commands
            )
            if is_group and depth < len(words) and words[depth][0].islower():
                wrong.add(span)
            known = known_commands.get(" ".join(words[:depth]), set())
            wrong |= {f"{span}: {flag}" for flag in _FLAG.findall(span) if flag not in known}
        elif not words[0][0].isalpha():
            wrong |= {flag for flag in _FLAG.findall(span) if flag not in known_flags}

    assert wrong == set()


def test_a_wrong_name_is_noticed() -> None:
    """The patterns see what they are for."""
    assert _DOTTED.findall("limits.max_quue = 3") == ["limits.max_quue"]
    assert _METRIC.findall('machd_stat{state="ready"}') == ["machd_stat"]
    assert _VARIABLE.findall("LME_FOO_BAR=1") == ["LME_FOO_BAR"]
    assert _FLAG.findall("--no-such-flag=3") == ["--no-such-flag"]
    match = _PATH.match("GET /v1/nothing")
    assert match is not None
    assert _ENDPOINTS.match(match[1])
