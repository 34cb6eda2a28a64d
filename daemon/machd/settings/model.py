"""The settings themselves: one frozen class for each section.

Everything a person can set stands here once, with its default, its bounds and a sentence about
it. The flags, the ``LME_*`` variables, the example file, the JSON schema and the reference page
are made from these classes by ``keys``, ``sources`` and ``explain``.

How to add a key: give the section a field with a default, a description and bounds (``ge`` and
``le`` only, so that every limit can be shown). Units come last in its name. A key that may be
unset has None for its default. A number that may also be a word has both in its type, with the
bounds at the number (see ``batching``). A rule that one value alone can break belongs to its type
(see ``texts``); a rule between two keys is a validator of :class:`Settings`, never of a section,
because values are checked one by one first. A section's heading, wherever it is shown, is its docstring.
A key is live, so that a reload may change it, unless its type is marked ``Mark.RESTART``.
A model's table (``models.ModelTable``) repeats keys of some sections for that model alone; an adapter's
(``adapters.AdapterTable``) has keys of its own. ``model_tables`` and ``adapter_tables`` have the rules between tables.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from machd.settings.adapters import AdaptersSettings
from machd.settings.batching import ContinuousBatchingSettings
from machd.settings.cache import CacheSettings
from machd.settings.distributed import DistributedSettings
from machd.settings.experts import ExpertsSettings
from machd.settings.kv_events import KvEventsSettings
from machd.settings.models import ModelsSettings, ModelTable
from machd.settings.section import Mark, SettingsSection
from machd.settings.speculation import SpeculationSettings
from machd.settings.texts import (
    AdminListen,
    HostName,
    ListenHost,
    Text,
    WebOrigin,
    is_same_address,
)
from machd.settings.vision import VisionSettings

_DAY_S = 86_400.0

# The bounds stand with the number, because the word has none.
_MaxConnections: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"]


class ServerSettings(SettingsSection):
    """The public listener."""

    host: Annotated[ListenHost, Mark.RESTART] = Field(
        default="127.0.0.1",
        description="Address to listen on: an IP address, a host name, or unix:PATH for a socket "
        "file. Beyond loopback, auth.api_keys_file has to be set.",
    )
    port: Annotated[int, Mark.RESTART] = Field(
        default=8080,
        ge=0,
        le=65_535,
        description="TCP port; 0 takes any free one and the log says which. A unix: host has none.",
    )


class ModelSettings(SettingsSection):
    """Which model is served, and how it is loaded."""

    path: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["models/SmolLM2-135M-Instruct"],
        description="A directory in mlx-lm layout, a GGUF file, or a hub id "
        "(with model.offline false). Without it the embedded default is served.",
    )
    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], Mark.RESTART] = Field(
        default="auto",
        description="Number type of the weights. auto keeps the stored one on Metal and CUDA, and "
        "takes float32 on the CPU when that fits into memory.",
    )
    quantize: Annotated[
        Literal["affine8", "affine4", "affine2", "mxfp8", "mxfp4", "nvfp4"] | None, Mark.RESTART
    ] = Field(
        default=None,
        examples=["affine4"],
        description="Quantise the weights to this format when the model is loaded: smaller, less exact, and faster "
        "or slower by machine and batch width, as `machd bench --formats` tells.",
    )
    offline: Annotated[bool, Mark.RESTART] = Field(
        default=True,
        description="Never download: a model that is not on this machine is then an error. Unless this is set, "
        "`machd serve` without a model fetches the embedded default once, except as a service.",
    )
    max_context_tokens: Annotated[int | None, Mark.RESTART] = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        examples=[8192],
        description="Tokens that prompt and completion may take together. Without it the limit is "
        "the model's own.",
    )
    trust_remote_code: Annotated[bool, Mark.RESTART] = Field(
        default=False,
        description="Run the Python code that a checkpoint brings along. It can do whatever the "
        "daemon's user can.",
    )
    chat_template: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["chat_template.jinja"],
        description="File that replaces the model's chat template, or the word none to serve "
        "without chat. Without it the model's own template is used.",
    )
    generation_config: Annotated[Literal["auto", "none"], Mark.RESTART] = Field(
        default="auto",
        description="Where a request says nothing about temperature, top_p, top_k, min_p or the repetition "
        "penalty, auto takes what the checkpoint's generation_config.json says; none leaves it unread.",
    )

    kind: Annotated[Literal["auto", "reranker"], Mark.RESTART] = Field(
        default="auto",
        description="Whether a model that generates text ranks documents too: auto goes by the checkpoint's "
        "modules.json; reranker says so of one without, such as the first Qwen3-Reranker.",
    )


class EngineSettings(SettingsSection):
    """The libraries that compute."""

    blas: Annotated[Text, Mark.RESTART] = Field(
        default="auto",
        description="Matrix library of the CPU backend: auto takes the first installed one that "
        "multiplies rightly, off keeps MLX's own, anything else is the path of a shared library.",
    )
    stall_timeout_s: float = Field(
        default=300.0,
        ge=1.0,
        le=_DAY_S,
        description="Seconds that one engine step (a token, or 512 prompt tokens) may take; then "
        "the engine counts as hung, requests get an error and the daemon exits with 70.",
    )


class StructuredOutputSettings(SettingsSection):
    """The reading of JSON schemas."""

    strict: bool = Field(
        default=False,
        description="Refuse a schema with keywords that no grammar can hold (uniqueItems, not, if, ...). "
        "Otherwise they are left out, and the header X-Ignored-Schema-Keywords names them.",
    )


class StreamingSettings(SettingsSection):
    """The streaming of answers."""

    interval: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Tokens per SSE event; more of them cost less work and look less smooth.",
    )
    keepalive_s: float = Field(
        default=15.0,
        ge=0.001,
        le=_DAY_S,
        description="Seconds of silence after which a stream gets a comment line, which tells how far the prompt is. "
        "One that waits for a slot gets none, unless its model is loaded or suspended.",
    )


class LimitsSettings(SettingsSection):
    """Limits of requests, in number, size and time."""

    max_queue: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        description="Completions that may wait, n for each prompt of a request; beyond it 429 "
        "with Retry-After.",
    )
    max_in_flight: int = Field(
        default=512,
        ge=1,
        le=1_000_000,
        description="HTTP requests that may be open at once, whatever they ask for; beyond it 503 "
        "with Retry-After. Health answers all the same.",
    )
    max_connections: _MaxConnections = Field(
        default="auto",
        description="Connections that clients may have open; beyond it the one that has been idle "
        "longest is closed. auto takes what the limit of open files leaves, at most 4,096.",
    )
    max_queue_tokens: int = Field(
        default=1_000_000,
        ge=1,
        le=1_000_000_000,
        description="Prompt tokens that may wait, all requests together, and tokens of texts that embedding models "
        "and classifiers have to compute; beyond it 429 with Retry-After.",
    )
    max_tokens_default: int = Field(
        default=2048,
        ge=1,
        le=1_000_000_000,
        description="Completion tokens of a request that names no limit itself.",
    )
    max_tokens_policy: Literal["clamp", "refuse"] = Field(
        default="clamp",
        description="What happens to a request for more completion tokens than the context, or the KV "
        "budget, has room for: clamp gives it what fits, refuse answers 400.",
    )
    max_n: int = Field(
        default=8,
        ge=1,
        le=128,
        description="Completions that one request may ask for with n; beyond it 400.",
    )
    max_inputs: int = Field(
        default=2048,
        ge=1,
        le=1_000_000,
        description="Texts, or pairs of texts, that one request for embeddings, scores or classes may have; "
        "beyond it 400.",
    )
    long_input_policy: Literal["refuse", "truncate"] = Field(
        default="refuse",
        description="What happens to a text that is longer than an embedding model or classifier takes, where the "
        "request does not say: refuse answers 400, truncate cuts its end off.",
    )
    max_body_bytes: int = Field(
        default=2_097_152,
        ge=1024,
        le=1_073_741_824,
        description="Bytes of a request body, without the base64 of images and videos; beyond it 413.",
    )
    max_stored_responses: int = Field(
        default=256,
        ge=0,
        le=1_000_000,
        description="Responses of /v1/responses that are kept in memory for previous_response_id, 0 "
        "for none; beyond it the API key that holds the most loses its oldest.",
    )
    max_stored_response_bytes: int = Field(
        default=67_108_864,
        ge=0,
        le=1_099_511_627_776,
        description="Bytes that the kept responses, with the conversations before them, may have "
        "together; beyond it the API key that holds the most loses its oldest.",
    )
    max_requests_per_key: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        examples=[8],
        description="Generations that one API key may have open at once, or all clients together "
        "where there are no keys; beyond it 429.",
    )
    max_tokens_per_minute_per_key: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        examples=[100_000],
        description="Prompt and completion tokens that one API key may use in a minute, or all "
        "clients together where there are no keys; who has used more gets 429.",
    )
    queue_timeout_s: float = Field(
        default=120.0,
        ge=0.001,
        le=_DAY_S,
        description="Seconds that a request may wait before it is started; then 503 with "
        "Retry-After.",
    )
    request_timeout_s: float = Field(
        default=1800.0,
        ge=0.001,
        le=_DAY_S,
        description="Seconds that a request may take from arrival to its last token; then 504.",
    )
    client_stall_timeout_s: float = Field(
        default=30.0,
        ge=0.001,
        le=_DAY_S,
        description="Seconds that a client may take to send a request's head or its body, and "
        "seconds that it may read nothing of an answer; then it is dropped.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        ge=0.0,
        le=_DAY_S,
        description="Seconds that running requests get to finish when the daemon stops; 0 ends "
        "them at once.",
    )
    drain_notice_s: float = Field(
        default=0.0,
        ge=0.0,
        le=_DAY_S,
        description="Seconds between a stop's signal and the drain: /health/ready says 503, new "
        "requests are still taken, so that a router has time to notice.",
    )


class AuthSettings(SettingsSection):
    """API keys and the admin token."""

    api_keys_file: Text | None = Field(
        default=None,
        examples=["/etc/machd/api-keys"],
        description="File with one name:key a line, else the service manager's credential api-keys. "
        "With keys every request needs one; beyond loopback there have to be some.",
    )
    admin_token_file: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["/etc/machd/admin-token"],
        description="File with the admin API's token, else the service manager's credential "
        "admin-token, else one is made at start that only the daemon's user can read. A Unix socket "
        "needs none.",
    )


class HttpSettings(SettingsSection):
    """Which hosts and browser pages may reach the daemon."""

    allowed_hosts: tuple[HostName, ...] = Field(
        default=(),
        examples=[["llm.example.org"]],
        description="Names accepted in the Host header besides IP addresses and those of "
        "loopback; * accepts all. Others get 421.",
    )
    allowed_origins: tuple[WebOrigin, ...] = Field(
        default=(),
        examples=[["https://chat.example.org"]],
        description="Origins of browser pages that may call the API; others get 403.",
    )


class AdminSettings(SettingsSection):
    """The admin listener."""

    listen: Annotated[AdminListen, Mark.RESTART] = Field(
        default="127.0.0.1:8081",
        description="Where the admin API listens: a loopback address with a port (0 takes any "
        "free one), unix:PATH for a socket that only the daemon's user can open, or off.",
    )


class ConsoleSettings(SettingsSection):
    """The pages for browsers; that of operators is on the admin listener."""

    public: bool = Field(
        default=True,
        description="Give browsers at / of the public port a page on which to try the models; it needs an "
        "API key where there are some.",
    )


class MetricsSettings(SettingsSection):
    """The metrics page."""

    public: bool = Field(
        default=True,
        description="Serve /metrics on the public port; where API keys are set, it takes one too. "
        "The admin listener always has them.",
    )
    vllm_names: bool = Field(
        default=False,
        description="Export the metrics under vLLM's names as well, for dashboards made for it.",
    )


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class LoggingSettings(SettingsSection):
    """Logging. Prompts and completions are never logged."""

    level: LogLevel = Field(
        default="info",
        description="The least severe events that are logged.",
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="auto is console on a terminal and json everywhere else.",
    )


class TracingSettings(SettingsSection):
    """Spans of requests, and where they are sent."""

    otlp_endpoint: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["http://otel:4318/v1/traces"],
        description="URL that takes traces over OTLP and HTTP; needs the extra machd[otel]. Without "
        "it nothing is traced.",
    )


class ProbeSettings(SettingsSection):
    """Measurements of the served model at start-up."""

    on_start: Annotated[Literal["facts", "measure", "auto", "off"], Mark.RESTART] = Field(
        default="auto",
        description="What is measured before a model is batched: auto a small model of the same code, "
        "measure the model, facts nothing. What is known counts; off goes by rules about caches alone.",
    )


class Settings(BaseSettings):
    """Everything that can be set. Every key is optional."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    models: ModelsSettings = Field(default_factory=ModelsSettings)
    adapters: AdaptersSettings = Field(default_factory=AdaptersSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    continuous_batching: ContinuousBatchingSettings = Field(
        default_factory=ContinuousBatchingSettings
    )
    cache: CacheSettings = Field(default_factory=CacheSettings)
    kv_events: KvEventsSettings = Field(default_factory=KvEventsSettings)
    experts: ExpertsSettings = Field(default_factory=ExpertsSettings)
    distributed: DistributedSettings = Field(default_factory=DistributedSettings)
    vision: VisionSettings = Field(default_factory=VisionSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    structured_output: StructuredOutputSettings = Field(default_factory=StructuredOutputSettings)
    streaming: StreamingSettings = Field(default_factory=StreamingSettings)
    limits: LimitsSettings = Field(default_factory=LimitsSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    console: ConsoleSettings = Field(default_factory=ConsoleSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    probe: ProbeSettings = Field(default_factory=ProbeSettings)

    @model_validator(mode="after")
    def _draft_mode_names_its_model(self) -> Self:
        if self.speculation.mode == "draft" and self.speculation.draft_model is None:
            raise ValueError(
                "speculation.mode: draft needs a draft model; name it in "
                "speculation.draft_model, or set speculation.mode to auto"
            )
        return self

    @model_validator(mode="after")
    def _urls_have_hosts(self) -> Self:
        if self.vision.allow_urls and not self.vision.url_hosts:
            raise ValueError(
                "vision.allow_urls: true needs the hosts that may be fetched from; name them in "
                "vision.url_hosts, or set vision.allow_urls to false"
            )
        return self

    @model_validator(mode="after")
    def _admin_listens_elsewhere(self) -> Self:
        listen = self.admin.listen
        if is_same_address(self.server.host, self.server.port, listen):
            raise ValueError(
                f"admin.listen: {listen} is the public address (server.host, server.port); give "
                "the admin API another address, or set admin.listen to off"
            )
        return self

    def of_model(self, name: str, *, path: str | None = None) -> Settings:
        """Return the settings of one model of several: what its table says in place, and no tables.

        Args:
            name: The model's, as its table has it. A model that was found need not have one.
            path: Where it was found; None to go by :meth:`path_of_model`.

        Raises:
            KeyError: There is no table of that name, and no ``path``.
            ValidationError: The table breaks a rule between keys, which loading refuses.
        """
        table = self.models.tables.get(name, ModelTable())
        overrides = {section: dict(values) for section, values in table.overrides.items()}
        overrides.setdefault("model", {})["path"] = path or self.path_of_model(name)
        overrides["models"] = {"tables": {}}
        sections = {
            section: getattr(self, section).model_copy(update=overrides.get(section))
            for section in type(self).model_fields
        }
        return type(self)(**sections)

    def path_of_model(self, name: str) -> str:
        """Return the path in a model's table, or else its name: below ``models.directory``, or as a hub id.

        Raises:
            KeyError: There is no table of that name.
        """
        directory = self.models.directory
        return self.models.tables[name].path or (
            name if directory is None else f"{directory}/{name}"
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_named: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take what is passed and nothing else; :mod:`machd.settings.sources` reads files and variables."""
        return (init_settings,)
