"""Settings made readable: what is shown is true, loads back, and hides secrets."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import Field, SecretStr
from reference_tables import settings_markdown
from unit.settings.setting_values import KEYS, as_variables, dotted_values

from machd.errors import SettingsError
from machd.settings.explain import (
    MASK,
    settings_example,
    settings_json,
    settings_schema,
    settings_toml,
)
from machd.settings.model import Settings
from machd.settings.section import Mark, SettingsSection
from machd.settings.sources import LoadedSettings, load_settings

NO_FILE = Path("/dev/null")
REPOSITORY = Path(__file__).parents[3]
SECRET = "hunter2-hunter2"


class VaultSettings(SettingsSection):
    """What must not be seen."""

    token: SecretStr | None = Field(default=None, examples=["t"], description="Secret by type.")
    pin: Annotated[int | None, Mark.SECRET] = Field(
        default=None, ge=1000, examples=[1234], description="Secret by mark."
    )


class SettingsWithVault(Settings):
    """Settings of which some are secret."""

    vault: VaultSettings = Field(default_factory=VaultSettings)


def load_text(text: str, path: Path, model: type[Settings] = Settings) -> LoadedSettings:
    """Load settings from the text of a file alone."""
    file = path / "given.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(config_path=file, environ={}, flags={}, model=model)


@given(values=dotted_values())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("origins", [False, True])
def test_shown_settings_load_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], *, origins: bool
) -> None:
    """The TOML of any settings, with origins or without, is a file of the same settings."""
    loaded = load_settings(config_path=NO_FILE, environ=as_variables(values), flags={})

    text = settings_toml(loaded, origins=origins)

    assert load_text(text, tmp_path_factory.getbasetemp()).settings == loaded.settings


def test_origins_stand_behind_every_value(tmp_path: Path) -> None:
    """Each line ends in where its value came from, in one column for each section."""
    file = tmp_path / "given.toml"
    file.write_text('[server]\nhost = "::1"\n', encoding="utf-8")
    loaded = load_settings(
        config_path=file, environ={"LME_BLAS": "off"}, flags={"server.port": "9090"}
    )

    text = settings_toml(loaded, origins=True)

    assert text.startswith(
        f"# Settings file: {file}\n"
        "\n"
        "[server]\n"
        f'host = "::1"  # file {file}\n'
        "port = 9090   # flag --server-port\n"
        "\n"
        "[model]\n"
        "# path is unset                # default\n"
    )
    assert re.search(r'\[engine\]\nblas = "off" +# environment LME_BLAS\n', text)


def test_a_file_name_cannot_break_the_text(tmp_path: Path) -> None:
    """A line break in the file's name stays inside its comment."""
    file = tmp_path / "a\nport = 1.toml"
    file.write_text("[server]\nport = 2\n", encoding="utf-8")
    loaded = load_settings(config_path=file, environ={}, flags={})

    shown = tomllib.loads(settings_toml(loaded, origins=True))

    assert shown["server"] == {"host": "127.0.0.1", "port": 2}


def test_json_holds_the_values_and_where_they_came_from() -> None:
    """JSON has every key once, and origins by dotted key when asked for."""
    loaded = load_settings(config_path=NO_FILE, environ={"LME_SERVER_PORT": "9"}, flags={})

    plain = json.loads(json.dumps(settings_json(loaded)))
    full = json.loads(json.dumps(settings_json(loaded, origins=True)))

    assert plain == {"config_file": str(NO_FILE), "settings": full["settings"]}
    assert Settings.model_validate(plain["settings"]) == loaded.settings
    assert full["origins"].keys() == {key.dotted for key in KEYS}
    assert full["origins"]["server.port"] == {"kind": "environment", "detail": "LME_SERVER_PORT"}


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    """A secret that is set shows as a mask, by its type or by its mark, and never itself."""
    environ = {"LME_VAULT_TOKEN": SECRET, "LME_VAULT_PIN": "98765"}
    loaded = load_settings(config_path=NO_FILE, environ=environ, flags={}, model=SettingsWithVault)
    text = settings_toml(loaded, origins=True)
    data = settings_json(loaded, origins=True)

    assert f'# token = "{MASK}"' in text
    assert f'# pin = "{MASK}"' in text
    for shown in (text, json.dumps(data)):
        assert MASK in shown
        assert SECRET not in shown
        assert "98765" not in shown


