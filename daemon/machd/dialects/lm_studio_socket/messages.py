"""Messages of LM Studio's protocol, and the parameters in them.

Shapes are of LM Studio's own client, github.com/lmstudio-ai/lmstudio-js: ``lms-communication/src/Transport.ts``, and
``lms-external-backend-interfaces``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from machd.dialects.wire import bounds

Id = Annotated[int, Meta(ge=0, le=2**53)]
"""Number of a call, a channel or a subscription, which the client chooses."""

_NULL = Raw(b"null")

_Name = Annotated[str, Meta(min_length=1, max_length=256, pattern="[^/]")]
"""A model's name, which is asked for as the end of a path: no slashes alone."""


class Authentication(Struct, frozen=True, rename="camel"):
    """The first message of a socket. Clients that have no key make both up."""

    auth_version: Literal[1]
    client_identifier: bounds.Label
    client_passkey: bounds.Label


class KeepAlive(Struct, frozen=True, tag="keepAlive"):
    """Asks for ``keepAliveAck``."""


class CommunicationWarning(Struct, frozen=True, tag="communicationWarning"):
    """Says that the client did not understand a message."""


class RpcCall(Struct, frozen=True, rename="camel", tag="rpcCall"):
    """A question with one answer."""

    endpoint: bounds.Label
    call_id: Id
    parameter: Raw = _NULL


class ChannelCreate(Struct, frozen=True, rename="camel", tag="channelCreate"):
    """A question with an answer of many messages."""

    endpoint: bounds.Label
    channel_id: Id
    creation_parameter: Raw = _NULL


class ChannelPacket(Struct, frozen=True):
    """What a client says in a channel; all that is known is ``cancel``."""

    type: bounds.Label


class ChannelSend(Struct, frozen=True, rename="camel", tag="channelSend"):
    """A message in a channel; with ``ack_id`` its receipt is to be told."""

    channel_id: Id
    message: ChannelPacket
    ack_id: Id | None = None


class ChannelAck(Struct, frozen=True, tag="channelAck"):
    """Tells a receipt, which is never asked for."""


class SignalSubscribe(Struct, frozen=True, rename="camel", tag="signalSubscribe"):
    """A wish to hear of a value and its changes."""

    subscribe_id: Id


class WritableSignalSubscribe(Struct, frozen=True, rename="camel", tag="writableSignalSubscribe"):
    """A wish to hear of a value and to change it."""

    subscribe_id: Id


ClientMessage: TypeAlias = (
    KeepAlive
    | CommunicationWarning
    | RpcCall
    | ChannelCreate
    | ChannelSend
    | ChannelAck
    | SignalSubscribe
    | WritableSignalSubscribe
)
"""A message from a client."""


class ModelQuery(Struct, frozen=True):
    """Which model is meant: any, where it has neither an identifier nor a path."""

    identifier: _Name | None = None
    path: _Name | None = None


class ModelSpecifier(Struct, frozen=True, rename="camel"):
    """Which loaded model is meant."""

    type: Literal["query", "instanceReference"]
    query: ModelQuery = ModelQuery()
    instance_reference: _Name | None = None

    @property
    def name(self) -> str | None:
        """The model's name; None for any."""
        return self.instance_reference or self.query.identifier or self.query.path


class SpecifiedModel(Struct, frozen=True, rename="camel"):
    """Parameter of calls about a model."""

    specifier: ModelSpecifier
    throw_if_not_found: bool = True


class TextOfModel(Struct, frozen=True, rename="camel"):
    """Parameter of ``tokenize`` and ``countTokens``."""

    specifier: ModelSpecifier
    input_string: bounds.ContentText


class EmbeddedText(Struct, frozen=True, rename="camel"):
    """Parameter of ``embedString``."""

    model_specifier: ModelSpecifier
    input_string: bounds.ContentText


class UnloadedModel(Struct, frozen=True):
    """Parameter of ``unloadModel``."""

    identifier: _Name


class LoadedModel(Struct, frozen=True, rename="camel"):
    """Parameter of ``loadModel``. How a model is loaded, and for how long, is set in its table alone."""

    model_key: _Name


class WantedModel(Struct, frozen=True):
    """Parameter of ``getOrLoad``, with the same restriction."""

    identifier: _Name


class ConfigField(Struct, frozen=True):
    """A setting by its dotted key."""

    key: bounds.Label
    value: Raw = _NULL


class Config(Struct, frozen=True):
    """Settings."""

    fields: list[ConfigField]


class ConfigLayer(Struct, frozen=True, rename="camel"):
    """Settings from one source."""

    layer_name: bounds.Label
    config: Config


class ConfigStack(Struct, frozen=True):
    """Settings of which later layers override earlier ones."""

    layers: list[ConfigLayer] = []

    @property
    def fields(self) -> dict[str, Raw]:
        """The values by their keys."""
        return {field.key: field.value for layer in self.layers for field in layer.config.fields}

    @property
    def is_text_completion(self) -> bool:
        """Whether a text is to be continued, and no conversation: the client sends a template for that."""
        return any(layer.layer_name == "completeModeFormatting" for layer in self.layers)


class TextPart(Struct, frozen=True, tag="text"):
    """Text."""

    text: bounds.ContentText


class FilePart(Struct, frozen=True, tag="file"):
    """A file that was uploaded, which is not served."""


class RequestedCall(Struct, frozen=True):
    """A call of a tool that the model asked for; ``arguments`` is an object."""

    name: str
    id: str | None = None
    arguments: Raw = Raw(b"{}")


class CallPart(Struct, frozen=True, rename="camel", tag="toolCallRequest"):
    """A call in an assistant's message."""

    tool_call_request: RequestedCall


class CallResultPart(Struct, frozen=True, rename="camel", tag="toolCallResult"):
    """What a tool has answered."""

    content: bounds.ContentText
    tool_call_id: str | None = None


class HistoryMessage(Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: list[TextPart | FilePart | CallPart | CallResultPart]


class History(Struct, frozen=True):
    """A conversation."""

    messages: list[HistoryMessage]


class AnyPrediction(Struct, frozen=True, kw_only=True, rename="camel"):
    """What every prediction has; a preset is a file of LM Studio's, and refused."""

    model_specifier: ModelSpecifier
    prediction_config_stack: ConfigStack = ConfigStack()
    fuzzy_preset_identifier: str | None = None


class PredictionParameter(AnyPrediction, frozen=True, kw_only=True, rename="camel"):
    """Parameter of ``predict``."""

    history: History


class RawTextParameter(AnyPrediction, frozen=True, kw_only=True, rename="camel"):
    """Parameter of ``completeRawText``."""

    raw_prompt: bounds.ContentText


class TemplateOptions(Struct, frozen=True, rename="camel"):
    """Options of ``applyPromptTemplate``; others are of tokens that a template writes itself."""

    tool_definitions: Raw = Raw(b"[]")


class TemplateParameter(Struct, frozen=True, rename="camel"):
    """Parameter of ``applyPromptTemplate``."""

    specifier: ModelSpecifier
    history: History
    opts: TemplateOptions = TemplateOptions()
