from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from tgi.errors import InvalidRequest, TemplateFailed
from tgi.router.chat import sandbox
from tgi.router.chat.template import LONG_CHAT, ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, *messages: dict[str, object], **variables: object) -> str:
    return ChatTemplate(source, TOKENS).render(list(messages), variables=variables).text


def test_a_chat_is_rendered_with_a_generation_prompt() -> None:
    assert render(CHATML, USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.row("B: Chat templates: bos and eos, tools, date, raise_exception")
def test_special_tokens_come_from_the_tokenizer() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}", USER) == "<s>Hi</s>"


def test_content_may_be_looked_for_in_a_list_that_nobody_walks() -> None:
    assert render("{{ messages[0]['content'][0]['text'] }}", USER) == "Hi"


def test_tools_and_documents_are_none_rather_than_undefined() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", USER) == "True True True"


@pytest.mark.fault("TGI#2986")
def test_tools_and_documents_reach_the_template_as_structure() -> None:
    template = ChatTemplate("{{ tools[0].function.name }} {{ documents[0]['title'] }}", TOKENS)
    assert template.render([USER], tools=[TOOL], documents=[{"title": "t"}]).text == "f t"


def test_variables_reach_the_template_and_may_stand_for_a_token() -> None:
    assert render("{{ enable_thinking }}{{ bos_token }}", USER, enable_thinking=False, bos_token="B") == "FalseB"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"])
def test_variables_do_not_stand_for_fields_of_the_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot set `{name}`") as caught:
        render(CHATML, USER, **{name: []})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.fault("vllm#25108", "mistral.rs#45")
def test_the_templates_own_message_is_told() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(TemplateFailed, match=r"^System role not supported$") as caught:
        render(source, {"role": "system", "content": "x"})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.no_such() }}", "has no attribute 'no_such'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append.* not safely callable|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "no loader"),
        ("{{ undefined_thing | tojson }}", "not JSON serializable"),
    ],
)
def test_whatever_a_template_does_wrong_is_the_chats_error(source: str, told: str) -> None:
    with pytest.raises(TemplateFailed, match=told):
        render(source, USER)


@pytest.mark.fault("TGI#1743")
def test_no_template_is_said_so() -> None:
    template = ChatTemplate(None, {})
    assert template.failure is not None
    assert (template.source, template.uses_tools) == ("", False)
    with pytest.raises(TemplateFailed, match=r"^template not found: .*--chat-template or --tokenizer-config-path$"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x | no_such_filter }}",
        "{% break %}",
        "{% generation %}",
        "{{" + "(" * 500 + "1" + ")" * 500 + "}}",
        "{% if x %}" * 150 + "{% endif %}" * 150,
    ],
    ids=["syntax", "filter", "break", "open block", "depth", "blocks"],
)
def test_a_template_that_does_not_compile_fails_its_chats_only(source: str) -> None:
    template = ChatTemplate({"default": CHATML, "rag": source}, {})
    assert template.failure is None
    assert template.render([USER]).text
    with pytest.raises(TemplateFailed, match=r"^the model's chat template does not compile: .*$") as caught:
        template.render([USER], name="rag")
    assert "\n" not in str(caught.value)
    assert ChatTemplate(source, {}).failure == str(caught.value)


def test_the_template_for_tools_is_taken_for_chats_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }}", "rag": "rag"}, {})
    assert [template.render([USER], tools=tools).text for tools in (None, [], [TOOL])] == ["plain", "plain", "1"]
    assert template.render([USER], tools=[TOOL], name="rag").text == "rag"
    assert (template.source, template.uses_tools) == ("{{ tools | length }}", True)


def test_a_request_names_templates_of_the_model_and_never_brings_its_own() -> None:
    template = ChatTemplate({"default": "plain", "rag": "rag"}, {})
    for name in ("other", "{{ messages }}"):
        with pytest.raises(InvalidRequest, match=r"one of this model's templates \(`default`, `rag`\)") as caught:
            template.render([USER], name=name)
        assert caught.value.param == "chat_template"
    with pytest.raises(InvalidRequest, match="it has none"):
        ChatTemplate(None, {}).render([USER], name="rag")


def test_without_a_default_the_names_are_told() -> None:
    template = ChatTemplate({"rag": "rag", "tool_use": "tools"}, {})
    assert template.failure is not None
    assert "`rag`, `tool_use`" in template.failure
    assert template.render([USER], tools=[TOOL]).text == "tools"
    assert template.render([USER], name="rag").text == "rag"


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}", True),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        ("tools {{ messages[0].tools }} {{ 'tools' }}", False),
    ],
)
def test_which_templates_read_the_tools(source: str, uses: bool) -> None:
    assert ChatTemplate(source, {}).uses_tools is uses


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "[developer]Be[user]Hi"),
        (
            "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('no') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}",
            "[system]Be[user]Hi",
        ),
        (
            "{% for m in messages if m.role in ['system', 'user'] %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "[system]Be[user]Hi",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "Hi"),
    ],
    ids=["any role", "refused", "left out", "no system either"],
)
def test_a_developer_is_a_system_where_the_template_knows_no_developer(source: str, text: str) -> None:
    assert render(source, {"role": "developer", "content": "Be "}, USER).replace(" ", "") == text


def test_a_developer_that_is_refused_under_both_names_gets_the_first_refusal() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}"
    with pytest.raises(TemplateFailed, match=r"^no developer$"):
        render(source, {"role": "developer", "content": "Be"}, USER)


def test_the_callers_messages_are_left_alone() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "Once ", "tool_calls": [call]}]
    ChatTemplate(CHATML, {}).render(messages, continue_final_message=True)
    assert messages == [USER, {"role": "assistant", "content": "Once ", "tool_calls": [call]}]
    assert call == {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("length", [3, LONG_CHAT + 1])
def test_long_and_short_chats_are_rendered_alike(length: int) -> None:
    template = ChatTemplate(CHATML, {})
    messages = [{"role": "user", "content": "x" * length}]
    rendered = asyncio.run(template.render_aside(messages))
    assert rendered == template.render(messages)
    assert re.search(f"x{{{length}}}", rendered.text)


@pytest.mark.parametrize(
    ("messages", "options", "beside"),
    [
        ([{"role": "user", "content": "x" * 9}] * 3, {}, False),
        ([{"role": "user", "content": "x" * LONG_CHAT}], {}, True),
        ([{"role": "user", "content": ""}] * 2_000, {}, True),
        ([USER], {"documents": [{"text": "x" * LONG_CHAT}]}, True),
        ([USER], {"tools": [TOOL] * 2_000}, True),
        ([USER], {"variables": {"x": [[0] * 2_000]}}, True),
        ([USER], {"tools": [TOOL], "variables": {"x": 1}}, False),
    ],
)
def test_what_takes_long_is_rendered_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], options: dict[str, Any], beside: bool
) -> None:
    monkeypatch.setattr(sandbox, "_now", lambda form: str(threading.get_ident()))
    template = ChatTemplate("{{ strftime_now('') }}", {})
    thread = asyncio.run(template.render_aside(messages, **options)).text
    assert (int(thread) != threading.get_ident()) == beside
