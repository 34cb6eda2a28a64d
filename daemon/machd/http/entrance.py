"""The addresses of a daemon, and who is let in at each."""

from __future__ import annotations

from collections.abc import Mapping

from machd.errors import ListenError, MachdError
from machd.http.admin.token import AdminToken
from machd.http.authentication import ApiKeys
from machd.http.sockets import Listener, listen, listen_admin
from machd.settings.model import Settings

__all__ = ["Entrance"]


class Entrance:
    """A public listener, and one for operators where there is one.

    Attributes:
        public: Where clients come.
        admin: Where operators come; None where nobody is answered.
        admin_token: What operators have to show; None where there is no listener for them.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """Bind the addresses and read the keys; clients can connect once this returns.

        Raises:
            ListenError: An address is taken, or is public while no API key is required.
            SettingsError: A file of keys or tokens is wrong.
        """
        self._environ = environ
        self.admin: Listener | None = None
        self.admin_token: AdminToken | None = None
        self.public = listen(settings.server.host, settings.server.port, environ=environ)
        try:
            self.admit(settings)
            self.admin = listen_admin(settings.admin.listen, environ=environ)
            if self.admin is not None:
                self.admin_token = AdminToken.of(settings, environ, self.admin)
        except MachdError:
            self.close()
            raise
        for listener in self._listeners:
            listener.open()

    def admit(self, settings: Settings) -> ApiKeys:
        """Who may ask under these settings.

        Raises:
            ListenError: Other machines can reach the daemon, and it asks nobody for a key.
            SettingsError: The key file is wrong.
        """
        api_keys = ApiKeys.of(settings, self._environ)
        if self.public.is_exposed and not api_keys.is_required:
            raise ListenError(
                f"{self.public.url} can be reached from other machines; set "
                "auth.api_keys_file first, or listen on 127.0.0.1"
            )
        return api_keys

    def close(self) -> None:
        """Give the addresses back, and take away the token that was made for one of them."""
        # First the token: who gets the address next leaves one of the same name.
        if self.admin_token is not None:
            self.admin_token.close()
        for listener in self._listeners:
            listener.close()

    @property
    def _listeners(self) -> tuple[Listener, ...]:
        return tuple(one for one in (self.public, self.admin) if one is not None)
