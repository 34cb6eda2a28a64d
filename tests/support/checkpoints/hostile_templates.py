"""Chat templates that hold whatever renders them, by what they do."""

from __future__ import annotations

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

UNINTERRUPTIBLE = (
    "{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
    "{{ ns.a == ns.b }}"
)
"""2^60 comparisons inside one call of C, which no signal handler of Python's interrupts."""

_DOUBLING = (
    "{%% set ns = namespace(x=%s) %%}"
    "{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x | length }}"
)

HOSTILE: dict[str, str] = {
    "repetition": "{{ 'x' * 1000000000 }}",
    "loops": ENDLESS,
    "center": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 1000) }}",
    "replace_method": "{{ ('a' * 10**6).replace('a', 'b' * 1000) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power_modulo": "{{ (3 ** (10 ** 8)) % 7 }}",
    "concatenation": _DOUBLING % ("'a' * 100", "ns.x ~ ns.x"),
    "namespace_list": _DOUBLING % ("[1]", "ns.x + ns.x"),
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "join": "{{ range(99999) | join('b' * 10 ** 5) }}",
    "join_method": "{{ ('b' * 10 ** 5).join(('a' * 10 ** 5) | list) }}",
    "expandtabs": "{{ ('\t' * 10 ** 5).expandtabs(10 ** 5) }}",
    "percent_format": "{{ '%999999999d' % 1 }}",
    "format_filter": "{{ '%999999999d' | format(1) }}",
    "str_format": "{{ '{:>999999999}'.format(1) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "range_products": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
    "slice": "{{ 'a' | slice(10 ** 9) | list | length }}",
    "cycler": "{% set c = cycler(*(range(99999) | list) * 999) %}{{ c.next() }}",
    "pprint": "{% for i in range(999) %}{{ range(99999) | list | pprint | length }}{% endfor %}",
    "urlize": "{{ ('http://example.com/ ' * 10 ** 6) | urlize }}",
    # With a constant alone Jinja would wrap once, when it compiles the template.
    "wordwrap": (
        "{% for i in range(9999) %}"
        "{{ (messages[0].content ~ 'a ' * 10 ** 6) | wordwrap(1) | length }}"
        "{% endfor %}"
    ),
    "truncate": "{% for i in range(99999) %}{{ ('a ' * 10 ** 7) | truncate(99) }}{% endfor %}",
    "groupby": (
        "{% for i in range(9999) %}"
        "{{ ([messages[0]] * 10 ** 5) | groupby('role') | length }}"
        "{% endfor %}"
    ),
    "sort": "{% for i in range(9999) %}{{ (range(99999) | list * 9) | sort | length }}{% endfor %}",
    "unique": "{% for i in range(9999) %}{{ range(99999) | unique | list | length }}{% endfor %}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "strftime": "{{ strftime_now('%A' * 10 ** 8) }}",
    "dictionary": "{{ dict.fromkeys(range(10 ** 5) | list * 1000, 'x' * 10 ** 9) }}",
    "string_of_nested": (
        "{% set ns = namespace(x=[1]) %}"
        "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}"
    ),
    "macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "uninterruptible": UNINTERRUPTIBLE,
    "generation": "{% generation %}{{ 'x' * 10 ** 9 }}{% endgeneration %}",
}
"""What would take seconds to years, or gigabytes."""

HARMLESS: dict[str, str] = {
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long_refusal": "{{ raise_exception('x' * 10 ** 7) }}",
    "list_as_refusal": "{{ raise_exception(['x' * 10 ** 7]) }}",
    "long_key": "{{ {}['x' * 10 ** 7].y }}",
    "digits": "{{ (10 ** (10 ** 5)) | string }}",
    "unfinished": "{% for m in messages %}{{ m.content",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}
"""What fails by itself, and soon."""
