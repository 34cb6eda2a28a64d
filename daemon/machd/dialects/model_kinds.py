"""Which kind of model an endpoint takes, and what a request for another kind is told."""

from __future__ import annotations

from machd.engine.protocol.encoder import EncoderDescription, EncoderTask
from machd.engine.protocol.engine import ModelDescription
from machd.errors import UnsupportedParameterError

_WHERE_TO_ASK = {
    EncoderTask.EMBED: 'embeddings are made by models that /v1/models lists with the kind "embed"',
    EncoderTask.CLASSIFY: "scores and classes are made by classifiers and rerankers, whose capabilities /v1/models lists",
}
_MAKES = {
    None: "generates text",
    EncoderTask.EMBED: "makes embeddings",
    EncoderTask.CLASSIFY: "classifies texts",
}


def require(model: ModelDescription, task: EncoderTask) -> EncoderDescription:
    """Return what a model makes of texts, once it is made for a task.

    Raises:
        UnsupportedParameterError: It is made for another one; the message says which models to ask.
    """
    encoder = model.encoder
    if encoder is None or encoder.task is not task:
        makes = _MAKES[None if encoder is None else encoder.task]
        raise UnsupportedParameterError.at("model", f"this model {makes}; {_WHERE_TO_ASK[task]}")
    return encoder


def require_generating(model: ModelDescription) -> None:
    """Raise UnsupportedParameterError for a model that generates no text."""
    if model.encoder is not None:
        raise UnsupportedParameterError.at(
            "model",
            f"this model {_MAKES[model.encoder.task]} and generates none; ask a model that /v1/models lists without a kind",
        )
