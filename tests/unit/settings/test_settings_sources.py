"""Where values come from, which one wins, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import model_validator
from unit.settings.setting_values import (
    KEYS,
    NEEDED,
    as_toml,
    as_variable,
    as_variables,
    dotted_values,
)

from machd.errors import SettingsError
from machd.settings.keys import SettingKey
from machd.settings.model import ServerSettings, Settings
from machd.settings.sources import (
    LoadedSettings,
    Origin,
    OriginKind,
    load_settings,
    process_environ,
)

each_key = pytest.mark.parametrize("key", KEYS, ids=[key.dotted for key in KEYS])


def load(
    path: Path,
    toml: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedSettings:
    """Load with ``toml`` in a file of its own, so that no file of this machine is read."""
    file = path / "given.toml"
    file.write_text(toml, encoding="utf-8")
    return load_settings(config_path=file, environ=environ or {}, flags=flags or {})


def problems_of(
    path: Path,
    toml: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> list[str]:
    """The problems of loading, with the file's folder taken out of them."""
    with pytest.raises(SettingsError) as caught:
        load(path, toml, environ, flags)
    return [problem.replace(f"{path}/", "") for problem in caught.value.problems]


def another_value(key: SettingKey) -> object:
    """A valid value that is not the default."""
    if key.is_bool:
        return not key.default
    if key.choices:
        last = key.choices[-1]
        return (last,) if isinstance(key.default, tuple) else last
    if key.example is not None:
        return key.example
    if key.words:
        return int(key.least or 0) + 1
    if key.dotted == "server.port":
        return 9090  # the default and one is the port of the admin API
    if key.dotted == "admin.listen":
        return "unix:/elsewhere"
    if isinstance(key.default, float) and key.most is not None and key.default + 1 > key.most:
        return key.default / 2
    return key.default + 1 if isinstance(key.default, int | float) else "elsewhere"


@each_key
def test_every_key_can_be_set_in_the_file(key: SettingKey, tmp_path: Path) -> None:
    """The file reaches every key, and the origin is the file's path."""
    value = another_value(key)

    loaded = load(tmp_path, as_toml({key.dotted: value, **NEEDED.get(key.dotted, {})}))

    assert key.value_in(loaded.settings) == value != key.default
    assert loaded.origins[key.dotted] == Origin(OriginKind.FILE, str(tmp_path / "given.toml"))


@each_key
def test_every_variable_sets_its_key(key: SettingKey, tmp_path: Path) -> None:
    """Each spelling of the variable reaches the key, and the origin is the one that was used."""
    value = another_value(key)
    needed = as_variables(NEEDED.get(key.dotted, {}))
    for name in key.environment_names:
        loaded = load(tmp_path, environ={name: as_variable(value), **needed})

        assert key.value_in(loaded.settings) == value
        assert loaded.origins[key.dotted] == Origin(OriginKind.ENVIRONMENT, name)


@each_key
def test_every_flag_sets_its_key(key: SettingKey, tmp_path: Path) -> None:
    """A flag reaches every key as text or as a value, and the origin is the flag."""
    value = another_value(key)
    needed = NEEDED.get(key.dotted, {})
    for given_value in (value, as_variable(value)):
        loaded = load(tmp_path, flags={key.dotted: given_value, **needed})

        assert key.value_in(loaded.settings) == value
        assert loaded.origins[key.dotted] == Origin(OriginKind.FLAG, key.flag_names[0])


