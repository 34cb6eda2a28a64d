"""Tables of the reference pages, from the daemon's own: settings, metrics, log events, vLLM's names."""

from __future__ import annotations

from log_events import LOG_EVENTS

from machd.settings.explain import full_description, value_text
from machd.settings.keys import ADAPTERS_SECTION, SettingKey, setting_keys, table_keys
from machd.settings.model import Settings
from machd.settings.models import TABLE_SECTIONS
from machd.telemetry.metric_table import METRICS
from machd.telemetry.vllm_names import VLLM_NAMES


def settings_markdown(model: type[Settings] = Settings) -> str:
    """The reference table: key, default, flag, variable, whether a reload changes it, description."""
    head = ("Key", "Default", "Flag", "Variable", "Changed by", "Description")
    rows = [
        head,
        tuple("---" for _ in head),
        *(_markdown_cells(key) for key in setting_keys(model)),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def model_tables_markdown(model: type[Settings] = Settings) -> str:
    """The keys that a model's table has of its own: key, default, description."""
    sections = ", ".join(f"`{section}`" for section in TABLE_SECTIONS)
    rows = [
        f"| `models.NAME.{key.name}` | {_default_cell(key)} | {_description_cell(key)} |"
        for key in table_keys(model)
        if not key.section
    ]
    lines = [
        "A table `[models.NAME]` of the settings file, or of a `PATCH /admin/config`, is of the model that is served as",
        f"NAME. Any key of {sections} may stand in it, too, for that model alone: `models.NAME.cache.prefix`.",
        "No flag and no variable reaches a table. A change of one needs no restart.",
        "",
        "| Key | Default | Description |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def adapter_tables_markdown(model: type[Settings] = Settings) -> str:
    """The keys of an adapter's table: key, default, description."""
    rows = [
        f"| `adapters.NAME.{key.name}` | {_default_cell(key)} | {_description_cell(key)} |"
        for key in table_keys(model, ADAPTERS_SECTION)
    ]
    lines = [
        "A table `[adapters.NAME]` of the settings file, or of a `PATCH /admin/config`, is of the adapter that is served as",
        "NAME. No flag and no variable reaches a table. A change of one needs no restart.",
        "",
        "| Key | Default | Description |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def metrics_markdown() -> str:
    """The table as Markdown, for ``docs/reference/metrics.md``."""
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "none"
        lines.append(f"| `{spec.name}` | {spec.kind.value} | {labels} | {spec.help} |")
    return "\n".join(lines) + "\n"


def log_events_markdown() -> str:
    """The table as Markdown, for ``docs/reference/log-events.md``."""
    lines = ["| Event | Level | Fields | Meaning | What to do |", "|---|---|---|---|---|"]
    for event in LOG_EVENTS:
        fields = ", ".join(f"`{field}`" for field in event.fields) or "none"
        levels = " or ".join(event.levels)
        lines.append(f"| `{event.name}` | {levels} | {fields} | {event.meaning} | {event.advice} |")
    return "\n".join(lines) + "\n"


def vllm_names_markdown() -> str:
    """The table as Markdown, for the page about metrics."""
    lines = ["| vLLM's name | Label | Shows |", "|---|---|---|"]
    for spec in VLLM_NAMES:
        label = f"`{spec.label}`" if spec.label else "none"
        lines.append(f"| `{spec.name}` | {label} | `{spec.source}` |")
    return "\n".join(lines) + "\n"


def _markdown_cells(key: SettingKey) -> tuple[str, ...]:
    return (
        f"`{key.dotted}`",
        _default_cell(key),
        ", ".join(f"`{flag}`" for flag in key.flag_names),
        ", ".join(f"`{name}`" for name in key.environment_names),
        "reload" if key.is_live else "restart",
        _description_cell(key),
    )


def _default_cell(key: SettingKey) -> str:
    return "unset" if key.default is None else f"`{value_text(key.default)}`"


def _description_cell(key: SettingKey) -> str:
    return full_description(key).replace("|", r"\|")
