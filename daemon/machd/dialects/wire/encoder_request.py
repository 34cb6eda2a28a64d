"""Fields that requests for embeddings, scores and classes have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.wire import bounds
from machd.dialects.wire.idle_time import read_ttl
from machd.dialects.wire.other_servers import TrueOnly
from machd.dialects.wire.refusal import Ignored, Refused, only, refuse_unsupported
from machd.errors import InvalidRequestError, UnsupportedParameterError

Truncate: TypeAlias = bool | Literal["NONE", "END", "START"]
"""Whether a text that is too long loses its end: as TEI and Ollama, or as Cohere and NVIDIA spell it."""

InputText: TypeAlias = bounds.ContentText
InputTexts: TypeAlias = Annotated[list[InputText], Meta(min_length=1, max_length=bounds.MAX_INPUTS)]

_RightOnly: TypeAlias = Annotated[Raw | UnsetType, only("right", "Right")]


class EncoderRequest(Struct, frozen=True, kw_only=True):
    """Fields of every request to an encoder.

    Attributes:
        model: The default model when left out.
        truncate: Whether a text that is too long for the model loses its end; ``limits.long_input_policy`` unless given.
        truncate_prompt_tokens: vLLM's: -1 for as many as the model takes.
        ttl: As of a generation.
    """

    model: bounds.ModelName | None = None
    truncate: Truncate | None = None
    truncate_prompt_tokens: bounds.TruncatedTokens | None = None
    user: bounds.UnusedLabel | None = None

    truncation_direction: _RightOnly = UNSET
    truncation_side: _RightOnly = UNSET
    add_special_tokens: TrueOnly = UNSET
    messages: Refused = UNSET
    padding: Refused = UNSET

    cache_salt: Ignored = UNSET
    keep_alive: Ignored = UNSET
    mm_processor_kwargs: Ignored = UNSET
    priority: Ignored = UNSET
    request_id: Ignored = UNSET
    ttl: Ignored = UNSET

    def checked(self) -> Self:
        """Return the request, once nothing is wrong with it by itself.

        Raises:
            InvalidRequestError: A field is out of range, or contradicts another one.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self)
        if self.truncate == "START":
            raise UnsupportedParameterError.at(
                "truncate", 'texts lose their ends only; send "END" or "NONE"'
            )
        if self.truncate_prompt_tokens not in (None, -1):
            raise UnsupportedParameterError.at(
                "truncate_prompt_tokens",
                "texts are cut to what the model takes only; send -1, or truncate",
            )
        if self.truncate in (False, "NONE") and self.truncate_prompt_tokens == -1:
            raise InvalidRequestError.at("truncate", "contradicts truncate_prompt_tokens")
        return self

    @property
    def idle_s(self) -> float | None:
        """Idle seconds after which the model is to be unloaded; None where the request does not say."""
        return read_ttl(self.ttl)

    def truncates(self, *, default: bool) -> bool:
        """Whether a text that is too long loses its end."""
        if self.truncate_prompt_tokens is not None:
            return True
        return default if self.truncate is None else self.truncate in (True, "END")