def test_a_secret_that_is_unset_is_not_masked() -> None:
    """A mask means that there is something to hide."""
    loaded = load_settings(config_path=NO_FILE, environ={}, flags={}, model=SettingsWithVault)

    assert "# token is unset\n" in settings_toml(loaded)
    assert MASK not in json.dumps(settings_json(loaded))


def test_masked_settings_still_load(tmp_path: Path) -> None:
    """A mask is a comment: loading the shown text leaves the secret unset, not wrong."""
    loaded = load_settings(
        config_path=NO_FILE, environ={"LME_VAULT_PIN": "9876"}, flags={}, model=SettingsWithVault
    )

    again = load_text(settings_toml(loaded), tmp_path, SettingsWithVault)

    assert again.settings == SettingsWithVault()


@pytest.mark.parametrize("pin", ["12", "twelve"])
def test_a_problem_does_not_tell_a_secret(pin: str) -> None:
    """The line about a wrong secret names key and variable, not the value."""
    with pytest.raises(SettingsError) as caught:
        load_settings(
            config_path=NO_FILE,
            environ={"LME_VAULT_PIN": pin},
            flags={},
            model=SettingsWithVault,
        )

    assert caught.value.problems[0].startswith("vault.pin: the value (hidden) is ")
    assert caught.value.problems[0].endswith("(LME_VAULT_PIN)")
    assert pin not in caught.value.message


def test_the_example_changes_nothing(tmp_path: Path) -> None:
    """The example file as it is written loads to the defaults."""
    assert load_text(settings_example(), tmp_path).settings == Settings()


def test_the_example_shows_every_default(tmp_path: Path) -> None:
    """With every key taken out of its comment the file is valid, and defaults are as shown."""
    assigned = re.sub(r"(?m)^# (?=[a-z_]+ = )", "", settings_example())

    loaded = load_text(assigned, tmp_path)

    for key in KEYS:
        assert loaded.origins[key.dotted].detail == str(tmp_path / "given.toml")
        if key.default is not None:
            assert key.value_in(loaded.settings) == key.default


def test_the_example_describes_every_key_within_80_columns() -> None:
    """Every description is there, and a narrow terminal shows it whole."""
    lines = settings_example().splitlines()
    prose = " ".join(line.removeprefix("# ") for line in lines)

    assert max(len(line) for line in lines) <= 80
    for key in KEYS:
        assert key.description in prose


def test_every_example_value_is_valid(tmp_path: Path) -> None:
    """What is shown where there is no default could be used."""
    for key in KEYS:
        if key.example is not None:
            text = f"[{key.section}]\n{key.name} = {json.dumps(key.example)}"
            assert key.value_in(load_text(text, tmp_path).settings) != key.default


def test_the_schema_knows_every_key_and_no_other() -> None:
    """An editor offers each key with its description, and marks what is misspelt."""
    schema = json.loads(json.dumps(settings_schema()))
    sections = schema["properties"]

    assert schema["additionalProperties"] is False
    for key in KEYS:
        section = schema["$defs"][sections[key.section]["$ref"].rpartition("/")[2]]
        # What is no key of the section is a table of a model or an adapter.
        tables = {"models": "ModelTable", "adapters": "AdapterTable"}
        table = tables.get(key.section)
        others = False if table is None else {"$ref": f"#/$defs/{table}"}
        assert section["additionalProperties"] == others
        assert section["properties"][key.name]["description"] == key.description
        for earlier in key.earlier_names:
            shown = section["properties"][earlier.rpartition(".")[2]]
            assert shown == section["properties"][key.name] | {"deprecated": True}


def test_the_reference_table_has_a_row_for_every_key() -> None:
    """Each row names all spellings of its key, and what changes it."""
    rows = settings_markdown().splitlines()[2:]

    assert len(rows) == len(KEYS)
    for key, row in zip(KEYS, rows, strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 6
        assert cells[0] == f"`{key.dotted}`"
        assert cells[2] == ", ".join(f"`{flag}`" for flag in key.flag_names)
        assert cells[3] == ", ".join(f"`{name}`" for name in key.environment_names)
        assert cells[4] == ("reload" if key.is_live else "restart")


def test_the_generated_files_are_current() -> None:
    """Mend with: machd config init --force config/machd.toml; machd config schema > the schema."""
    example = (REPOSITORY / "config/machd.toml").read_text(encoding="utf-8")
    schema = (REPOSITORY / "config/machd.schema.json").read_text(encoding="utf-8")

    assert example == settings_example()
    assert schema == json.dumps(settings_schema(), indent=2) + "\n"
