"""The application that answers new requests: replaced whole when the settings change.

A request that is being answered keeps the application, and so the settings, that it began with.
"""

from __future__ import annotations

from litestar.types import ASGIApp, Receive, Scope, Send


class AppSwitch:
    """Hands each request to the application of the moment."""

    def __init__(self, app: ASGIApp) -> None:
        """Begin with ``app``."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what is there now."""
        await self.app(scope, receive, send)
