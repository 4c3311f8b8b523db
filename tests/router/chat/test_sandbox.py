from __future__ import annotations

from datetime import datetime

import jinja2
import pytest

from tgi.router.chat import sandbox
from tgi.router.chat.sandbox import new_sandbox, run


def output(source: str, **variables: object) -> str:
    return run(new_sandbox().from_string(source), variables)


def test_blocks_take_their_line_with_them() -> None:
    assert output("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_loop_controls() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert output(source) == "02"


@pytest.mark.fault("minijinja#815")
def test_generation_blocks_are_their_content_in_a_scope_of_their_own() -> None:
    source = (
        "{% set x = 0 %}{% for m in 'ab' %}{%- generation -%} [{{ m }}{{ loop.index }}{% set x = 1 %}{{ x }}] "
        "{%- endgeneration -%}{% endfor %}!{{ x }}"
    )
    assert output(source) == "[a11][b21]!0"


@pytest.mark.fault("TGI#2987")
def test_the_date_is_local_and_formatted() -> None:
    before = datetime.now()
    text = output("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    after = datetime.now()
    assert before.replace(microsecond=0) <= datetime.strptime(text, "%Y-%m-%d %H:%M:%S") <= after


def test_json_is_neither_html_nor_sorted_nor_ascii() -> None:
    value = {"b": "<é>", "a": [1]}
    assert output("{{ x | tojson }}", x=value) == '{"b": "<é>", "a": [1]}'
    assert output("{{ x | tojson(indent=2, ensure_ascii=true) }}", x={"b": "é"}) == '{\n  "b": "\\u00e9"\n}'
    assert output("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x=value) == '{"a":[1],"b":"<é>"}'


def test_text_is_not_escaped_for_html() -> None:
    assert output("{{ x }}", x="<b> & 'c'") == "<b> & 'c'"


def test_dict_and_namespace() -> None:
    source = "{% set n = namespace(self=1, a=2) %}{% set n.b = 3 %}{{ n.self + n.a + n.b }}{{ dict(a=1).a }}"
    assert output(source) == "61"
    assert output("{{ dict.fromkeys('a', 2)['a'] }}") == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ x.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ x.update({}) }}",
        "{{ '{0.__class__.x}'.format(x) }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox_and_nothing_given_is_changed(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        output(source, x={"a": 1})


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.a }}",
        "{{ x['a'] }}",
        "{{ [x, x] | map(attribute='a') | join }}",
        "{% for i in range(3) %}{% endfor %}",
        "{% for i in x.b %}{{ i }}{% endfor %}",
        "{% for i in y %}{% for j in y %}.{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped_wherever_it_is(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", -1)
    with pytest.raises(jinja2.TemplateError, match="did not end within"):
        output(source, x={"a": 1, "b": [2]}, y=[1])


def test_a_template_that_writes_too_much_is_stopped() -> None:
    written = iter(range(1 << 20))
    pieces = (sandbox.MAX_CHARACTERS // 1_000) + 1
    with pytest.raises(jinja2.TemplateError, match="writes more than"):
        output(
            "{% for i in n %}{{ x }}{{ counted() }}{% endfor %}",
            x="x" * 1_000,
            n=range(1 << 30),
            counted=lambda: next(written),
        )
    assert next(written) < pieces + sandbox.BATCH
    assert output("{% for i in range(1000) %}{{ '' }}{% endfor %}x") == "x"  # many empty pieces are no end
