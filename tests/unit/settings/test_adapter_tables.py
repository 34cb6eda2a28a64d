"""Adapters' tables: what each may hold, what is said of wrong ones, and how they are shown and changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reference_tables import adapter_tables_markdown

from machd.errors import SettingsError
from machd.settings.adapters import AdapterTable
from machd.settings.explain import (
    settings_example,
    settings_json,
    settings_schema,
    settings_toml,
    shown_settings,
)
from machd.settings.keys import ADAPTERS_SECTION, changed_names, table_keys
from machd.settings.model_tables import MAX_TABLES
from machd.settings.sources import (
    LoadedSettings,
    Origin,
    OriginKind,
    load_settings,
    name_problems,
    overlaid,
)

SUPPORT = '[adapters.support]\npath = "/a/support"\n'


def load(path: Path, toml: str, environ: dict[str, str] | None = None) -> LoadedSettings:
    """Load settings from the text of a file, and variables."""
    file = path / "given.toml"
    file.write_text(toml, encoding="utf-8")
    return load_settings(config_path=file, environ=environ or {}, flags={})


def problems_of(path: Path, toml: str) -> list[str]:
    """The problems of loading, with the file's folder taken out of them."""
    with pytest.raises(SettingsError) as caught:
        load(path, toml)
    return [problem.replace(f"{path}/", "") for problem in caught.value.problems]


def test_tables_and_keys_share_the_section(tmp_path: Path) -> None:
    """A table beside the section's own keys is an adapter; what it leaves out has its default."""
    loaded = load(
        tmp_path,
        f"[adapters]\ndirectory = '/a'\nmax_loaded = 2\n{SUPPORT}base = 'coder'\nscale = 0.5\npin = true\n"
        "[adapters.'org/style']\n",
        environ={"LME_ADAPTERS_MAX_LOADED": "3"},
    )

    section = loaded.settings.adapters
    assert (section.directory, section.max_loaded) == ("/a", 3)
    assert section.tables == {
        "support": AdapterTable(path="/a/support", base="coder", scale=0.5, pin=True),
        "org/style": AdapterTable(),
    }
    assert loaded.origins["adapters.support.scale"].kind is OriginKind.FILE
    assert loaded.origins["adapters.max_loaded"].kind is OriginKind.ENVIRONMENT
    # A model's own settings, which its engine process gets, have all of it.
    assert loaded.settings.of_model("any", path="/m/any").adapters == section


