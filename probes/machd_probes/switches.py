"""Tiny configurations with options turned over that are true or false, since each may run other code.

Checkpoints of one architecture differ in such options: whether the router's weights are normed,
whether a convolution has a bias. A tiny configuration has one setting of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import combinations

from machd.engine.backend.untyped import LanguageModel
from machd_probes.tiny import TinyConfiguration

Option = tuple[str, ...]
"""Keys of the configuration, from the outermost one in."""


def options_of(
    configuration: TinyConfiguration, args_class: LanguageModel
) -> Iterator[tuple[Option, bool]]:
    """Yield the options that are true or false, with their values.

    Args:
        configuration: Of an architecture.
        args_class: mlx-lm's ``ModelArgs``, whose defaults hold for what the configuration leaves out.
    """
    yield from _written(configuration.config)
    if dataclasses.is_dataclass(args_class):
        for one in dataclasses.fields(args_class):
            if isinstance(one.default, bool) and one.name not in configuration.config:
                yield (one.name,), one.default


def turned_over(
    configuration: TinyConfiguration, options: Mapping[Option, bool]
) -> TinyConfiguration:
    """Return the configuration with each of these options set to the opposite of its value."""
    config: Mapping[str, object] = configuration.config
    for option, value in options.items():
        config = _with(config, option, not value)
    return dataclasses.replace(configuration, config=config)


def described(options: Mapping[Option, bool]) -> str:
    """Name what :func:`turned_over` sets, such as ``norm_topk_prob=false``."""
    return " ".join(f"{'.'.join(one)}={str(not value).lower()}" for one, value in options.items())


def pairs(options: Mapping[Option, bool]) -> Iterator[dict[Option, bool]]:
    """Yield two options at a time: a layer with two switches has code for each combination."""
    for pair in combinations(options.items(), 2):
        yield dict(pair)


def _written(config: Mapping[str, object], outer: Option = ()) -> Iterator[tuple[Option, bool]]:
    for key, value in config.items():
        if isinstance(value, bool):
            yield (*outer, key), value
        elif isinstance(value, Mapping):
            yield from _written(value, (*outer, key))


def _with(config: Mapping[str, object], option: Option, value: object) -> dict[str, object]:
    first, *rest = option
    if not rest:
        return {**config, first: value}
    inner = config[first]
    assert isinstance(inner, Mapping), "an option was found in it"
    return {**config, first: _with(inner, tuple(rest), value)}