@given(file=dotted_values(), environment=dotted_values(), flags=dotted_values())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_the_strongest_source_wins_for_every_key(
    tmp_path_factory: pytest.TempPathFactory,
    file: dict[str, object],
    environment: dict[str, object],
    flags: dict[str, object],
) -> None:
    """Flags win over variables, variables over the file, the file over defaults, key by key."""
    loaded = load(
        tmp_path_factory.getbasetemp(),
        as_toml(file),
        as_variables(environment),
        {dotted: as_variable(value) for dotted, value in flags.items()},
    )

    for key in KEYS:
        sources = (
            (flags, OriginKind.FLAG),
            (environment, OriginKind.ENVIRONMENT),
            (file, OriginKind.FILE),
            ({key.dotted: key.default}, OriginKind.DEFAULT),
        )
        values, kind = next(source for source in sources if key.dotted in source[0])
        assert key.value_in(loaded.settings) == values[key.dotted]
        assert loaded.origins[key.dotted].kind is kind


def test_nothing_given_is_the_defaults() -> None:
    """Without a file, variables and flags every value is the default and says so."""
    loaded = load_settings(config_path=None, environ={"PATH": "/bin"}, flags={})

    assert loaded.settings == Settings()
    assert set(loaded.origins) == {key.dotted for key in KEYS}
    assert set(loaded.origins.values()) == {Origin(OriginKind.DEFAULT)}
    assert loaded.config_file is None


def test_nothing_written_means_unset(tmp_path: Path) -> None:
    """An empty variable or flag unsets an optional key and empties a list of the file."""
    toml = '[model]\npath = "a"\nmax_context_tokens = 5\n[http]\nallowed_hosts = ["a"]\n'

    loaded = load(
        tmp_path,
        toml,
        {"LME_MODEL_PATH": "", "LME_HTTP_ALLOWED_HOSTS": ""},
        {"model.max_context_tokens": ""},
    )

    assert loaded.settings == Settings()


def test_a_list_is_separated_by_commas(tmp_path: Path) -> None:
    """Blanks around items do not count, nor do empty items."""
    loaded = load(tmp_path, environ={"LME_HTTP_ALLOWED_HOSTS": " a.example, b.example ,"})

    assert loaded.settings.http.allowed_hosts == ("a.example", "b.example")


def test_every_problem_of_every_source_is_told_at_once(tmp_path: Path) -> None:
    """One failed start shows all there is to mend, overridden values included."""
    toml = '[server]\nport = "8080"\n[limits]\nmax_n = 0\n[limit]\n'
    environ = {"LME_LIMITS_MAX_N": "0", "LME_LOGGING_LEVL": "info"}
    flags = {"logging.format": "yaml", "limits.max_n": "1000"}

    assert problems_of(tmp_path, toml, environ, flags) == [
        'server.port: "8080" is not a whole number; write it without quotes (given.toml)',
        "limits.max_n: 0 is too small, the least is 1 (given.toml)",
        "limit: no such section; did you mean [limits]? (given.toml)",
        "LME_LOGGING_LEVL: no such variable; did you mean LME_LOGGING_LEVEL?",
        "limits.max_n: 0 is too small, the least is 1 (LME_LIMITS_MAX_N)",
        'logging.format: "yaml" is none of auto, json, console (--logging-format)',
        "limits.max_n: 1000 is too large, the most is 128 (--limits-max-n)",
    ]