def test_shown_adapters_load_back(tmp_path: Path) -> None:
    """Settings with adapters, shown as TOML or as JSON and read again, are the same settings."""
    loaded = load(
        tmp_path, f"{SUPPORT}scale = -0.25\n[adapters.'b.c']\npath = '/a/b'\npin = true\n"
    )
    shown = json.loads(json.dumps(settings_json(loaded, origins=True)))

    assert load(tmp_path, settings_toml(loaded, origins=True)).settings == loaded.settings
    assert shown_settings(shown["settings"]).adapters == loaded.settings.adapters
    assert shown["settings"]["adapters"]["support"] == {
        "path": "/a/support",
        "base": None,
        "scale": -0.25,
        "pin": False,
    }


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            "[adapters.support]\npth = 'x'",
            "adapters.support.pth: no such setting; did you mean adapters.support.path",
        ),
        ("[adapters.support]\nscale = 'a'", 'adapters.support.scale: "a" is not a number'),
        ("[adapters.support]\nscale = nan", "adapters.support.scale: "),
        ("[adapters.support]\nscale = 2e3", "adapters.support.scale: 2000.0 is too large"),
        ("[adapters.support]\npin = 1", "adapters.support.pin: 1 is not true or false"),
        (
            "[adapters.support.cache]\nprefix = true",
            "adapters.support.cache: no such section in an adapter's table; there are none",
        ),
        ("[adapters.directory]\npath = 'x'", 'adapters.directory: {"path": "x"} is not text'),
        ("[adapters]\nsupport = 1", "adapters.support: no such setting; did you mean adapters."),
        ("[adapters.'a:b']\npath = 'x'", 'adapters."a:b": the name has a colon in it'),
        ("[adapters.'../a']\npath = 'x'", 'adapters."../a": the name looks like a path or a URL'),
        ("[adapters.'/a']\npath = 'x'", 'adapters."/a": the name looks like a path or a URL'),
        (
            '[adapters."a\\tb"]\npath = "x"',
            'adapters."a\\tb": the name has a character in it that cann',
        ),
        (f"[adapters.{'a' * 257}]", f"adapters.{'a' * 246}…: the name is longer than 256 "),
        ("[adapters]\nmax_loaded = 0", "adapters.max_loaded: 0 is too small, the least is 1"),
        ("[cache.prefix]\nx = 1", 'cache.prefix: {"x": 1} is not true or false'),
    ],
)
def test_a_problem_in_a_table_names_table_key_source_and_fix(
    toml: str, problem: str, tmp_path: Path
) -> None:
    """A wrong line of an adapter's table is answered as one of a section is."""
    problems = problems_of(tmp_path, toml)

    assert len(problems) == 1
    assert problems[0].startswith(problem)
    assert problems[0].endswith(" (given.toml)")


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            f"{SUPPORT}[adapters.'org/Support:latest']\npath = '/a/b'",
            'adapters."org/Support:latest": the name has a colon in it',
        ),
        (
            f"{SUPPORT}[adapters.'org/Support']\npath = '/a/b'",
            'adapters."org/Support": "org/Support" stands for adapters.support too;',
        ),
        (
            f"{SUPPORT}[models.Support]\npath = '/m/b'",
            'adapters.support: "support" stands for models.Support too;',
        ),
        (
            f"[models.b]\npath = '/m/b'\naliases = ['support']\n{SUPPORT}",
            'adapters.support: "support" stands for models.b too;',
        ),
        (
            f"[model]\npath = '/m/Support'\n{SUPPORT}",
            'adapters.support: "support" stands for the model of model.path too;',
        ),
        (
            "[adapters.default]\npath = '/a/b'",
            'adapters.default: "default" stands for the model of model.path too;',
        ),
        ("[adapters.b]", "adapters.b: has no path; give path, or name the directory that holds it"),
        (
            "".join(f"[adapters.a{number}]\n" for number in range(MAX_TABLES + 1)),
            "adapters: 257 tables are too many, the most is 256",
        ),
    ],
)
def test_a_rule_between_names_tells_the_table(toml: str, problem: str, tmp_path: Path) -> None:
    """A name of two adapters, or of an adapter and a model, and a table without a path are told."""
    problems = problems_of(tmp_path, toml)

    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_an_operators_table_lies_above_the_files(tmp_path: Path) -> None:
    """Key by key, with its origin; a table that is taken away has to be there."""
    loaded = load(tmp_path, f"{SUPPORT}scale = 2\n")

    changed = overlaid(loaded, {"adapters": {"support": {"scale": 3}, "b": {"path": "/a/b"}}})

    assert changed.settings.adapters.tables == {
        "support": AdapterTable(path="/a/support", scale=3),
        "b": AdapterTable(path="/a/b"),
    }
    assert changed.origins["adapters.b.path"] == Origin(OriginKind.ADMIN, "the admin API")
    assert changed_names(loaded.settings, changed.settings) == (
        "adapters.support.scale",
        "adapters.b",
    )
    assert name_problems({"adapters": {"b": None}}, changed.settings) == []
    assert name_problems({"adapters": {"supporting": None}}, loaded.settings) == [
        "adapters.supporting: no such setting; did you mean adapters.support?"
    ]


def test_example_schema_and_reference_know_every_key_of_a_table(tmp_path: Path) -> None:
    """The example's table loads once it is taken out of its comment; editors and the page know its keys."""
    text = re.sub(r"(?m)^#   ", "", settings_example())
    table = json.loads(json.dumps(settings_schema()))["$defs"]["AdapterTable"]
    page = adapter_tables_markdown()

    assert load(tmp_path, text).settings.adapters.tables.keys() == {"support"}
    assert table["additionalProperties"] is False
    assert table["properties"].keys() == AdapterTable.model_fields.keys()
    for key in table_keys(tables=ADAPTERS_SECTION):
        assert f"| `adapters.NAME.{key.name}` | " in page
        assert key.description in page
