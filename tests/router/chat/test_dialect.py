from __future__ import annotations

import jinja2
import pytest

from tgi.router.chat.dialect import Dialect, dialect_of

ENVIRONMENT = jinja2.Environment()


def read(source: str) -> Dialect:
    return dialect_of(ENVIRONMENT.parse(source))


@pytest.mark.parametrize(
    ("source", "as_parts"),
    [
        ("{% for part in message.content %}{% endfor %}", True),
        ("{% for part in message['content'] %}{% endfor %}", True),
        ("{% for part in messages[0]['content'][1:] %}{% endfor %}", True),
        ("{% for part in message['content'] | selectattr('type', 'equalto', 'text') | list %}{% endfor %}", True),
        ("{% set content = message.content %}{% for part in content %}{% endfor %}", True),
        ("{% set a = message.content %}{% set b = a %}{% for part in b %}{% endfor %}", True),
        ("{% macro text(content) %}{% for part in content %}{% endfor %}{% endmacro %}", True),
        (
            "{% if message.content is string %}x{% else %}{% for part in message.content %}{% endfor %}{% endif %}",
            False,
        ),
        (
            "{% macro text(content) %}{% if content is not string %}{% for part in content %}{% endfor %}"
            "{% endif %}{% endmacro %}",
            False,
        ),
        ("{% for part in message.content.split('</think>') %}{% endfor %}", False),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{% for part in document.text %}{% endfor %}{{ message.content is string }}", False),
        ("{{ messages[0]['content'][0]['text'] }}", False),
    ],
)
def test_content_as_parts(source: str, as_parts: bool) -> None:
    assert read(source).content_as_parts is as_parts


@pytest.mark.parametrize(
    ("source", "null"),
    [
        ("{% if message['content'] is none %}{% endif %}", True),
        ("{% if message.content is not none %}{% endif %}", True),
        ("{% set text = message.content %}{% if text is none %}{% endif %}", True),
        ("{% if message.content %}{% endif %}{% if message.tool_calls is not none %}{% endif %}", False),
        ("{% if message.content is defined %}{% endif %}", False),
    ],
)
def test_null_content(source: str, null: bool) -> None:
    assert read(source).null_content is null


@pytest.mark.parametrize(
    ("source", "as_text"),
    [
        ("{{ '```json\n' + call['function']['arguments'] + '\n```' }}", True),
        ("{{ call.function.arguments }}", True),
        ("{{ 'x' ~ call.arguments }}", True),
        ("{% set args = call.arguments %}{{ 'x' + args }}", True),
        ("{{ call.arguments | tojson }}", False),
        ("{{ '{' + call.arguments | tojson + '}' }}", False),
        (
            "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
            False,
        ),
        ("{% for name, value in call.arguments.items() %}{{ name }}{{ value }}{% endfor %}", False),
        ("{{ call | tojson }}", False),
    ],
)
def test_arguments_as_text(source: str, as_text: bool) -> None:
    assert read(source).arguments_as_text is as_text
