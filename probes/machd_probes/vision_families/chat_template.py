"""A short chat template in a family's style."""

from __future__ import annotations

from machd_probes.vision_families.family import Family

_TEMPLATE = """\
{{- $begin }}
{%- set turns = $turns %}
{%- set seen = namespace(images=0) %}
{%- for message in messages %}
    {{- turns[message['role']][0] }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {{- part['text'] }}
            {%- elif part['type'] == 'image' %}
                {%- set seen.images = seen.images + 1 %}
                {{- $image }}
            {%- elif part['type'] == 'video' %}
                {{- $video }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- turns[message['role']][1] }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- turns['assistant'][0] }}
{%- endif %}
"""


def chat_template(family: Family) -> str:
    """Write the family's chat template, for messages of text or of text, image and video parts."""
    turns = {role: turn.split("{}") for role, turn in family.turns.items()}
    image = " ~ seen.images ~ ".join(_literal(piece) for piece in family.image.split("{n}"))
    fields = {
        "$begin": _literal(family.begin),
        "$turns": _literal(turns),
        "$image": image,
        "$video": _literal(family.video),
    }
    text = _TEMPLATE
    for name, value in fields.items():
        text = text.replace(name, value)
    return text


def _literal(value: object) -> str:
    """Python's spelling of texts, lists and dictionaries, which Jinja reads too."""
    return repr(value)
