"""The names under which requests may ask for the served model."""

from __future__ import annotations

from collections.abc import Iterable

from machd.errors import InvalidRequestError, ModelNotServedError

_DEFAULT_NAME = "default"
_OLLAMA_TAG = ":latest"

_MAX_CHARACTERS = 256
"""Of a name in a path; one in a body is held to it before."""

_PATH_OPENINGS = ("/", "~", ".", " ")
_PATH_PARTS = ("://", "..", "//", "\\")
_MAX_SLASHES = 2
"""Hub ids have one slash, and routers put the provider's name and another one before them."""


class ModelNames:
    """Says whether a request asks for the served model.

    Attributes:
        aliases: Its other names, as the settings have them.
    """

    def __init__(self, aliases: Iterable[str] = (), *, accepts_any: bool = False) -> None:
        """Take over the settings; with ``accepts_any`` every well-formed name means the served model."""
        self.aliases = tuple(dict.fromkeys(aliases))
        self._aliases = frozenset(_essence(one) for one in (*aliases, _DEFAULT_NAME))
        self._accepts_any = accepts_any

    def check(self, asked: str | None, served: str) -> None:
        """Refuse a request for another model; ``asked`` is None or empty where it names none.

        Case, an organisation before a slash and Ollama's ``:latest`` do not matter.

        Raises:
            ModelNotServedError: It names another model; the message names the served one.
            InvalidRequestError: It names none, and this server does not take any name.
        """
        if not asked:
            if not self._accepts_any:
                raise InvalidRequestError.at("model", "required, but missing")
            return
        is_known = asked == served or _essence(asked) in {_essence(served), *self._aliases}
        if not _is_name(asked) or not (is_known or self._accepts_any):
            raise ModelNotServedError(
                f"this server serves {served!r} and no other model; ask for that one, or add the name "
                "to models.aliases",
                param="model",
            )


def _is_name(text: str) -> bool:
    """Return True if a text could be a model's name: a path, a URL or control characters are a mistake."""
    return (
        len(text) <= _MAX_CHARACTERS
        and text.isprintable()
        and not text.startswith(_PATH_OPENINGS)
        and not any(part in text for part in _PATH_PARTS)
        and text.count("/") <= _MAX_SLASHES
    )


def _essence(name: str) -> str:
    """A name without its case, its organisation and Ollama's tag."""
    return name.rpartition("/")[2].casefold().removesuffix(_OLLAMA_TAG)
