"""Which daemon ``machd ctl`` talks to, and with which token: what the daemon's own settings say.

Where they say nothing of the admin address, a daemon may run as a service, whose unit puts its admin
API on a socket: those of the user and of the machine are tried after the default port.

The options may stand behind ``ctl`` or behind the subcommand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from machd.admin.token import read_token, token_credential, token_paths
from machd.cli.ctl_client import AdminAddress, AdminClient
from machd.errors import NoDaemonError, SettingsError
from machd.settings.sources import LoadedSettings, OriginKind, SettingsSources, process_environ

_KEY = "machd.ctl."
_SERVICE_SOCKET = Path("/run/machd/admin.sock")
_WITHOUT_SETTINGS = "--address and --token-file do without the settings"

Args = ParamSpec("Args")
Result = TypeVar("Result")


def target_options(command: Callable[Args, Result]) -> Callable[Args, Result]:
    """Add the options that say which daemon is meant."""
    option = partial(click.option, callback=_keep, expose_value=False)
    path = click.Path(path_type=Path)
    for add in (
        option("--config", type=path, help="Settings file, as for serve."),
        option(
            "--token-file",
            type=path,
            help="File with the admin token; by default where the daemon has it.",
        ),
        option(
            "--address",
            metavar="HOST:PORT|unix:PATH",
            help="Where the daemon answers operators; by default what admin.listen says, else the "
            "socket of the user's or the machine's service.",
        ),
    ):
        command = add(command)
    return command


def admin_client() -> AdminClient:
    """A client of the daemon that is meant.

    Raises:
        SettingsError: The settings, which say where it is, are wrong.
        NoDaemonError: They say that there is none, or its token is nowhere to be found; where
            several places were tried, with a line for each.
    """
    target = _Target.asked()
    if not target.addresses:
        raise NoDaemonError("admin.listen is off, so no daemon answers operators")
    if len(target.addresses) == 1:
        return target.client(target.addresses[0])
    refusals: list[str] = []
    for address in target.addresses:
        try:
            client = target.client(address)
            client.knock()
        except NoDaemonError as error:
            refusals.append(error.message)
        else:
            return client
    raise NoDaemonError("\n".join(refusals))


def listening_clients() -> Iterator[AdminClient]:
    """Yield a client of every daemon that may be meant; none where nothing listens or admin.listen is off.

    Raises:
        SettingsError: The settings, which say where they are, are wrong.
        NoDaemonError: Something listens, and its token is nowhere to be found.
    """
    target = _Target.asked()
    for address in target.addresses:
        if AdminClient(address, None).is_there():
            yield target.client(address)


@dataclass(frozen=True, slots=True)
class _Target:
    """The daemon that is meant, by the options and the settings.

    Attributes:
        addresses: Where it may listen, the likeliest first; none where admin.listen is off.
        token_file: The one of the options.
        loaded: None where the options do without the settings.
    """

    addresses: tuple[AdminAddress, ...]
    token_file: Path | None
    loaded: LoadedSettings | None

    @classmethod
    def asked(cls) -> _Target:
        """Read the options of the command that runs, and the settings where they are needed."""
        meta = click.get_current_context().meta
        given_address: str | None = meta.get(f"{_KEY}address")
        token_file: Path | None = meta.get(f"{_KEY}token_file")
        config_path: Path | None = meta.get(f"{_KEY}config")
        loaded = None
        if given_address is None or token_file is None:
            loaded = _loaded(config_path, is_needed=given_address is None)
        address = _address(given_address, loaded)
        if address is None:
            return cls((), token_file, loaded)
        sockets: list[AdminAddress] = []
        # Whoever names the settings of one daemon does not mean another.
        is_named = given_address is not None or config_path is not None
        if not is_named and loaded is not None and _is_default(loaded):
            sockets = list(_service_sockets(process_environ()))
        return cls((address, *sockets), token_file, loaded)

    def client(self, address: AdminAddress) -> AdminClient:
        """Return a client with the token for an address; NoDaemonError if there is none."""
        return AdminClient(address, _token(address, self.token_file, self.loaded))


def _keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        ctx.meta[f"{_KEY}{param.name}"] = value


def _loaded(config_path: Path | None, *, is_needed: bool) -> LoadedSettings | None:
    try:
        return SettingsSources(config_path, process_environ(), {}).load()
    except SettingsError as error:
        if is_needed:
            raise SettingsError([*error.problems, _WITHOUT_SETTINGS]) from None
        return None


def _is_default(loaded: LoadedSettings) -> bool:
    return loaded.origins["admin.listen"].kind is OriginKind.DEFAULT


def _service_sockets(environ: Mapping[str, str]) -> Iterator[AdminAddress]:
    """Sockets that the shipped units open, the user's before the machine's; those that are there."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    of_user = [runtime / "machd" / _SERVICE_SOCKET.name] if runtime.is_absolute() else []
    for path in (*of_user, _SERVICE_SOCKET):
        try:
            is_there = path.is_socket()
        except PermissionError:
            is_there = True  # connecting says what is not permitted
        if is_there:
            yield AdminAddress(path=str(path))


def _address(given: str | None, loaded: LoadedSettings | None) -> AdminAddress | None:
    """The address, None where ``admin.listen`` is off; NoDaemonError where the settings do not tell it."""
    if given is None:
        assert loaded is not None, "they were needed"
        given = loaded.settings.admin.listen
        if given == "off":
            return None
    try:
        address = AdminAddress.of(given)
    except ValueError as error:
        raise click.UsageError(f"--address: {error}") from None
    if address.path is None and address.port == 0:
        raise NoDaemonError(
            "admin.listen has port 0, which takes any free one; give --address with the port that "
            "the daemon has logged"
        )
    return address


def _token(address: AdminAddress, given: Path | None, loaded: LoadedSettings | None) -> str | None:
    """The token, looked for where the daemon does; None where a socket needs none.

    Raises:
        NoDaemonError: It cannot be read, or there is none.
    """
    environ = process_environ()
    try:
        if given is not None:
            return read_token(given, key="--token-file")
        if loaded is not None and loaded.settings.auth.admin_token_file is not None:
            return read_token(Path(loaded.settings.auth.admin_token_file))
        credential = token_credential(environ)
        if credential is not None:
            return read_token(credential)
        if address.path is not None:
            return None
        for path in token_paths(environ, address.host, address.port):
            if path.is_file():
                return read_token(path, key="admin token")
    except (SettingsError, OSError) as error:
        raise NoDaemonError(f"{error}") from None
    # A token is worth a word only where somebody would look at it.
    AdminClient(address, None).knock()
    raise NoDaemonError(
        f"something answers at {address}, but no daemon of this user has left a token for it; give "
        "--token-file, or another --address"
    )
