from __future__ import annotations

import asyncio
import re
import threading
from datetime import datetime

import pytest

from tgi.errors import TemplateFailed
from tgi.router.chat.template import LONG_CHAT, ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, object], **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(list(messages), variables)


def test_a_chat_is_rendered_with_a_generation_prompt() -> None:
    assert render(CHATML, USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.row("B: Chat templates: bos and eos, tools, date, raise_exception")
def test_special_tokens_come_from_the_tokenizer() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}", USER) == "<s>Hi</s>"


def test_blocks_take_their_line_with_them_as_transformers_does() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb", USER) == "  a\nb"


def test_loop_controls() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source, USER) == "02"


@pytest.mark.fault("minijinja#815")
def test_generation_blocks_are_their_content() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}!"
    assert render(source, USER, USER) == "[Hi][Hi]!"


@pytest.mark.fault("TGI#2987")
def test_the_date_is_local_and_formatted() -> None:
    before = datetime.now()
    text = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", USER)
    after = datetime.now()
    assert before.replace(microsecond=0) <= datetime.strptime(text, "%Y-%m-%d %H:%M:%S") <= after


def test_json_is_neither_html_nor_sorted_nor_ascii() -> None:
    assert render("{{ x | tojson }}", USER, x={"b": "<é>", "a": [1]}) == '{"b": "<é>", "a": [1]}'
    assert render("{{ x | tojson(indent=2) }}", USER, x={"b": 1}) == '{\n  "b": 1\n}'


def test_text_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content }}", {"role": "user", "content": "<b> & 'c'"}) == "<b> & 'c'"


def test_reversed_slices_and_flat_content() -> None:
    assert render("{{ messages[::-1][0]['content'] }}", USER, {"role": "user", "content": "2"}) == "2"
    assert render("{{ messages[0]['content'][0]['text'] }}", USER) == "Hi"


def test_tools_and_documents_are_none_rather_than_undefined() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", USER) == "True True True"


def test_variables_reach_the_template_but_cannot_replace_ours() -> None:
    assert (
        render("{{ enable_thinking }} {{ messages | length }}", USER, enable_thinking=False, messages=[]) == "False 1"
    )


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
    ],
)
def test_whatever_a_template_does_wrong_is_the_chats_error(source: str, told: str) -> None:
    with pytest.raises(TemplateFailed, match=told):
        render(source, USER)


@pytest.mark.fault("TGI#1743")
def test_no_template_is_said_so() -> None:
    template = ChatTemplate(None, {})
    assert template.failure is not None
    with pytest.raises(TemplateFailed, match=r"^template not found: .*--tokenizer-config-path$"):
        template.render([USER])


def test_a_template_that_does_not_compile_fails_its_chats_only() -> None:
    template = ChatTemplate("{% for %}", {})
    with pytest.raises(TemplateFailed, match=r"^the model's chat template does not compile: "):
        template.render([USER])


@pytest.mark.row("B: Assistant continuation")
@pytest.mark.parametrize("content", ["Once upon", "Once upon  \n", "im_end", "<|im_start|>", "assistant"])
def test_a_last_assistant_message_is_left_open(content: str) -> None:
    text = render(CHATML, USER, {"role": "assistant", "content": content})
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content.rstrip()}"


def test_an_empty_assistant_message_is_no_continuation() -> None:
    text = render(CHATML, USER, {"role": "assistant", "content": ""})
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_drops_the_message_to_be_continued_is_told() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateFailed, match="does not write the assistant message"):
        render(source, USER, {"role": "assistant", "content": "Once"})


def test_the_callers_messages_are_left_alone() -> None:
    messages = [USER, {"role": "assistant", "content": "Once "}]
    ChatTemplate(CHATML, {}).render(messages)
    assert messages == [USER, {"role": "assistant", "content": "Once "}]


@pytest.mark.parametrize("length", [3, LONG_CHAT + 1])
def test_long_and_short_chats_are_rendered_alike(length: int) -> None:
    template = ChatTemplate(CHATML, {})
    messages = [{"role": "user", "content": "x" * length}]
    text = asyncio.run(template.render_aside(messages))
    assert text == template.render(messages)
    assert re.search(f"x{{{length}}}", text)


@pytest.mark.parametrize(("count", "length", "beside"), [(3, 9, False), (1, LONG_CHAT, True), (2_000, 0, True)])
def test_what_takes_long_is_rendered_beside_the_loop(count: int, length: int, beside: bool) -> None:
    template = ChatTemplate("{{ thread() }}", {})
    messages = [{"role": "user", "content": "x" * length}] * count
    thread = asyncio.run(template.render_aside(messages, {"thread": threading.get_ident}))
    assert (int(thread) != threading.get_ident()) == beside
