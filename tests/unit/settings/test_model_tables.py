"""Models' tables: what each may hold, what is said of wrong ones, and the settings that a model comes to."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from reference_tables import model_tables_markdown
from unit.settings.setting_values import (
    as_tables_toml,
    as_toml,
    dotted_values,
    model_tables,
    table_values,
)

from machd.errors import SettingsError
from machd.settings.explain import (
    settings_example,
    settings_json,
    settings_schema,
    settings_toml,
    shown_settings,
)
from machd.settings.keys import changed_names, setting_keys, table_keys
from machd.settings.model import Settings
from machd.settings.model_tables import MAX_TABLES
from machd.settings.models import TABLE_SECTIONS, ModelTable
from machd.settings.sources import LoadedSettings, Origin, OriginKind, load_settings, overlaid

CODER = '[models.coder]\npath = "/m/Coder"\n'
_MANY = 40


def load(path: Path, toml: str) -> LoadedSettings:
    """Load settings from the text of a file alone."""
    file = path / "given.toml"
    file.write_text(toml, encoding="utf-8")
    return load_settings(config_path=file, environ={}, flags={})


def problems_of(path: Path, toml: str) -> list[str]:
    """The problems of loading, with the file's folder taken out of them."""
    with pytest.raises(SettingsError) as caught:
        load(path, toml)
    return [problem.replace(f"{path}/", "") for problem in caught.value.problems]


@given(values=dotted_values(), tables=model_tables())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_shown_tables_load_back(
    tmp_path_factory: pytest.TempPathFactory,
    values: dict[str, object],
    tables: dict[str, dict[str, object]],
) -> None:
    """Settings with tables, shown as TOML or as JSON and read again, are the same settings."""
    folder = tmp_path_factory.getbasetemp()
    loaded = load(folder, as_toml(values) + "\n" + as_tables_toml(tables))
    shown = json.loads(json.dumps(settings_json(loaded, origins=True)))

    assert load(folder, settings_toml(loaded)).settings == loaded.settings
    assert load(folder, settings_toml(loaded, origins=True)).settings == loaded.settings
    assert overlaid(load(folder, ""), _without_none(shown["settings"])).settings == loaded.settings
    assert settings_json(
        LoadedSettings(shown_settings(shown["settings"]), loaded.origins, loaded.config_file)
    ) == settings_json(loaded)
    assert Settings.model_validate_json(loaded.settings.model_dump_json()) == loaded.settings


@given(tables=model_tables())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_a_models_settings_have_what_its_table_says(
    tmp_path_factory: pytest.TempPathFactory, tables: dict[str, dict[str, object]]
) -> None:
    """Each given value is in place and has its origin; every other value is that of all models."""
    loaded = load(tmp_path_factory.getbasetemp(), as_tables_toml(tables))

    given_values = table_values(tables)

    origins = {dotted: one for dotted, one in loaded.origins.items() if dotted.count(".") > 1}
    assert set(origins) == {key.dotted for key, _ in given_values}
    assert {one.kind for one in origins.values()} <= {OriginKind.FILE}
    for key, value in given_values:
        assert key.value_in(loaded.settings) == value
    for name in tables:
        of_model = loaded.settings.of_model(name)
        assert of_model.models.tables == {}
        expected: dict[str, object] = {
            f"{key.section}.{key.name}": value
            for key, value in given_values
            if key.table == name and key.section
        } | {"model.path": tables[name]["path"]}
        for key in setting_keys():
            value = expected.get(key.dotted, key.value_in(loaded.settings))
            assert key.value_in(of_model) == value


