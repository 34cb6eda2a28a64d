"""The one tree of operating errors.

Operating errors are expected: bad settings, a missing model, a full queue, a client that
leaves. Programmer errors are assertions and never appear here.

Every class has a stable ``code`` that clients, dashboards and scripts may depend on. A class
that can answer an HTTP request names its ``http_status`` and OpenAI ``error_type``; a class that
can end a command names its ``exit_code``. Nothing in machd decides by the text of a message.
What an instance holds is annotated in its class, so that it can be sent to another process.

::

    MachdError
    + SettingsError                   bad settings, every problem at once        exit 2
    + StartupError                    the daemon cannot start                    exit 2
      - ListenError                   the address cannot be listened on
      - ModelError                    the model cannot be served
        . ModelNotFoundError          no such file, directory or hub id
        . ModelDownloadError          a fetch failed or its hash is wrong
        . ModelFormatError            corrupt, truncated or unsupported weights
        . ModelArchitectureError      mlx-lm does not know the architecture
        . ModelCodeError              the checkpoint wants to run its own code
        . ModelMemoryError            the weights do not fit
        . ModelShardingError          so many ranks cannot compute it together
        . ChatTemplateMissingError    no chat template for messages              exit 2, 400
    + RequestError                    the client's request is wrong              4xx
      - InvalidRequestError           400
        . UnsupportedParameterError
        . ContextLengthExceededError
        . KvBudgetExceededError
        . GrammarError                schema, pattern or grammar that cannot be used
        . TemplateLimitError          the model's chat template takes too much
      - AuthenticationError           401
      - ForbiddenOriginError          403
      - OperatorRequiredError         403
      - NotFoundError                 404
        . ModelNotServedError
      - MethodNotAllowedError         405
      - BodyTimeoutError              408
      - ConflictError                 409
        . RestartRequiredError        settings that only a restart takes on
        . ModeUnavailableError        the model cannot be decoded that way
      - SettingsChangedError          412
      - BodyTooLargeError             413
      - UnsupportedMediaTypeError     415
      - MisdirectedRequestError       421
    + UnavailableError                right request, wrong moment                429, 503
      - QueueFullError                429
      - KvBudgetSpentError            429
      - KeyLimitError                 429
      - TooManyInFlightError          503
      - QueueTimeoutError             503
      - NotReadyError                 503
      - ModelNotLoadedError           503, one of several models
      - AdapterError                  503
      - DrainingError                 503
      - OverloadedError               503, memory, threads or descriptors ran out
    + AbortError                      a generation ended early
      - ClientDisconnectedError       499
      - ClientStalledError            499
      - OperatorAbortError            503
      - RequestTimeoutError           504
      - DrainDeadlineError            503
    + NoDaemonError                   no answer at the admin address             exit 69
    + FaultError                      machd's own failure               exit 70, 5xx
      - RowFaultError                 500, one request
      - EngineFaultError              503, the engine
        . EngineEndedError            its process, while it loaded the model
"""

from __future__ import annotations

from typing import ClassVar, Self