def test_a_broken_file_does_not_hide_other_problems(tmp_path: Path) -> None:
    """What the variables have wrong is told even if the file cannot be read."""
    problems = problems_of(tmp_path, "[server", {"LME_SERVER_PORT": "65536"})

    assert problems[0].startswith("given.toml: is not TOML: ")
    assert problems[1:] == ["server.port: 65536 is too large, the most is 65535 (LME_SERVER_PORT)"]


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[server]\nprot = 1", "server.prot: no such setting; did you mean server.port?"),
        ("[server]\nmax_n = 1", "server.max_n: no such setting; did you mean limits.max_n?"),
        ("port = 1", "port: no such section; did you mean server.port?"),
        ("[sever]\nport = 1", "sever: no such section; did you mean [server]?"),
        ("server = 1", "server: is a section; write [server]"),
        ("[[server]]\nport = 1", "server: is a section; write [server]"),
        ("[server]\nport = true", "server.port: true is not a whole number"),
        ("[server]\nport = 80.0", "server.port: 80.0 is not a whole number"),
        ("[server]\nhost = 1", "server.host: 1 is not text; put it in quotes"),
        ("[server]\nhost = ''", 'server.host: "" names nothing to listen on; give an address or'),
        ("[server]\nhost = 'unix:'", 'server.host: "unix:" names nothing to listen on; give an'),
        ("[server]\nhost = '/run/x'", 'server.host: "/run/x" is not an address; a socket file is'),
        ("[server]\nhost = 'a:1'", 'server.host: "a:1" has a port in it; the port is server.port'),
        ("[model]\noffline = 1", "model.offline: 1 is not true or false"),
        ("[model]\noffline = 'no'", 'model.offline: "no" is not true or false; write it without'),
        ("[model]\npath = ''", 'model.path: "" is empty'),
        ("[model]\npath = 2020-01-01", 'model.path: "2020-01-01" is not text'),
        (
            "[continuous_batching]\nprefill_chunk_tokens = 0",
            "continuous_batching.prefill_chunk_tokens: 0 is too small, the least is 1",
        ),
        (
            "[continuous_batching]\nprefill_chunk_tokens = '64'",
            'continuous_batching.prefill_chunk_tokens: "64" is not auto or a whole number; write it',
        ),
        (
            "[continuous_batching]\nprefill_chunk_tokens = 'fast'",
            'continuous_batching.prefill_chunk_tokens: "fast" is not auto or a whole number (',
        ),
        (
            "[continuous_batching]\nkv_budget_gb = 0",
            "continuous_batching.kv_budget_gb: 0 is too small, the least is 0.0001",
        ),
        (
            "[continuous_batching]\nkv_policy = 'wait'",
            'continuous_batching.kv_policy: "wait" is none of defer, reject',
        ),
        ("[streaming]\nkeepalive_s = nan", "streaming.keepalive_s: NaN is not a number"),
        ("[http]\nallowed_hosts = 'a'", 'http.allowed_hosts: "a" is not a list; put it in'),
        ("[http]\nallowed_hosts = [1]", "http.allowed_hosts: 1 is not text; put it in quotes"),
        ("[http]\nallowed_hosts = ['http://a']", 'http.allowed_hosts: "http://a" is not a host'),
        ("[http]\nallowed_origins = ['a']", 'http.allowed_origins: "a" is not an origin; write'),
    ],
)
def test_a_problem_names_key_value_source_and_fix(toml: str, problem: str, tmp_path: Path) -> None:
    """A wrong line of the file is answered by one line that says how to mend it."""
    problems = problems_of(tmp_path, toml)

    assert len(problems) == 1
    assert problems[0].startswith(problem)
    assert problems[0].endswith(" (given.toml)")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LME_SERVER_PROT", "LME_SERVER_PORT"),
        ("LME_STREAM_INTERVALL", "LME_STREAM_INTERVAL"),
        ("LME_CONFG", "LME_CONFIG"),
    ],
)
def test_an_unknown_variable_is_answered_with_the_nearest(
    name: str, nearest: str, tmp_path: Path
) -> None:
    """A misspelt variable is never passed over in silence."""
    assert problems_of(tmp_path, environ={name: "1"}) == [
        f"{name}: no such variable; did you mean {nearest}?"
    ]


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("64", 64), (" 65536 ", 65_536)])
def test_a_number_or_a_word_is_read_from_text(text: str, value: object, tmp_path: Path) -> None:
    """Where a key takes a number or a word, a variable and a flag give either."""
    key = "continuous_batching.prefill_chunk_tokens"
    variable = {"LME_CONTINUOUS_BATCHING_PREFILL_CHUNK_TOKENS": text}
    for loaded in (load(tmp_path, environ=variable), load(tmp_path, flags={key: text})):
        assert loaded.settings.continuous_batching.prefill_chunk_tokens == value