def test_a_table_may_have_every_key_of_its_sections_but_the_path() -> None:
    """A key that is added to one of the sections can be set for one model, too."""
    inner = {key.dotted for key in table_keys()}
    own = {"path", "aliases", "pin", "ttl_s"}
    of_sections = {key.dotted for key in setting_keys() if key.section in TABLE_SECTIONS}

    assert inner == own | of_sections - {"model.path"}
    assert own == ModelTable.model_fields.keys() - {"overrides"}
    assert not any(key.environment_names or key.flag_names for key in table_keys())


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            "[models.coder]\npth = 'x'",
            "models.coder.pth: no such setting; did you mean models.coder.p",
        ),
        ("[models.coder]\npath = 1", "models.coder.path: 1 is not text; put it in quotes"),
        ("[models.coder]\npath = {}", "models.coder.path: {} is not text"),
        ("[models.coder]\npin = 'yes'", 'models.coder.pin: "yes" is not true or false; write it'),
        ("[models.coder]\nttl_s = 0", "models.coder.ttl_s: 0 is too small, the least is 0.001"),
        ("[models.coder]\naliases = 'a'", 'models.coder.aliases: "a" is not a list; put it in'),
        (
            "[models.coder]\naliases = [' a']",
            'models.coder.aliases: " a" begins or ends with a bla',
        ),
        (
            "[models.coder]\nprefix = false",
            "models.coder.prefix: no such setting; did you mean mode",
        ),
        ("[models.coder]\n'cache.prefix' = true", 'models.coder."cache.prefix": no such setting; '),
        (
            "[models.coder]\ncache = 1",
            "models.coder.cache: is a section; write [models.coder.cache]",
        ),
        ("[models.coder.cache]\nprefix = 0", "models.coder.cache.prefix: 0 is not true or false"),
        (
            "[models.coder.cache]\nprefx = 0",
            "models.coder.cache.prefx: no such setting; did you mea",
        ),
        (
            "[models.coder.server]\nport = 1",
            "models.coder.server: no such section in a model's",
        ),
        (
            "[models.coder.model]\npath = 'a'",
            "models.coder.model.path: no such setting; did you mea",
        ),
        ("[models.'qwen3:8b']\npin = 1", 'models."qwen3:8b".pin: 1 is not true or false'),
        ("[models]\ncoder = 1", "models.coder: no such setting; did you mean model"),
        ("[models.directory]\npath = 'x'", 'models.directory: {"path": "x"} is not text'),
        ("[models.'']\npath = 'x'", 'models."": the name is empty'),
        ("[models.' a']\npath = 'x'", 'models." a": the name begins or ends with a blank'),
        (
            '[models."a\\tb"]\npath = "x"',
            'models."a\\tb": the name has a character in it that cann',
        ),
        (f"[models.{'a' * 257}]", f"models.{'a' * 248}…: the name is longer than 256 characters"),
        ("[models.'../a']\npath = 'x'", 'models."../a": the name looks like a path or a URL'),
    ],
)
def test_a_problem_in_a_table_names_table_key_source_and_fix(
    toml: str, problem: str, tmp_path: Path
) -> None:
    """A wrong line of a table is answered as one of a section is."""
    problems = problems_of(tmp_path, toml)

    assert len(problems) == 1
    assert problems[0].startswith(problem)
    assert problems[0].endswith(" (given.toml)")


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        (
            f"{CODER}[models.'org/Coder:latest']\npath = '/m/b'",
            'models."org/Coder:latest": "org/Coder:latest" stands for models.coder too;',
        ),
        (
            f"{CODER}[models.b]\npath = '/m/b'\naliases = ['x', 'CODER']",
            'models.b.aliases: "CODER" stands for models.coder too;',
        ),
        (
            f"{CODER}aliases = ['default']",
            'models.coder.aliases: "default" stands for the model of',
        ),
        (
            f"[models]\naliases = ['Coder']\n{CODER}",
            'models.coder: "coder" stands for the model of',
        ),
        (
            f"[model]\npath = '/other/Coder'\n{CODER}",
            'models.coder: "coder" stands for the model of',
        ),
        (
            f"[model]\npath = '/o/Coder.gguf'\n{CODER}",
            'models.coder: "coder" stands for the model of',
        ),
        (
            "[models.coder]",
            "models.coder: has no path; give path, or name the directory that holds ",
        ),
        (
            "[models.'org/coder']",
            'models."org/coder": has no path; give path, or name the directory ',
        ),
        (
            f"{CODER}speculation.mode = 'draft'",
            "models.coder.speculation.mode: draft needs a draft model; name it in",
        ),
    ],
)
def test_a_rule_between_keys_names_the_table(toml: str, problem: str, tmp_path: Path) -> None:
    """A name of two models, a table without a path, and keys that do not go together are told."""
    problems = problems_of(tmp_path, toml)

    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_every_broken_rule_of_every_table_is_told_at_once(tmp_path: Path) -> None:
    """One failed start shows all there is to mend."""
    broken = "[models.{}]\nspeculation.mode = 'draft'\n"
    problems = problems_of(tmp_path, broken.format("a") + broken.format("b"))

    assert [problem.partition(":")[0] for problem in problems] == [
        "models.a",
        "models.a.speculation.mode",
        "models.b",
        "models.b.speculation.mode",
    ]


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        ("[models]\ndirectory = '/m'\n[models.coder]", "/m/coder"),
        ("[models]\ndirectory = '/m'\n[models.'org/coder']", "/m/org/coder"),
        ("[model]\noffline = false\n[models.'org/coder']", "org/coder"),
        ("[models.'org/coder']\nmodel.offline = false", "org/coder"),
        ("[models]\nhub_cache = true\n[models.'org/coder']", "org/coder"),
        (CODER, "/m/Coder"),
    ],
)
def test_a_table_without_a_path_goes_by_its_name(toml: str, path: str, tmp_path: Path) -> None:
    """Below the directory of models, or as an id of the hub."""
    loaded = load(tmp_path, toml).settings
    [name] = loaded.models.tables

    assert loaded.path_of_model(name) == loaded.of_model(name).model.path == path
    assert loaded.of_model(name, path="/found").model.path == "/found"


