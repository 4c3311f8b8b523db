from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.chat.answers import content_of, feed, merged, parse, parser, reasoning_of
from tgi.enums import ReasoningParser as Words
from tgi.router.chat import tool_formats
from tgi.router.chat.answer import Content, Reasoning, make_answer_parser
from tgi.router.chat.reasoning import BY_NAME, FORMATS, THINK, Opening, ReasoningFormat, detect_reasoning, opening_of

each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@each_format
@pytest.mark.fault("vllm#39885")
def test_thinking_text_is_apart_from_the_answer(format: ReasoningFormat) -> None:
    parts = parse(f"{format.begin}\nFirst < this,\n\nthen that.\n{format.end}\n\nThe answer.\n", None, format)
    assert parts == [Reasoning("First < this,\n\nthen that."), Content("The answer.\n")]


@each_format
def test_a_block_that_the_prompt_opened_goes_on_in_the_answer(format: ReasoningFormat) -> None:
    parts = parse(f"Hm.\n{format.end}\n\nYes.", None, format, prompt_tail=f"assistant\n{format.begin}\n")
    assert parts == [Reasoning("Hm."), Content("Yes.")]


@each_format
def test_a_block_that_the_prompt_closed_is_over(format: ReasoningFormat) -> None:
    tail = f"assistant\n{format.begin}\n\n{format.end}\n\n"
    assert opening_of(format, tail) is Opening.ANSWER
    assert parse("Yes.", None, format, prompt_tail=tail) == [Content("Yes.")]


@pytest.mark.fault("vllm#39885")
def test_earlier_turns_decide_nothing() -> None:
    """Old thinking text, open or closed, or a user who writes the marks: only the prompt's end counts."""
    for history in ("user: what is <think>?\nassistant:", "<think>old</think>\nuser: go on\nassistant:"):
        assert opening_of(THINK, history) is Opening.EITHER
        assert parse("Plain.", None, THINK, prompt_tail=history) == [Content("Plain.")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>only thoughts", "only thoughts", ""),
        ("<think></think>answer", "", "answer"),
        ("<think>\n\n</think>\n\nanswer", "", "answer"),
        ("</think>\n\nanswer", "", "answer"),
        ("\n <think>a</think>b", "a", "b"),
        ("The tag <think> opens a block, </think> ends it.", "", "The tag <think> opens a block, </think> ends it."),
        ("<thin", "", "<thin"),
        (" <thinking>", "", " <thinking>"),
        ("  \n ", "", "  \n "),
        ("<think>a</thin", "a</thin", ""),
        ("<think>a \n", "a \n", ""),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        (" " * 80 + "<think>a", "", " " * 80 + "<think>a"),
        ("<think>a" + " " * 80 + "</think>b", "a" + " " * 16, "b"),
        ("", "", ""),
    ],
)
def test_odd_answers(text: str, reasoning: str, content: str) -> None:
    parts = parse(text, None, THINK)
    assert (reasoning_of(parts), content_of(parts)) == (reasoning, content)


def test_a_model_that_opens_the_opened_block_again() -> None:
    assert parse("<think>a</think>b", None, THINK, prompt_tail="<think>\n") == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize(
    ("prompt", "continued", "opening"),
    [
        ("assistant\n<think>\nso", "<think>\nso", Opening.THINKING),
        ("assistant\n<think>\nso", "so", Opening.THINKING),
        ("assistant\n<think>a</think>\nso", "<think>a</think>\nso", Opening.ANSWER),
        ("assistant\nso", "so", Opening.ANSWER),
    ],
)
def test_an_answer_that_is_continued(prompt: str, continued: str, opening: Opening) -> None:
    assert opening_of(THINK, prompt, continued) is opening


def test_in_the_midst_of_an_answer_nothing_is_parsed() -> None:
    assert make_answer_parser(None, THINK, "assistant\nso", {}, continued="so") is None
    assert make_answer_parser(None, None, "", {}) is None


def test_a_special_token_opens_a_block_anywhere() -> None:
    reading = parser(None, THINK)
    pieces = [
        ("Hi.", False),
        ("<think>", True),
        ("Hm.", False),
        ("</think>", True),
        (" Bye.", False),
        ("</think>", True),
    ]
    parts = [part for text, special in pieces for part in reading.push(text, special)] + reading.finish()
    assert merged(parts) == [Content("Hi."), Reasoning("Hm."), Content("Bye.")]


def test_special_tokens_that_are_no_marks_vanish() -> None:
    reading = parser(tool_formats.HERMES, THINK)
    pieces = [("<s>", True), ("<think>", True), ("a", False), ("</think>", True), ("b", False), ("<|im_end|>", True)]
    parts = [part for text, special in pieces for part in reading.push(text, special)] + reading.finish()
    assert merged(parts) == [Reasoning("a"), Content("b")]


def test_thoughts_stream_as_they_come() -> None:
    reading = parser(None, THINK)
    assert reading.push("<think>", False) == []
    assert reading.push("Let", False) == [Reasoning("Let")]
    assert reading.push(" me </", False) == [Reasoning(" me")]
    assert reading.push("b>", False) == [Reasoning(" </b>")]


@given(text=st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "a", "/"])).map("".join))
@pytest.mark.parametrize("tail", ["", "<think>\n"])
def test_any_text_is_the_same_however_it_is_cut(text: str, tail: str) -> None:
    whole = merged(feed(parser(None, THINK, tail), [text]))
    assert merged(feed(parser(None, THINK, tail), list(text))) == whole


@each_format
def test_the_template_says_which_marks_there_are(format: ReasoningFormat) -> None:
    assert detect_reasoning("{{ content.split('" + format.end + "')[-1] }}", {}) is format
    assert detect_reasoning("{{ messages }}", {format.begin: 7}) is format
    assert detect_reasoning("{{ messages }}", {"<s>": 1}) is None


def test_every_format_has_its_word() -> None:
    assert {"auto", "none", *BY_NAME} == set(Words)