@pytest.mark.parametrize("word", ["Auto", "", "0", "65537", "1.5", "none"])
def test_neither_the_word_nor_a_number_in_range_is_one_problem(word: str, tmp_path: Path) -> None:
    """However many types a key could have, a wrong value is one line."""
    (problem,) = problems_of(
        tmp_path, environ={"LME_CONTINUOUS_BATCHING_PREFILL_CHUNK_TOKENS": word}
    )

    assert problem.startswith("continuous_batching.prefill_chunk_tokens: ")


def test_the_name_of_a_section_can_be_a_variable_and_a_prefix(tmp_path: Path) -> None:
    """LME_CONTINUOUS_BATCHING switches it on, and the section's other variables stay their own."""
    environ = {"LME_CONTINUOUS_BATCHING": "1", "LME_CONTINUOUS_BATCHING_MAX_B": "8"}
    section = load(tmp_path, environ=environ).settings.continuous_batching

    assert (section.enabled, section.max_b) == (True, 8)
    assert problems_of(tmp_path, environ={"LME_CONTINUOUS_BATCHING_MAXB": "8"}) == [
        "LME_CONTINUOUS_BATCHING_MAXB: no such variable; did you mean LME_CONTINUOUS_BATCHING_MAX_B?"
    ]


def test_an_unknown_flag_key_is_a_problem(tmp_path: Path) -> None:
    """Callers other than the command line are told of wrong keys too."""
    assert problems_of(tmp_path, flags={"server.prot": 1}) == [
        "server.prot: no such setting; did you mean server.port? (flag)"
    ]


def test_an_earlier_name_sets_its_key_and_is_told(tmp_path: Path) -> None:
    """A file and a variable may use the name that a key had before; what replaced it is said."""
    by_file = load(tmp_path, "[limits]\nstall_timeout_s = 7\n")
    by_variable = load(tmp_path, environ={"LME_LIMITS_STALL_TIMEOUT_S": "8"})

    assert by_file.settings.limits.client_stall_timeout_s == 7
    origin = by_file.origins["limits.client_stall_timeout_s"]
    assert origin.detail == f"{tmp_path}/given.toml, as limits.stall_timeout_s"
    assert by_file.renamed == {"limits.stall_timeout_s": "limits.client_stall_timeout_s"}
    assert by_variable.settings.limits.client_stall_timeout_s == 8
    assert by_variable.renamed == {
        "LME_LIMITS_STALL_TIMEOUT_S": "LME_LIMITS_CLIENT_STALL_TIMEOUT_S"
    }
    assert load(tmp_path, "[limits]\nclient_stall_timeout_s = 7\n").renamed == {}


def test_a_key_under_both_of_its_names_is_a_problem(tmp_path: Path) -> None:
    """A file that gives a key twice does not say which value counts."""
    toml = "[limits]\nstall_timeout_s = 7\nclient_stall_timeout_s = 8\n"

    assert problems_of(tmp_path, toml) == [
        "limits.client_stall_timeout_s, limits.stall_timeout_s: is one setting; keep one name (given.toml)"
    ]


def test_two_spellings_of_a_variable_have_to_agree(tmp_path: Path) -> None:
    """An alias and the regular name may both be set, but not to different values."""
    agreeing = {"LME_BLAS": "off", "LME_ENGINE_BLAS": "off"}

    assert load(tmp_path, environ=agreeing).settings.engine.blas == "off"
    assert problems_of(tmp_path, environ=agreeing | {"LME_BLAS": "auto"}) == [
        "engine.blas: given twice, and not the same; keep one (LME_ENGINE_BLAS, LME_BLAS)"
    ]