def test_a_model_that_was_found_needs_no_table() -> None:
    """Its settings are those of all models, with its path."""
    found = Settings().of_model("any", path="/m/any")

    assert found == Settings.model_validate({"model": {"path": "/m/any"}})
    with pytest.raises(KeyError):
        Settings().of_model("any")


def test_the_model_of_the_path_may_have_a_table(tmp_path: Path) -> None:
    """Names of the default model stand for one model still, if the table has its path."""
    toml = (
        "[model]\npath = '/m/Coder'\n[models]\naliases = ['gpt-4o']\n"
        "[models.default]\npath = '/m/Coder'\npin = true\naliases = ['gpt-4o', 'coder']\n"
    )
    assert load(tmp_path, toml).settings.models.tables["default"].pin

    again = f"{toml}[models.b]\npath = '/m/Coder'\naliases = ['coder']"
    assert problems_of(tmp_path, again)[0].startswith(
        'models.b.aliases: "coder" stands for models.def'
    )


def test_tables_have_a_bound(tmp_path: Path) -> None:
    """A file of nothing but tables does not hold the start up."""
    tables = "".join(f"[models.m{number}]\n" for number in range(MAX_TABLES + 1))

    assert problems_of(tmp_path, tables) == ["models: 257 tables are too many, the most is 256"]


def test_an_operators_table_lies_above_the_files(tmp_path: Path) -> None:
    """Key by key, with its origin; other keys of the table stay as the file has them."""
    loaded = load(
        tmp_path, f"{CODER}ttl_s = 5\n[models.coder.cache]\nprefix = false\nmax_entries = 9"
    )
    change = {"coder": {"ttl_s": 7, "cache": {"max_entries": 8}}, "b": {"path": "/m/b"}}

    changed = overlaid(loaded, {"models": change})

    tables = changed.settings.models.tables
    assert tables["coder"] == ModelTable(
        path="/m/Coder", ttl_s=7, overrides={"cache": {"prefix": False, "max_entries": 8}}
    )
    assert tables["b"] == ModelTable(path="/m/b")
    admin = Origin(OriginKind.ADMIN, "the admin API")
    assert changed.origins["models.coder.cache.max_entries"] == admin
    assert changed.origins["models.coder.cache.prefix"].kind is OriginKind.FILE
    assert changed_names(loaded.settings, changed.settings) == (
        "models.coder.ttl_s",
        "models.coder.cache.max_entries",
        "models.b",
    )
    assert changed_names(changed.settings, loaded.settings)[-1] == "models.b"


