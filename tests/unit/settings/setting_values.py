"""Values that settings take, drawn at random, and their spellings."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from hypothesis import strategies as st

from machd.settings.explain import value_text
from machd.settings.keys import (
    SettingKey,
    ValueKind,
    keys_in_table,
    setting_keys,
    table_keys,
    toml_key,
)
from machd.settings.texts import checked_model_name

KEYS = setting_keys()

_WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"),
    min_size=1,
    max_size=12,
).filter(lambda text: text.strip() != "")
_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
_TEXTS_OF_A_FORM: Mapping[str, st.SearchStrategy[object]] = {
    "server.host": st.one_of(_NAMES, st.just("::1"), _NAMES.map(lambda name: f"unix:/{name}")),
    # Both listeners cannot have one address: even ports and odd ones, two directories.
    "server.port": st.integers(0, 32_767).map(lambda half: 2 * half),
    "admin.listen": st.one_of(
        st.integers(0, 32_767).map(lambda half: f"127.0.0.1:{2 * half + 1}"),
        _NAMES.map(lambda name: f"unix:/admin/{name}"),
        st.just("off"),
    ),
    # The mode draft needs a model besides.
    "speculation.mode": st.sampled_from(["auto", "off", "ngram", "dflash"]),
    # True needs hosts besides.
    "vision.allow_urls": st.sampled_from([False]),
    "kv_events.endpoint": _NAMES.map(lambda name: f"ipc:///{name}"),
    "kv_events.replay_endpoint": _NAMES.map(lambda name: f"ipc:///{name}"),
    "vision.url_hosts": st.lists(_NAMES, max_size=3).map(tuple),
    "http.allowed_hosts": st.lists(_NAMES, max_size=3).map(tuple),
    "models.aliases": st.lists(_NAMES, max_size=3).map(tuple),
    "http.allowed_origins": st.lists(_NAMES.map(lambda name: f"https://{name}:1"), max_size=3).map(
        tuple
    ),
}


NEEDED: Mapping[str, Mapping[str, object]] = {
    "vision.allow_urls": {"vision.url_hosts": ("images.example.org",)},
}
"""Values of other keys without which a key cannot be set."""


def values_of(key: SettingKey) -> st.SearchStrategy[object]:
    """Valid values of one key; None among them only where the default is not set."""
    if key.dotted in _TEXTS_OF_A_FORM:
        return _TEXTS_OF_A_FORM[key.dotted]
    if key.choices:
        one = st.sampled_from(key.choices)
        return st.lists(one, max_size=3).map(tuple) if key.is_list else one
    least, most = key.least or 0, key.most or 1e9
    match key.kind:
        case ValueKind.LIST:
            return st.lists(_NAMES, max_size=3).map(tuple)
        case _ if key.words:
            return st.sampled_from(key.words) | st.integers(ceil(least), int(most))
        case ValueKind.BOOLEAN:
            return st.booleans()
        case ValueKind.INTEGER:
            return st.integers(int(least), int(most))
        case ValueKind.NUMBER:
            return st.floats(least, most)
        case _:
            return _WORDS


def dotted_values(keys: tuple[SettingKey, ...] = KEYS) -> st.SearchStrategy[dict[str, object]]:
    """Valid values of some of the keys, by dotted key."""
    return st.fixed_dictionaries({}, optional={key.dotted: values_of(key) for key in keys})


def _is_model_name(text: str) -> bool:
    try:
        checked_model_name(text)
    except ValueError:
        return False
    return True


@st.composite
def model_tables(draw: st.DrawFn) -> dict[str, dict[str, object]]:
    """Valid values of some keys of some models' tables: by dotted key without its table, by model."""
    letters = st.characters(codec="utf-8", exclude_categories=["C"])
    tables: dict[str, dict[str, object]] = {}
    for number in range(draw(st.integers(0, 3))):
        # The end tells it from the names of others, and from those of the default model.
        name = draw(st.text(letters, max_size=12).map(lambda text: f"{text} of model {number}"))  # noqa: B023 - drawn at once
        if not _is_model_name(name):
            name = f"a.{number}"
        tables[name] = {
            **draw(dotted_values(table_keys())),
            "path": draw(_WORDS),
            "aliases": tuple(f"{one}:{number}" for one in draw(st.lists(_NAMES, max_size=2))),
        }
    return tables


def as_tables_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """The part of a settings file that gives these models' tables."""
    lines: list[str] = []
    for name, values in tables.items():
        lines.append(f"[models.{toml_key(name)}]")
        lines += [f"{dotted} = {value_text(value)}" for dotted, value in values.items()]
    return "\n".join(lines) + "\n"


def table_values(
    tables: Mapping[str, Mapping[str, object]],
) -> list[tuple[SettingKey, object]]:
    """Each key that tables give, with its value."""
    return [
        (key, values[own.dotted])
        for name, values in tables.items()
        for own, key in zip(table_keys(), keys_in_table(name), strict=True)
        if own.dotted in values
    ]


def as_variable(value: object) -> str:
    """The text that a variable or a flag would have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_variables(values: Mapping[str, object]) -> dict[str, str]:
    """The environment that gives these values."""
    names = {key.dotted: key.environment_names[0] for key in KEYS}
    return {names[dotted]: as_variable(value) for dotted, value in values.items()}


def as_toml(values: Mapping[str, object]) -> str:
    """The settings file that gives these values."""
    sections: dict[str, list[str]] = {}
    for dotted, value in values.items():
        section, _, name = dotted.partition(".")
        sections.setdefault(section, []).append(f"{name} = {value_text(value)}")
    return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())
