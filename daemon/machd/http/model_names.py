"""The names under which requests may ask for the served model."""

from __future__ import annotations

from collections.abc import Iterable

from machd.errors import InvalidRequestError, ModelNotServedError
from machd.settings.models import DEFAULT_NAME, name_essence
from machd.settings.texts import MAX_MODEL_NAME_CHARS, looks_like_path


class ModelNames:
    """Says whether a request asks for the served model.

    Attributes:
        aliases: Its other names, as the settings have them.
    """

    def __init__(self, aliases: Iterable[str] = (), *, accepts_any: bool = False) -> None:
        """Take over the settings.

        Args:
            aliases: ``models.aliases``.
            accepts_any: Whether every name that looks like one means the served model.
        """
        self.aliases = tuple(dict.fromkeys(aliases))
        self._aliases = frozenset(name_essence(one) for one in (*aliases, DEFAULT_NAME))
        self._accepts_any = accepts_any

    def check(self, asked: str | None, served: str) -> None:
        """Refuse a request for another model.

        Case, an organisation before a slash and Ollama's ``:latest`` do not matter.

        Args:
            asked: The name in the request; None or empty where it names none.
            served: Id of the served model.

        Raises:
            ModelNotServedError: It names another model; the message names the served one.
            InvalidRequestError: It names none, and this server does not take any name.
        """
        if not asked:
            if not self._accepts_any:
                raise InvalidRequestError("model: required, but missing", param="model")
            return
        is_known = asked == served or name_essence(asked) in {name_essence(served), *self._aliases}
        if not _is_name(asked) or not (is_known or self._accepts_any):
            raise ModelNotServedError(
                f"this server serves {served!r} and no other model; ask for that one, or add the name "
                "to models.aliases",
                param="model",
            )


def _is_name(text: str) -> bool:
    """Return True if a text could be a model's name: a path, a URL or control characters are a mistake."""
    return (
        len(text) <= MAX_MODEL_NAME_CHARS
        and text.isprintable()
        and not text.startswith(" ")
        and not looks_like_path(text)
    )
