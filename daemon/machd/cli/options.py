"""The settings as command-line options: one for each key, made from the settings table.

A command that takes settings is declared so, and is called with the loaded settings first::

    @click.command(cls=SettingsCommand)
    @settings_options
    def show(loaded: LoadedSettings) -> None: ...

The options take text and leave judging it to ``load_settings``, so that a person sees every
problem at once, those of the file and the variables among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from machd.settings.explain import value_text
from machd.settings.keys import SettingKey, setting_keys, setting_sections
from machd.settings.sources import LoadedSettings, SettingsSources, process_environ

_FLAGS_KEY = "machd.settings.flags"
_CONFIG_KEY = "machd.settings.config"
_MODEL_KEY = "model.path"
_WHOLE_KEY = "machd.help.whole"
_MAX_SPELLINGS_CHARS = 70

_MAIN_SETTINGS = frozenset(
    {
        "server.host",
        "server.port",
        "model.quantize",
        "continuous_batching.enabled",
        "continuous_batching.max_b",
        "continuous_batching.kv_budget_gb",
        "auth.api_keys_file",
        "logging.level",
    }
)
"""What most people set; ``--help`` shows no others."""


def _show_whole_help(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        assert isinstance(ctx.command, SettingsCommand)
        click.echo(ctx.command.get_whole_help(ctx), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_whole_help,
    help="Show every option and setting, and exit.",
)

Args = ParamSpec("Args")
Result = TypeVar("Result")


class SettingOption(click.Option):
    """An option that gives one setting."""

    def __init__(self, param_decls: list[str], *, setting: SettingKey, **attrs: object) -> None:
        super().__init__(param_decls, **attrs)  # type: ignore[arg-type]
        self.setting = setting


class SettingsCommand(click.Command):
    """A command whose ``--help`` fits a screen, and whose ``--help-all`` has every setting.

    ``main_options`` names the own options that ``--help`` shows; all of them unless given.
    """

    def __init__(
        self, name: str | None, *, main_options: Collection[str] | None = None, **attrs: object
    ) -> None:
        super().__init__(name, **attrs)  # type: ignore[arg-type]
        self._main_options = main_options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's parameters, ``--help`` and ``--help-all`` last."""
        return [*super().get_params(ctx), _HELP_ALL]

    def get_whole_help(self, ctx: click.Context) -> str:
        """The help with every option, as ``--help-all`` prints it."""
        ctx.meta[_WHOLE_KEY] = True
        return self.get_help(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the main options and settings, or all of them, the settings under their sections."""
        if ctx.meta.get(_WHOLE_KEY):
            self._format_all(ctx, formatter)
            return
        own: list[tuple[str, str]] = []
        settings: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if isinstance(param, SettingOption):
                if param.setting.dotted in _MAIN_SETTINGS:
                    settings.append(_in_short(param, record[0]))
            elif self._is_main(param):
                own.append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        with formatter.section("Main settings"):
            formatter.write_dl(settings)

    def _is_main(self, param: click.Parameter) -> bool:
        """Return whether ``--help`` shows one of the command's own options."""
        is_help = "--help" in param.opts or param is _HELP_ALL
        return self._main_options is None or is_help or param.name in self._main_options

    def _format_all(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        of_section: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if isinstance(param, SettingOption):
                of_section.setdefault(param.setting.section, []).append(_folded(*record))
            else:
                own.append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        for section in setting_sections():
            if section.name in of_section:
                formatter.write_paragraph()
                formatter.write_text(f"{section.name}: {section.description}")
                with formatter.indentation():
                    formatter.write_dl(of_section[section.name])


def settings_options(
    command: Callable[Concatenate[LoadedSettings, Args], Result],
) -> Callable[Args, Result]:
    """Add ``--config`` and an option for every key, and hand the command what they come to.

    Raises:
        SettingsError: When the command is run and a setting is wrong, wherever it was given.
    """

    @functools.wraps(command)
    def with_settings(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        return command(settings_sources().load(), *args, **kwargs)

    # Click shows the option first that was added last.
    for key in reversed(setting_keys()):
        for flag, word in key.flag_words:
            _add_word(with_settings, key, flag, word)
        _add_option(with_settings, key)
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        expose_value=False,
        callback=_keep_config,
        help="Settings file. Without it: $LME_CONFIG, ./machd.toml, the user's configuration"
        " folder, /etc/machd/machd.toml; the first that is there.",
    )(with_settings)
    return with_settings


def settings_sources() -> SettingsSources:
    """Return the sources of the running command's settings."""
    meta = click.get_current_context().meta
    return SettingsSources(
        config_path=meta.get(_CONFIG_KEY),
        environ=process_environ(),
        flags=meta.get(_FLAGS_KEY, {}),
    )


def model_argument(command: Callable[Args, Result]) -> Callable[Args, Result]:
    """Add the argument MODEL, another spelling of ``--model-path``; goes with settings_options."""
    argument = click.argument(
        "model",
        metavar="[MODEL]",
        required=False,
        expose_value=False,
        callback=_keep_model,
        shell_complete=_complete_path,
    )
    return argument(command)


def models_argument(command: Callable[Args, Result]) -> Callable[Args, Result]:
    """Add the argument MODEL as ``models``: one, as :func:`model_argument` takes it, or with ``--fits`` several."""
    return click.argument(
        "models",
        metavar="[MODEL]...",
        nargs=-1,
        callback=_keep_models,
        shell_complete=_complete_path,
    )(command)


def _complete_path(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a MODEL as a path."""
    return [CompletionItem(incomplete, type="file")]


def _add_option(command: Callable[..., object], key: SettingKey) -> None:
    spellings = [f"{flag}/--no-{flag[2:]}" if key.is_bool else flag for flag in key.flag_names]
    click.option(
        key.dotted.replace(".", "_"),
        *spellings,
        cls=SettingOption,
        setting=key,
        type=click.BOOL if key.is_bool else click.STRING,
        default=None,
        multiple=key.is_list,
        metavar=_metavar(key),
        expose_value=False,
        callback=_keep_setting,
        help=_help_text(key),
    )(command)


def _add_word(command: Callable[..., object], key: SettingKey, flag: str, word: str) -> None:
    click.option(
        flag,
        cls=SettingOption,
        setting=key,
        is_flag=True,
        flag_value=word,
        default=None,
        expose_value=False,
        callback=_keep_setting,
        help=f"The same as `{key.flag_names[0]} {word}`.",
    )(command)


def _in_short(param: SettingOption, spellings: str) -> tuple[str, str]:
    """A setting's shortest spelling, and what it does in one sentence."""
    key = param.setting
    flag = min(param.opts, key=len)
    metavar = "" if key.is_bool else f" {spellings.rpartition(' ')[2]}"
    sentence = key.description.partition(". ")[0].rstrip(".")
    default = _help_text(key).removeprefix(key.description)
    return f"{flag}{metavar}", f"{sentence}.{default}"


def _folded(spellings: str, text: str) -> tuple[str, str]:
    """A record whose spellings fit into a narrow terminal: the ``--no-`` forms go to a new line."""
    is_long = len(spellings) > _MAX_SPELLINGS_CHARS
    return spellings.replace(" / ", " /\n      ") if is_long else spellings, text


def _metavar(key: SettingKey) -> str | None:
    if key.is_bool:
        return None
    if key.choices and not key.is_list:
        return f"[{'|'.join(key.choices)}]"
    if key.words:
        return f"[{'|'.join((*key.words, key.kind.upper()))}]"
    return "TEXT,..." if key.is_list else key.kind.upper()


def _help_text(key: SettingKey) -> str:
    default = "" if key.default in {None, ()} else f"  [default: {_plain(key.default)}]"
    words = f" Any of {', '.join(key.choices)}." if key.choices and key.is_list else ""
    return f"{key.description}{words}{default}"


def _plain(value: object) -> str:
    """A default as it is typed on a command line."""
    return value if isinstance(value, str) else value_text(value)


def _keep_setting(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Note a setting that was given; a list may be given piece by piece."""
    assert isinstance(param, SettingOption)
    if value is None or value == ():
        return
    _give(ctx, param.setting.dotted, ",".join(value) if isinstance(value, tuple) else value)


def _keep_model(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        _give(ctx, _MODEL_KEY, value)


def _keep_models(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    if ctx.params.get("fits"):
        return value
    if len(value) > 1:
        raise click.UsageError("Give one MODEL; several go with --fits.", ctx)
    for one in value:
        _keep_model(ctx, param, one)
    return value


def _keep_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    ctx.meta[_CONFIG_KEY] = value


def _give(ctx: click.Context, dotted: str, value: object) -> None:
    """Note one value; click calls this once for an option, so a second one is the argument's."""
    flags: dict[str, object] = ctx.meta.setdefault(_FLAGS_KEY, {})
    if dotted in flags:
        if dotted == _MODEL_KEY:
            raise click.UsageError("Give the model once: as MODEL or as --model-path.", ctx)
        raise click.UsageError(f"Give {dotted} once.", ctx)
    flags[dotted] = value
