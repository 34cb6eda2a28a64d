"""Another server of the OpenAI API on this machine, as ``--against`` names it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import urldefrag, urlsplit

from machd_bench.connection import Address

_NAMED = re.compile(r"(?P<name>[\w.-]+)=(?P<url>https?://.*)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to take turns with.

    Attributes:
        name: As tables show it.
        model_id: Which of its models; None takes its first one.
    """

    name: str
    url: str
    model_id: str | None

    @classmethod
    def of(cls, text: str) -> Self:
        """Read ``[NAME=]URL[#MODEL]``; without a name it is the URL's host and port.

        Raises:
            ValueError: There is no http or https URL.
        """
        named = _NAMED.fullmatch(text)
        url, model_id = urldefrag(named["url"] if named else text)
        Address.of(url)
        return cls(named["name"] if named else urlsplit(url).netloc, url, model_id or None)