@given(text=st.text(min_size=1, max_size=100))
@settings(deadline=None, max_examples=50)
def test_a_problem_is_one_printable_line(text: str) -> None:
    """Whatever a variable holds, the line about it is short and cannot garble a terminal."""
    with pytest.raises(SettingsError) as caught:
        load_settings(
            config_path=Path("/dev/null"), environ={}, flags={"logging.level": f"\x1b{text}"}
        )

    assert len(caught.value.problems) == 1
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200


def test_a_name_in_the_file_cannot_break_the_line(tmp_path: Path) -> None:
    """A key or section with a line break in its name is still one line of problems."""
    problems = problems_of(tmp_path, '"a\\nb" = 1\n[server]\n"c\\u001b" = 1\n')

    assert len(problems) == 2
    assert all(problem.isprintable() for problem in problems)


def test_a_rule_between_keys_is_a_problem_too() -> None:
    """Two values that are right alone and wrong together are told in the rule's own words."""

    class Ruled(Settings):
        """Settings with a rule between two keys."""

        @model_validator(mode="after")
        def _queue_is_long_enough(self) -> Ruled:
            if self.limits.max_queue < self.limits.max_n:
                raise ValueError("limits.max_queue: has to be at least limits.max_n")
            return self

    with pytest.raises(SettingsError) as caught:
        load_settings(config_path=None, environ={}, flags={"limits.max_queue": "1"}, model=Ruled)

    assert caught.value.problems == ["limits.max_queue: has to be at least limits.max_n"]


def test_fetching_urls_needs_the_hosts_that_may_be_fetched_from() -> None:
    """``vision.allow_urls`` alone would allow nothing, or everything: it is refused with the fix."""
    with pytest.raises(SettingsError) as caught:
        load_settings(config_path=None, environ={}, flags={"vision.allow_urls": "true"})

    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("vision.allow_urls: ")
    assert "vision.url_hosts" in caught.value.problems[0]


@pytest.mark.parametrize(
    "host",
    ["", "*", "*.example.org", "https://a.example", "a.example:443", "A.example", "a..b", "a/b"],
)
def test_a_host_of_urls_is_written_out_in_full(host: str) -> None:
    """No pattern, scheme, port or path, and no second spelling of one name."""
    with pytest.raises(SettingsError) as caught:
        load_settings(config_path=None, environ={}, flags={"vision.url_hosts": [host]})

    assert "is not a host as URLs name it" in caught.value.problems[0]


def test_what_is_not_unicode_is_refused(tmp_path: Path) -> None:
    """A path with undecodable bytes could not be shown again, so it is a problem at once."""
    assert problems_of(tmp_path, environ={"LME_MODEL_PATH": "a\udcff"}) == [
        r'model.path: "a\udcff" is not Unicode text (LME_MODEL_PATH)'
    ]


def test_settings_cannot_change(tmp_path: Path) -> None:
    """What was validated stays as it is, sections and origins included."""
    loaded = load(tmp_path)

    with pytest.raises(ValueError, match="frozen"):
        loaded.settings.server.port = 1
    with pytest.raises(TypeError):
        loaded.origins["server.port"] = Origin(OriginKind.FLAG)  # type: ignore[index]


def test_the_process_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload compares with what was read, whatever happens to the environment since."""
    monkeypatch.setenv("LME_SERVER_PORT", "1")
    environ = process_environ()
    monkeypatch.setenv("LME_SERVER_PORT", "2")

    assert environ["LME_SERVER_PORT"] == "1"


def test_settings_made_directly_read_no_variable_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings made without sources are the defaults, whatever stands in variables, `.env` and `machd.toml`."""
    monkeypatch.setenv("SERVER", '{"port": 1}')
    monkeypatch.setenv("LME_SERVER_PORT", "1")
    (tmp_path / ".env").write_text("SERVER='{\"port\": 1}'\n")
    (tmp_path / "machd.toml").write_text("[server]\nport = 1\n")
    assert Settings().server.port == ServerSettings().port
    assert Settings(server={"port": 2}).server.port == 2  # type: ignore[arg-type]