def test_neither_variables_nor_flags_reach_a_table(tmp_path: Path) -> None:
    """They name the keys of all of machd, and a table is refused as an unknown one is."""
    file = tmp_path / "given.toml"
    file.write_text(CODER)

    with pytest.raises(SettingsError) as caught:
        load_settings(
            config_path=file,
            environ={"LME_MODELS_CODER_PIN": "true", "LME_MODELS_TABLES": "x"},
            flags={"models.coder.pin": "true", "models.tables": "x"},
        )

    assert [": no such " in problem for problem in caught.value.problems] == [True] * 4


def test_the_shown_table_is_laid_out_like_a_file(tmp_path: Path) -> None:
    """Own keys first, each with its origin or as the default; then overridden keys of sections."""
    loaded = load(
        tmp_path, f"{CODER}[models.coder.cache]\nprefix = false\n[models.'a.b']\npath='/m/a'"
    )
    file = f"file {tmp_path / 'given.toml'}"

    text = settings_toml(loaded, origins=True)

    assert (
        "[models.coder]\n"
        f'path = "/m/Coder"  # {file}\n'
        "aliases = []       # default\n"
        "pin = false        # default\n"
        "# ttl_s is unset   # default\n"
        "\n"
        "[models.coder.cache]\n"
        f"prefix = false  # {file}\n"
        "\n"
        '[models."a.b"]\n'
    ) in text


def test_the_examples_table_loads_if_it_is_taken_out_of_its_comment(tmp_path: Path) -> None:
    """Every own key is in it, valid, and one of a section."""
    text = re.sub(r"(?m)^#   ", "", settings_example())

    loaded = load(tmp_path, text)

    assert loaded.settings.models.tables.keys() == {"coder"}
    own = [f"models.coder.{key.name}" for key in table_keys() if not key.section]
    given = [dotted for dotted, origin in loaded.origins.items() if origin.detail]
    assert [dotted for dotted in given if dotted.startswith("models.")] == [
        *own,
        "models.coder.cache.prefix",
    ]
    assert load(tmp_path, settings_example()).settings == Settings()


def test_the_schema_knows_every_key_of_a_table() -> None:
    """An editor offers them in a table of any name, and marks what is misspelt."""
    definitions = json.loads(json.dumps(settings_schema()))["$defs"]
    table = definitions["ModelTable"]

    assert "tables" not in definitions["ModelsSettings"]["properties"]
    assert table["additionalProperties"] is False
    assert table["properties"].keys() == {"path", "aliases", "pin", "ttl_s", *TABLE_SECTIONS}
    for section in TABLE_SECTIONS:
        assert table["properties"][section]["$ref"].rpartition("/")[2] in definitions


def test_the_reference_has_a_row_for_every_own_key_of_a_table() -> None:
    """The page shows how each is written; keys of sections have their rows already."""
    text = model_tables_markdown()

    for key in table_keys():
        if not key.section:
            assert f"| `models.NAME.{key.name}` | " in text
            assert key.description in text


def test_many_tables_load_within_their_bound(tmp_path: Path) -> None:
    """Each is checked by itself and with the others."""
    toml = "".join(f"[models.m{n}]\npath = '/m/{n}'\ncache.prefix = false\n" for n in range(_MANY))

    assert len(load(tmp_path, toml).settings.models.tables) == _MANY
    assert len(tomllib.loads(settings_toml(load(tmp_path, toml)))["models"]) > _MANY


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return value