class MachdError(Exception):
    """An expected failure, with a message that says what to do.

    A message never quotes what a user typed. One that can reach a client names no path either;
    those for the operator, under SettingsError and StartupError, name the file to look at.
    """

    code: ClassVar[str] = "machd_error"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1

    message: str
    param: str | None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keep what a person reads, and the request field it is about when there is one."""
        super().__init__(message)
        self.message = message
        self.param = param


class SettingsError(MachdError):
    """One or more settings are wrong; ``problems`` holds a line for each."""

    code = "invalid_settings"
    exit_code = 2

    problems: list[str]

    def __init__(self, problems: list[str]) -> None:
        """Join every problem, so that one run shows them all."""
        super().__init__("\n".join(problems))
        self.problems = problems


class StartupError(MachdError):
    """The daemon cannot start; the message says what to do."""

    code = "startup_failed"
    exit_code = 2


class ListenError(StartupError):
    """The address is taken, not ours, or refused by policy."""

    code = "cannot_listen"


class ModelError(StartupError):
    """The model cannot be served."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """There is no such file, directory or hub id."""

    code = "model_missing"


class ModelDownloadError(ModelError):
    """Fetching failed, or what came has the wrong hash."""

    code = "model_download_failed"


class ModelFormatError(ModelError):
    """The files are corrupt, truncated, or of a format machd does not read."""

    code = "model_format"


class ModelArchitectureError(ModelError):
    """The installed mlx-lm has no such architecture."""

    code = "model_architecture"


class ModelCodeError(ModelError):
    """The checkpoint wants to run code of its own, and that was not allowed."""

    code = "model_code"


class ModelMemoryError(ModelError):
    """The weights do not fit into memory."""

    code = "model_memory"


class ModelShardingError(ModelError):
    """The model cannot be computed by this many ranks."""

    code = "model_sharding"


class ChatTemplateMissingError(ModelError):
    """The model has no chat template, so messages cannot be rendered."""

    code = "chat_template_missing"
    http_status = 400
    error_type = "invalid_request_error"


class RequestError(MachdError):
    """The client's request is wrong; sending it again unchanged gives the same answer."""

    code = "request_error"
    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequestError(RequestError):
    """A field is malformed or out of range."""

    code = "invalid_request"

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """Make the error of one field, whose name begins the message."""
        return cls(f"{param}: {problem}", param=param)


class UnsupportedParameterError(InvalidRequestError):
    """A field that would change the answer and that machd does not support."""

    code = "unsupported_parameter"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and completion together do not fit into the context.

    Clients of all kinds look for the words in which OpenAI and Anthropic say so, and make room.
    """

    code = "context_length_exceeded"

    context_tokens: int
    prompt_tokens: int
    asked_tokens: int | None

    def __init__(
        self, *, context_tokens: int, prompt_tokens: int, asked_tokens: int | None, param: str
    ) -> None:
        """Keep the numbers; ``asked_tokens`` is None for a request that names none, and 0 where none are generated."""
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens
        self.asked_tokens = asked_tokens
        completion = f" and {asked_tokens} for the completion" if asked_tokens else ""
        needed_tokens = prompt_tokens + (1 if asked_tokens is None else asked_tokens)
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, this request "
            f"needs {needed_tokens} tokens ({prompt_tokens} in the "
            f"prompt{completion})",
            param=param,
        )


class KvBudgetExceededError(InvalidRequestError):
    """Prompt and completion together need more KV cache than the whole budget."""

    code = "kv_budget_exceeded"


class GrammarError(InvalidRequestError):
    """A schema, pattern or grammar that cannot be compiled, or became too complex on the way."""

    code = "invalid_grammar"


class TemplateLimitError(InvalidRequestError):
    """Rendering a conversation took more time, memory or text than a chat template may."""

    code = "template_limit"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401
    error_type = "authentication_error"


class ForbiddenOriginError(RequestError):
    """A browser page of an origin that is not allowed sent this."""

    code = "origin_not_allowed"
    http_status = 403
    error_type = "permission_error"


class OperatorRequiredError(RequestError):
    """Only an operator may have that done, and the request's key is no operator's."""

    code = "operator_required"
    http_status = 403
    error_type = "permission_error"


class NotFoundError(RequestError):
    """Nothing is served at that path."""

    code = "not_found"
    http_status = 404


class ModelNotServedError(NotFoundError):
    """The request names a model that this daemon does not serve."""

    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


class BodyTimeoutError(RequestError):
    """The body did not arrive within ``limits.client_stall_timeout_s``."""

    code = "body_timeout"
    http_status = 408


class ConflictError(RequestError):
    """The daemon is not in a state in which that can be done."""

    code = "conflict"
    http_status = 409


class RestartRequiredError(ConflictError):
    """Settings that differ can only be taken on by a restart; ``keys`` names them, dotted."""

    code = "restart_required"

    keys: tuple[str, ...]

    def __init__(self, keys: tuple[str, ...]) -> None:
        """Say which; nothing of the change was applied."""
        super().__init__(f"nothing was changed: {', '.join(keys)} can only be changed by a restart")
        self.keys = keys


class ModeUnavailableError(ConflictError):
    """The model cannot be decoded in the mode that was asked for; the message says why."""

    code = "mode_unavailable"


class SettingsChangedError(RequestError):
    """The settings are no longer those that If-Match names: another change came first."""

    code = "settings_changed"
    http_status = 412


class BodyTooLargeError(RequestError):
    """The body is longer than ``limits.max_body_bytes``."""

    code = "body_too_large"
    http_status = 413


class UnsupportedMediaTypeError(RequestError):
    """The body is not uncompressed ``application/json``."""

    code = "unsupported_media_type"
    http_status = 415


class MisdirectedRequestError(RequestError):
    """The Host header names a host that is not in ``http.allowed_hosts``."""

    code = "host_not_allowed"
    http_status = 421


class UnavailableError(MachdError):
    """The request is right; this moment is wrong. ``retry_after_s`` says when to come back."""

    code = "unavailable"
    http_status = 503
    error_type = "overloaded_error"

    retry_after_s: int

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        """Keep the whole seconds that the Retry-After header will carry."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(UnavailableError):
    """``limits.max_queue`` or ``limits.max_queue_tokens`` is reached."""

    code = "queue_full"
    http_status = 429
    error_type = "rate_limit_error"


