"""Flags: one for each key, and what a command is handed."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from unit.settings.setting_values import KEYS, NEEDED, as_variables

from machd.cli.options import SettingsCommand, model_argument, settings_options
from machd.errors import SettingsError
from machd.settings.keys import SettingKey, ValueKind
from machd.settings.sources import LoadedSettings, OriginKind

each_key = pytest.mark.parametrize("key", KEYS, ids=[key.dotted for key in KEYS])


@click.command(cls=SettingsCommand)
@model_argument
@click.option("--loud", is_flag=True, help="An option of the command's own.")
@settings_options
def probe(loaded: LoadedSettings, *, loud: bool) -> None:
    """Print what was given."""
    given = {
        dotted: origin
        for dotted, origin in loaded.origins.items()
        if origin.kind is not OriginKind.DEFAULT
    }
    for key in KEYS:
        if key.dotted in given:
            click.echo(f"{key.dotted}={key.value_in(loaded.settings)!r} {given[key.dotted].kind}")
    click.echo(f"loud={loud}")


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    """Run the command with errors of machd let through."""
    return CliRunner().invoke(probe, args, env=env, catch_exceptions=False)


def sample_text(key: SettingKey) -> str:
    """A valid value as typed."""
    if key.choices:
        return key.choices[0]
    if isinstance(key.default, float) and key.most is not None and key.most < 1:
        return str(key.default / 2)
    if key.kind in {ValueKind.INTEGER, ValueKind.NUMBER}:
        return str(int(key.least or 0) + 1)
    forms = {
        "http.allowed_origins": "https://a.example",
        "admin.listen": "unix:/somewhere",
        "kv_events.endpoint": "ipc:///somewhere",
        "kv_events.replay_endpoint": "ipc:///somewhere",
    }
    return forms.get(key.dotted, "somewhere")


@each_key
def test_every_spelling_of_a_flag_reaches_the_command(key: SettingKey) -> None:
    """Each flag, alias or not, sets its key and nothing else."""
    for flag in key.flag_names:
        args = [flag] if key.is_bool else [flag, sample_text(key)]
        needed = NEEDED.get(key.dotted, {})
        lines = run(*args, env=as_variables(needed)).output.splitlines()

        assert len(lines) == 2 + len(needed)
        assert lines[0].startswith(f"{key.dotted}=")
        assert lines[0].endswith(" flag")


@each_key
def test_a_boolean_flag_has_a_negative(key: SettingKey) -> None:
    """What is on by default can be switched off, and the other way round."""
    if not key.is_bool:
        return
    flag = key.flag_names[0]
    needed = as_variables(NEEDED.get(key.dotted, {}))

    assert run(flag, env=needed).output.startswith(f"{key.dotted}=True flag")
    assert run(f"--no-{flag[2:]}").output.startswith(f"{key.dotted}=False flag")


def test_streaming_flag_means_auto() -> None:
    """``--streaming`` sets ``experts.resident_gb`` to auto, and a second value is bad usage."""
    assert run("--streaming").output.startswith("experts.resident_gb='auto' flag")
    assert run("--streaming", "--experts-resident-gb", "8").exit_code == 2


def test_batching_is_switched_by_one_word() -> None:
    """The short flag and its negative set the section's switch, and win over the variable."""
    environ = {"LME_CONTINUOUS_BATCHING": "1"}

    assert run("--continuous-batching").output.startswith("continuous_batching.enabled=True flag")
    assert run(env=environ).output.startswith("continuous_batching.enabled=True environment")
    assert run("--no-continuous-batching", env=environ).output.startswith(
        "continuous_batching.enabled=False flag"
    )
    assert "--continuous-batching-prefill-chunk-tokens [auto|INTEGER]" in run("--help-all").output


def test_flags_that_are_not_given_are_absent() -> None:
    """An option's default never overrides the environment."""
    assert run().output == "loud=False\n"
    assert run("--loud", env={"LME_MODEL_OFFLINE": "no"}).output == (
        "model.offline=False environment\nloud=True\n"
    )


def test_a_list_can_be_given_in_pieces() -> None:
    """Commas and repetition come to the same; an empty value is an empty list."""
    flag = "--http-allowed-hosts"

    assert run(flag, "a,b", flag, "c").output.startswith("http.allowed_hosts=('a', 'b', 'c') ")
    assert run(flag, "").output.startswith("http.allowed_hosts=() flag")


def test_config_names_the_file(tmp_path: Path) -> None:
    """--config is read, and flags win over it."""
    file = tmp_path / "mine.toml"
    file.write_text("[server]\nport = 1\nhost = 'a'\n", encoding="utf-8")

    assert run("--config", str(file), "--port", "2").output == (
        "server.host='a' file\nserver.port=2 flag\nloud=False\n"
    )


def test_wrong_values_are_told_together() -> None:
    """The command line stops at no first problem: flags and variables are judged in one go."""
    with pytest.raises(SettingsError) as caught:
        run("--port", "x", "--limits-max-n", "0", env={"LME_LOGGING_LEVEL": "loud"})

    assert caught.value.problems == [
        'logging.level: "loud" is none of debug, info, warning, error (LME_LOGGING_LEVEL)',
        'server.port: "x" is not a whole number (--server-port)',
        "limits.max_n: 0 is too small, the least is 1 (--limits-max-n)",
    ]


def test_the_model_can_be_an_argument() -> None:
    """MODEL is --model-path without the flag, and giving both is a usage error."""
    both = run("a", "--model-path", "b")

    assert run("a").output.startswith("model.path='a' flag")
    assert both.exit_code == 2
    assert "Give the model once" in both.output


def test_help_fits_a_screen_and_names_the_rest() -> None:
    """The short help has what most people set, and how to see all."""
    lines = run("--help").output.splitlines()

    assert len(lines) <= 48
    assert max(map(len, lines)) <= 80
    assert any("--help-all" in line for line in lines)
    assert any("--port INTEGER" in line for line in lines)
    assert not any("--limits-max-queue" in line for line in lines)


def test_help_shows_every_setting_under_its_section() -> None:
    """The whole help fits into 80 columns and has each key's flags, description and default."""
    text = run("--help-all").output
    words = " ".join(text.split())

    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.index("--loud") < text.index("server: The public listener.")
    for key in KEYS:
        assert f"{key.section}: " in text
        assert all(flag in text for flag in key.flag_names)
        assert key.description in words
    assert "[default: 8080]" in words
    assert "[default: true]" in words
