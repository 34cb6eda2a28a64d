"""The listeners of a daemon, and their credentials."""

from __future__ import annotations

from collections.abc import Mapping

from machd.admin.token import AdminToken
from machd.errors import ListenError, SettingsError
from machd.http.authentication import ApiKeys
from machd.http.sockets import Listener, listen, listen_admin
from machd.settings.model import Settings


class Entrance:
    """A public listener, and perhaps one for the admin API.

    Attributes:
        public: The clients' listener.
        admin: The admin API's listener; None without one.
        admin_token: What operators have to show; None where there is no listener for them.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """Bind the addresses and read the keys; clients can connect once this returns.

        Raises:
            ListenError: An address is taken, or is public while no API key is required.
            SettingsError: A file of keys or tokens is wrong.
        """
        self._environ = environ
        self._has_credential = False
        self._read_at_start: tuple[Settings, ApiKeys] | None = None
        self.admin: Listener | None = None
        self.admin_token: AdminToken | None = None
        self.public = listen(settings.server.host, settings.server.port, environ=environ)
        try:
            self._read_at_start = (settings, self.admit(settings))
            self.public.open()
            self.admin = listen_admin(settings.admin.listen, environ=environ)
            if self.admin is not None:
                self.admin.open()
                # Only now: of two daemons that start together, one gets as far as this.
                self.admin_token = AdminToken.of(settings, environ, self.admin)
        except BaseException:
            self.close()
            raise

    def admit(self, settings: Settings) -> ApiKeys:
        """Return the API keys under these settings.

        Raises:
            ListenError: Other machines can reach the daemon, and no key is required.
            SettingsError: The key file is wrong, or the service manager's keys have gone away.
        """
        read, self._read_at_start = self._read_at_start, None
        if read is not None and read[0] is settings:
            return read[1]
        api_keys = ApiKeys.of(settings, self._environ)
        self._refuse_if_lost(settings, api_keys)
        if self.public.is_exposed and not api_keys.is_required:
            raise ListenError(
                f"{self.public.url} can be reached from other machines; set "
                "auth.api_keys_file first, or listen on 127.0.0.1"
            )
        return api_keys

    def holds_admin_token(self, authorization: str | None) -> bool:
        """Return True if a header holds the admin token, where there is one."""
        return self.admin_token is not None and self.admin_token.is_in(authorization)

    def withdraw_token(self) -> None:
        """Remove the file of the token that was made here; call it while the listener is open.

        The next process at the address leaves a token of the same name.
        """
        if self.admin_token is not None:
            self.admin_token.close()

    def close(self) -> None:
        """Give the addresses back, and take away the token that was made for one of them."""
        self.withdraw_token()
        for listener in (self.public, self.admin):
            if listener is not None:
                listener.close()

    def _refuse_if_lost(self, settings: Settings, api_keys: ApiKeys) -> None:
        """Refuse to open up because the keys' file is not there any more: no setting asks for that.

        Raises:
            SettingsError: The service manager's keys were there once.
        """
        if settings.auth.api_keys_file is not None:
            return
        if self._has_credential and not api_keys.is_required:
            problem = (
                "the service manager's credential with the keys has gone away; bring it back or "
                "set a file, or restart to do without keys"
            )
            raise SettingsError([f"auth.api_keys_file: {problem}"])
        self._has_credential = api_keys.is_required
