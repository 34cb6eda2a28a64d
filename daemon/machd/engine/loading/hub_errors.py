"""Errors of the hub and of the network, by name and with what to do."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from machd.engine.loading.hub_cache import hub_cache, hub_endpoint, without_passwords
from machd.errors import ModelDownloadError, ModelNotFoundError

_LOGIN = "give a token that may read it (HF_TOKEN, or `hf auth login`)"


def hide_passwords() -> None:
    """Have the library's own warnings tell addresses without what HF_ENDPOINT has of a user."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_hide)


def _hide(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_passwords(record.getMessage()), ()
    return True


@contextmanager
def named_hub_errors(model: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub and of the network into ours.

    Raises:
        ModelNotFoundError, ModelDownloadError: Instead of them.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError  # noqa: PLC0415

    try:
        yield
    except (ModelDownloadError, ModelNotFoundError):
        raise
    except HFValidationError as error:
        raise ModelNotFoundError(f"{model} is no name of a model on the hub") from error
    except (HTTPError, OSError, EOFError) as error:
        raise _named(model, revision, error) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise no_hub("is no JSON") from error


def no_hub(answer: str) -> ModelDownloadError:
    """Return the error for an answer that no hub gives."""
    return ModelDownloadError(
        f"what answers at {hub_endpoint()} (HF_ENDPOINT) is no hub: its answer {answer}"
    )


def _named(model: str, revision: str, error: Exception) -> ModelDownloadError | ModelNotFoundError:
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case GatedRepoError():
            return ModelDownloadError(
                f"{model} is gated: accept its terms on the hub, and {_LOGIN}"
            )
        case RepositoryNotFoundError():
            return ModelNotFoundError(f"the hub has no model {model}, or it is private: {_LOGIN}")
        case RevisionNotFoundError():
            return ModelNotFoundError(f"{model} has no revision {revision}")
        case HfHubHTTPError():
            return _refusal(model, error.response.status_code)
        case OfflineModeIsEnabled():
            return ModelDownloadError("HF_HUB_OFFLINE is set, so nothing is fetched; unset it")
        case OSError(errno=int(number)) if not isinstance(error, ConnectionError):
            return ModelDownloadError(f"cannot write {hub_cache()}: {os.strerror(number)}")
        case _:
            reason = str(error.__cause__ or error).splitlines() or [type(error).__name__]
            return ModelDownloadError(
                f"cannot reach the hub at {hub_endpoint()} (HF_ENDPOINT): {without_passwords(reason[0])}; check the "
                "network and the proxy settings"
            )


def _refusal(model: str, status: int) -> ModelDownloadError | ModelNotFoundError:
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return ModelDownloadError(f"the hub does not know the token: {_LOGIN}")
        case HTTPStatus.FORBIDDEN:
            return ModelDownloadError(f"the token may not read {model}: {_LOGIN}")
        case HTTPStatus.NOT_FOUND:
            return ModelNotFoundError(f"the hub has no such file of {model}")
        case _:
            return ModelDownloadError(
                f"the hub at {hub_endpoint()} (HF_ENDPOINT) answers {status} for {model}; try again later"
            )
