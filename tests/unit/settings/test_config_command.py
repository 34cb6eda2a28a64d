"""``machd config``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from machd.cli.config import config
from machd.errors import SettingsError
from machd.settings.explain import settings_example, settings_schema


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    """Run the group with errors of machd let through."""
    return CliRunner().invoke(config, args, env=env, catch_exceptions=False)


def test_show_takes_the_flags_of_serve() -> None:
    """The command answers what a daemon started with the same flags would use."""
    result = run("show", "--origins", "--port", "9090", env={"LME_BLAS": "off"})

    assert result.exit_code == 0
    assert "port = 9090         # flag --server-port\n" in result.output
    assert re.search(r'blas = "off" +# environment LME_BLAS\n', result.output)


def test_show_prints_toml_or_json() -> None:
    """Both forms hold the same values."""
    toml = tomllib.loads(run("show", "--port", "1").output)
    data = json.loads(run("show", "--json", "--port", "1").output)

    limits = data["settings"]["limits"]
    assert toml["limits"] == {name: value for name, value in limits.items() if value is not None}
    assert toml["server"] == data["settings"]["server"] == {"host": "127.0.0.1", "port": 1}
    assert data["config_file"] is None
    assert "origins" not in data
    assert "origins" in json.loads(run("show", "--json", "--origins").output)


def test_check_says_ok_with_the_file() -> None:
    """A good file, named or found, is answered with OK and its name."""
    assert run("check").output == "OK: no settings file, just defaults and variables\n"
    Path("machd.toml").touch()
    assert run("check").output == "OK: machd.toml\n"
    assert run("check", "machd.toml").output == "OK: machd.toml\n"
    assert json.loads(run("check", "--json").output) == {"ok": True, "problems": []}


def test_check_says_which_name_has_become_another() -> None:
    """A file with a key's earlier name is good, and is answered with the name of now."""
    Path("machd.toml").write_text("[limits]\nstall_timeout_s = 5\n", encoding="utf-8")

    assert run("check").output.splitlines() == [
        "OK: machd.toml",
        "limits.stall_timeout_s: has become limits.client_stall_timeout_s; both names work",
    ]


def test_check_raises_every_problem() -> None:
    """A bad file ends the command with code 2 and a line for each problem."""
    Path("bad.toml").write_text("[server]\nport = -1\nhots = 'a'\n", encoding="utf-8")

    with pytest.raises(SettingsError) as caught:
        run("check", "bad.toml", env={"LME_X": "1"})

    assert caught.value.exit_code == 2
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "server.port",
        "server.hots",
        "LME_X",
    ]


def test_check_has_problems_as_json() -> None:
    """A program that checks a file gets the problems as a list, and code 2."""
    result = run("check", "--json", "missing.toml")

    assert result.exit_code == 2
    assert json.loads(result.output) == {
        "ok": False,
        "problems": ["missing.toml: there is no such file"],
    }


def test_init_writes_a_file_that_check_accepts() -> None:
    """The written file is the example, and it is a good settings file."""
    result = run("init")

    assert result.output == "Wrote machd.toml\n"
    assert Path("machd.toml").read_text(encoding="utf-8") == settings_example()
    assert run("check").output == "OK: machd.toml\n"


def test_init_overwrites_only_when_told_to() -> None:
    """A file that is there is kept, unless --force is given."""
    path = Path("mine.toml")
    path.write_text("kept", encoding="utf-8")

    with pytest.raises(SettingsError, match=r"mine\.toml: is there already; --force overwrites"):
        run("init", "mine.toml")

    assert path.read_text(encoding="utf-8") == "kept"
    assert run("init", "--force", "mine.toml").exit_code == 0
    assert path.read_text(encoding="utf-8") == settings_example()


def test_init_names_a_folder_it_cannot_write_to() -> None:
    """A path that cannot be written is an error with the system's reason."""
    with pytest.raises(SettingsError, match=r"no/machd\.toml: cannot be written: No such file"):
        run("init", "no/machd.toml")


def test_schema_prints_json() -> None:
    """The printed schema is the one that ships."""
    assert json.loads(run("schema").output) == settings_schema()


def test_check_reads_the_key_files_that_the_daemon_would(tmp_path: Path) -> None:
    """What a start or a reload would refuse is told before; no key is quoted."""
    keys = tmp_path / "keys"
    keys.write_text("bob:short\n")
    (tmp_path / "machd.toml").write_text(f'[auth]\napi_keys_file = "{keys}"\n')
    with pytest.raises(SettingsError, match="line 1") as refused:
        run("check")
    assert "short" not in refused.value.message
    keys.write_text("bob:a-key-that-is-long-enough\n")
    keys.chmod(0o600)
    assert run("check").output == "OK: machd.toml\n"
