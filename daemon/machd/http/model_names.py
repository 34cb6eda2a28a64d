"""The names under which requests may ask for models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from machd.errors import InvalidRequestError, ModelNotServedError
from machd.settings.models import DEFAULT_NAME, OLLAMA_TAG, name_essence
from machd.settings.texts import MAX_MODEL_NAME_CHARS, looks_like_path


class ModelNames:
    """Says which model a request asks for.

    Attributes:
        aliases: Other names of the default model, as the settings have them.
        others: Names and aliases of the other models, each with the model's name.
    """

    def __init__(
        self,
        aliases: Iterable[str] = (),
        *,
        accepts_any: bool = False,
        others: Mapping[str, str] | None = None,
    ) -> None:
        """Take over the settings.

        Args:
            aliases: ``models.aliases``.
            accepts_any: Whether every name that looks like one means the default model.
            others: Names and aliases of the other models, each with the model's name.
        """
        self.aliases = tuple(dict.fromkeys(aliases))
        self.others = dict(others or {})
        self._aliases = frozenset(name_essence(one) for one in (*aliases, DEFAULT_NAME))
        counts = Counter(name_essence(one) for one in self.others)
        self._essences = {
            essence: name
            for alias, name in self.others.items()
            if counts[essence := name_essence(alias)] == 1
        }
        self._accepts_any = accepts_any

    def find(self, asked: str | None, default: str) -> str:
        """Return the name of the model that a request asks for; ``default`` stands for the default model.

        Case, an organisation before a slash and Ollama's ``:latest`` do not matter where they tell no models apart.

        Args:
            asked: The name in the request; None or empty where it names none.
            default: Id of the default model.

        Raises:
            ModelNotServedError: It names another model; the message names those that are served.
            InvalidRequestError: It names none, and this server does not take any name.
        """
        if not asked:
            if not self._accepts_any:
                raise InvalidRequestError.at("model", "required, but missing")
            return DEFAULT_NAME
        name = self.named(asked, default)
        if name is None and self._accepts_any and is_name(asked):
            return DEFAULT_NAME
        if name is None:
            raise self.refusal(default)
        return name

    def named(self, asked: str, default: str) -> str | None:
        """Return the model that has a name, whatever else is accepted; None where none has it. See :meth:`find`."""
        return self._named(asked, default) if is_name(asked) else None

    def refusal(self, default: str) -> ModelNotServedError:
        """Say that no model has the name that a request asks for, and which names there are."""
        return ModelNotServedError(_refusal(default, set(self.others.values())), param="model")

    def _named(self, asked: str, default: str) -> str | None:
        """Return the name of the model that has a name; None where none has it."""
        if asked == default:
            return DEFAULT_NAME
        for name in (asked, asked.removesuffix(OLLAMA_TAG)):
            if name in self.others:
                return self.others[name]
        essence = name_essence(asked)
        if essence in {name_essence(default), *self._aliases}:
            return DEFAULT_NAME
        return self._essences.get(essence)


_MAX_NAMES = 8
"""Of models in a refusal."""


def _refusal(default: str, others: Iterable[str]) -> str:
    if not others:
        return (
            f"this server serves {default!r} and no other model; ask for that one, or add the name "
            "to models.aliases"
        )
    names = sorted({default, *others})
    shown = ", ".join(map(repr, names[:_MAX_NAMES]))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"this server serves {shown}{more}; /v1/models lists them. Ask for one of them"


def is_name(text: str) -> bool:
    """Return True if a text could be a model's name: a path, a URL or control characters are a mistake."""
    return (
        len(text) <= MAX_MODEL_NAME_CHARS
        and text.isprintable()
        and not text.startswith(" ")
        and not looks_like_path(text)
    )