class KvBudgetSpentError(UnavailableError):
    """The KV budget is promised to others and ``continuous_batching.kv_policy`` is ``reject``."""

    code = "kv_budget_spent"
    http_status = 429
    error_type = "rate_limit_error"


class KeyLimitError(UnavailableError):
    """An API key has reached one of its limits: requests in flight, or tokens in a minute."""

    code = "key_limit"
    http_status = 429
    error_type = "rate_limit_error"


class TooManyInFlightError(UnavailableError):
    """``limits.max_in_flight`` HTTP requests are open."""

    code = "too_many_in_flight"


class QueueTimeoutError(UnavailableError):
    """The request waited ``limits.queue_timeout_s`` without being admitted."""

    code = "queue_timeout"


class NotReadyError(UnavailableError):
    """The daemon is still loading its model."""

    code = "not_ready"


class ModelNotLoadedError(UnavailableError):
    """The model is one of several, and is not loaded: nobody may load it, it cannot be loaded, or has no room."""

    code = "model_not_loaded"


class AdapterError(UnavailableError):
    """An adapter cannot be used with its model: its files are damaged, or do not fit it."""

    code = "adapter_not_loaded"


class DrainingError(UnavailableError):
    """The daemon is finishing what it has and takes nothing new."""

    code = "draining"


class OverloadedError(UnavailableError):
    """The machine has no memory, thread or file descriptor left for this request."""

    code = "overloaded"


class AbortError(MachdError):
    """A generation ended before it was finished."""

    code = "aborted"


class ClientDisconnectedError(AbortError):
    """The client closed the connection before this answer."""

    code = "client_disconnected"
    http_status = 499


class ClientStalledError(AbortError):
    """The client read nothing for ``limits.client_stall_timeout_s``."""

    code = "client_stalled"
    http_status = 499


class OperatorAbortError(AbortError):
    """An operator ended the request over the admin API."""

    code = "operator_abort"
    http_status = 503


class RequestTimeoutError(AbortError):
    """The request ran longer than ``limits.request_timeout_s``."""

    code = "request_timeout"
    http_status = 504


class DrainDeadlineError(AbortError):
    """The daemon stops and ``limits.drain_timeout_s`` is over."""

    code = "drain_deadline"
    http_status = 503


class NoDaemonError(MachdError):
    """No daemon answers at the admin address, or it lets this user do nothing."""

    code = "no_daemon"
    exit_code = 69


class FaultError(MachdError):
    """A failure of machd's own; the message to the client is constant, the log has the rest."""

    code = "fault"
    exit_code = 70


class RowFaultError(FaultError):
    """One row's sampler, detokeniser or cache failed; no other row is touched."""

    code = "row_fault"


class EngineFaultError(FaultError):
    """The forward pass itself failed, or the engine stopped answering."""

    code = "engine_fault"
    http_status = 503


class EngineEndedError(EngineFaultError):
    """An engine process has ended by itself while it loaded the model."""

    code = "engine_ended"
