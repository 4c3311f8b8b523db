from __future__ import annotations

from typing import Any

import pytest

from tgi.errors import InvalidRequest, TemplateFailed
from tgi.router.chat.template import ChatTemplate, Rendered

TRIMMING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = TRIMMING.replace(" | trim", "")
USER = {"role": "user", "content": "Hi"}
BEGIN = "<user>Hi</><assistant>"


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def render(source: str, *messages: dict[str, Any], **flags: Any) -> Rendered:
    return ChatTemplate(source, {}).render(list(messages), **flags)


@pytest.mark.row("B: Assistant continuation")
@pytest.mark.parametrize("source", [TRIMMING, PLAIN], ids=["trimming", "plain"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon  \n", "</>", "<assistant>", "assistant"])
def test_a_last_assistant_message_is_left_open_without_being_asked(source: str, content: str) -> None:
    rendered = render(source, USER, said(content))
    assert rendered == Rendered(BEGIN + content.rstrip(), content.rstrip())
    assert rendered.continues


@pytest.mark.parametrize("flags", [{}, {"continue_final_message": True}])
def test_only_the_last_message_is_left_open(flags: dict[str, Any]) -> None:
    rendered = render(PLAIN, said("Once"), USER, said("Once"), **flags)
    assert rendered.text == "<assistant>Once</><user>Hi</><assistant>Once"


@pytest.mark.parametrize(
    "last", [USER, said(""), said(None), said("x", tool_calls=[{"function": {"name": "f"}}])], ids=repr
)
def test_what_begins_a_new_message(last: dict[str, Any]) -> None:
    rendered = render(PLAIN, USER, last)
    assert rendered.text.endswith("</><assistant>")
    assert not rendered.continues


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ({"add_generation_prompt": True}, "Once</><assistant>"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "Once</><assistant>"),
        ({"continue_final_message": False}, "Once</><assistant>"),
        ({"add_generation_prompt": False}, "Once</>"),
        ({"add_generation_prompt": False, "continue_final_message": False}, "Once</>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "Once"),
        ({"continue_final_message": True}, "Once"),
        ({"continue_final_message": "content"}, "Once"),
    ],
)
def test_flags_say_how_the_prompt_ends(flags: dict[str, Any], end: str) -> None:
    rendered = render(PLAIN, USER, said("Once"), **flags)
    assert rendered.text == BEGIN + end
    assert rendered.continues == bool(flags.get("continue_final_message"))


def test_blanks_stay_where_they_are_asked_for_and_the_template_keeps_them() -> None:
    assert render(PLAIN, USER, said("Once \n"), continue_final_message=True).text == BEGIN + "Once \n"
    trimmed = render(TRIMMING, USER, said(" Once \n"), continue_final_message=True)
    assert trimmed == Rendered(BEGIN + "Once", "Once")
    assert render(PLAIN, {"role": "user", "content": "Hi "}, continue_final_message=True).text == "<user>Hi "
    assert render(PLAIN, USER, said(""), continue_final_message=True) == Rendered(BEGIN, "")


def test_thoughts_may_be_continued_under_any_of_their_names() -> None:
    source = "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    message = said("", reasoning_content="Well", thinking="Well")
    for field in ("reasoning_content", "thinking"):
        rendered = render(source, USER, message, continue_final_message=field)
        assert rendered == Rendered("Hi(Well", "Well")


@pytest.mark.parametrize(
    ("last", "flags", "told"),
    [
        (said("x"), {"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        (said(None), {"continue_final_message": True}, "the last message has no `content`"),
        (said("x"), {"continue_final_message": "reasoning_content"}, "has no `reasoning_content`"),
        (said("x"), {"continue_final_message": "role"}, "must be a boolean, `content` or `reasoning_content`"),
    ],
)
def test_flags_that_cannot_be_followed(last: dict[str, Any], flags: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        render(PLAIN, USER, last, **flags)
    assert caught.value.param == "continue_final_message"


def test_no_message_can_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="has no `content`"):
        render(PLAIN, continue_final_message=True)


@pytest.mark.parametrize("flags", [{}, {"continue_final_message": True}])
def test_a_template_that_drops_the_message_to_be_continued_is_told(flags: dict[str, Any]) -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateFailed, match="does not write the whole message"):
        render(source, USER, said("Once"), **flags)


def test_a_template_that_drops_a_part_of_it_is_told_only_where_it_was_asked_for() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    message = said("<think>a</think>b")
    assert render(source, USER, message).text == "Hib"
    with pytest.raises(TemplateFailed, match="does not write the whole message"):
        render(source, USER, message, continue_final_message=True)
