"""The settings table: spellings, and what the contract promises of keys and defaults."""

from __future__ import annotations

import re

import pytest
from unit.settings.setting_values import KEYS

from machd.settings.keys import (
    ALIASES,
    ENVIRONMENT_PREFIX,
    SettingKey,
    ValueKind,
    variable_of,
)
from machd.settings.model import Settings

BY_DOTTED = {key.dotted: key for key in KEYS}

each_key = pytest.mark.parametrize("key", KEYS, ids=[key.dotted for key in KEYS])

CONTRACT_DEFAULTS = {
    "server.host": "127.0.0.1",
    "server.port": 8080,
    "model.path": None,
    "model.dtype": "auto",
    "model.offline": True,
    "model.max_context_tokens": None,
    "model.trust_remote_code": False,
    "model.chat_template": None,
    "engine.blas": "auto",
    "continuous_batching.enabled": False,
    "continuous_batching.max_b": 4,
    "continuous_batching.window_ms": 5.0,
    "continuous_batching.kv_budget_gb": 10.0,
    "continuous_batching.kv_policy": "defer",
    "continuous_batching.prefill_chunk_tokens": "auto",
    "continuous_batching.coalesce": True,
    "streaming.interval": 1,
    "streaming.keepalive_s": 15.0,
    "limits.max_queue": 64,
    "limits.max_queue_tokens": 1_000_000,
    "limits.max_tokens_default": 2048,
    "limits.max_n": 8,
    "limits.max_body_bytes": 2_097_152,
    "limits.queue_timeout_s": 120.0,
    "limits.request_timeout_s": 1800.0,
    "limits.stall_timeout_s": 30.0,
    "limits.drain_timeout_s": 60.0,
    "auth.api_keys_file": None,
    "auth.admin_token_file": None,
    "admin.listen": "127.0.0.1:8081",
    "metrics.vllm_names": False,
    "probe.on_start": "auto",
    "http.allowed_hosts": (),
    "http.allowed_origins": (),
    "metrics.public": True,
    "logging.level": "info",
    "logging.format": "auto",
}


def test_the_promised_keys_have_the_promised_defaults() -> None:
    """Every key that users were promised exists with its default; more keys may be added."""
    defaults = {name: key.default for key in KEYS for name in (key.dotted, *key.earlier_names)}

    assert {dotted: defaults.get(dotted) for dotted in CONTRACT_DEFAULTS} == CONTRACT_DEFAULTS
    assert defaults.keys() >= CONTRACT_DEFAULTS.keys()


@each_key
def test_the_table_tells_the_default_that_the_class_has(key: SettingKey) -> None:
    """Settings made of nothing hold the default that the table shows, and it is within bounds."""
    value = key.value_in(Settings())

    assert value == key.default
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert key.least is None or key.least <= value
        assert key.most is None or value <= key.most


@each_key
def test_a_key_has_its_regular_spellings(key: SettingKey) -> None:
    """Section a, key b is LME_A_B and --a-b, and these come before any alias."""
    assert key.environment_names[0] == f"LME_{key.section}_{key.name}".upper()
    assert key.flag_names[0] == f"--{key.section}-{key.name}".replace("_", "-")


def test_an_earlier_name_is_no_keys_own() -> None:
    """A name that a key had before leads to that key alone, with its variable and its flag."""
    earlier = [(name, key) for key in KEYS for name in key.earlier_names]

    assert earlier
    assert len({name for name, _ in earlier}) == len(earlier)
    for name, key in earlier:
        assert name not in BY_DOTTED
        assert variable_of(name) in key.environment_names[1:]
        assert f"--{name}".replace(".", "-").replace("_", "-") in key.flag_names[1:]


def test_no_spelling_belongs_to_two_keys() -> None:
    """A variable or a flag names one key, aliases and the --no- forms included."""
    variables = [name for key in KEYS for name in key.environment_names]
    flags = [flag for key in KEYS for flag in key.flag_names]
    negated = [f"--no-{flag[2:]}" for key in KEYS if key.is_bool for flag in key.flag_names]

    assert len(set(variables)) == len(variables)
    assert len({*flags, *negated, "--config"}) == len(flags) + len(negated) + 1
    assert "LME_CONFIG" not in variables


def test_every_alias_is_of_a_key_and_well_formed() -> None:
    """An alias cannot outlive its key, and looks like the other spellings."""
    for alias in ALIASES:
        assert alias.dotted in BY_DOTTED
        assert alias.environment or alias.flag
        assert alias.environment is None or alias.environment.startswith(ENVIRONMENT_PREFIX)
        assert alias.flag is None or re.fullmatch(r"--[a-z0-9-]+", alias.flag)


@pytest.mark.parametrize(
    ("dotted", "spelling"),
    [
        ("server.host", "--host"),
        ("server.port", "--port"),
        ("continuous_batching.enabled", "--continuous-batching"),
        ("continuous_batching.enabled", "LME_CONTINUOUS_BATCHING"),
        ("engine.blas", "--blas"),
        ("engine.blas", "LME_BLAS"),
        ("streaming.interval", "--stream-interval"),
        ("streaming.interval", "LME_STREAM_INTERVAL"),
    ],
)
def test_the_promised_aliases_exist(dotted: str, spelling: str) -> None:
    """The shorter spellings that users were promised name their key."""
    key = BY_DOTTED[dotted]

    assert spelling in (*key.environment_names, *key.flag_names)


@each_key
def test_a_key_is_described_in_a_sentence(key: SettingKey) -> None:
    """A description starts and ends like a sentence and fits on two lines of help."""
    assert key.description.endswith(".")
    assert "\n" not in key.description
    assert 20 <= len(key.description) <= 180


@each_key
def test_a_number_has_a_lower_bound(key: SettingKey) -> None:
    """No key takes every number."""
    if key.kind in {ValueKind.INTEGER, ValueKind.NUMBER}:
        assert key.least is not None
        assert key.range_text != ""


def test_a_number_that_may_be_a_word_tells_both() -> None:
    """The word stands beside the number's kind and bounds, wherever they are shown."""
    key = BY_DOTTED["continuous_batching.prefill_chunk_tokens"]

    assert (key.kind, key.words, key.least, key.most) == (ValueKind.INTEGER, ("auto",), 1, 65_536)
    assert key.range_text == "auto, or 1 to 65536"
    assert not key.is_optional


def test_open_requests_have_room_for_every_queue_and_batch() -> None:
    """By default no request that a slot or the queue has room for is refused at the door."""
    widest = BY_DOTTED["continuous_batching.max_b"].most
    limits = Settings().limits

    assert widest is not None
    assert limits.max_in_flight >= limits.max_queue + widest


@each_key
def test_a_key_that_can_be_unset_is_unset_by_default(key: SettingKey) -> None:
    """TOML cannot write None, so leaving a key out has to mean it; an example stands in for it."""
    if key.is_optional:
        assert key.default is None
        assert key.example is not None
    else:
        assert key.default is not None
