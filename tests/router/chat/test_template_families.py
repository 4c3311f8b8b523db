"""Our rendering against transformers', cell by cell: templates in the manner of the well-known families (our own, in
tests/data/templates/), over conversations that use what such templates look at.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tgi.errors import InvalidRequest
from tgi.router.chat.messages import template_messages
from tgi.router.chat.template import ChatTemplate
from tgi.router.schema.chat import Message

DIRECTORY = Path(__file__).parent.parent.parent / "data" / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the <weather> of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Kyōto, say"},
                "days": {"type": ["integer", "string"]},
                "units": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}}},
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it raining in Kyōto? <b>&amp;</b>"}
AGAIN = {"role": "user", "content": "And\r\n\r\ntomorrow? "}
SUN = {"role": "assistant", "content": " It is dry.\n"}


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    # Spelled as `tojson` spells it: a template that wants text gets the client's.
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(content: str, call_id: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


KYOTO = call("weather", {"place": "Kyōto", "days": 2}, "abcdefgh1")
NOON = call("clock", {}, "abcdefgh2")


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, Any]]  # as OpenAI's clients send them
    options: dict[str, Any] = field(default_factory=dict)  # of both renderers
    variables: dict[str, Any] = field(default_factory=dict)


OPEN = {"add_generation_prompt": True}
CONTINUE = {"continue_final_message": True}
DOCUMENTS = [{"title": "Rain", "text": "It rains."}, {"title": "Sun", "text": "It shines.", "doc_id": 7}]
CHATS = {
    "plain": Chat([USER], OPEN),
    "system": Chat([SYSTEM, USER], OPEN),
    "closed": Chat([SYSTEM, USER, SUN], {"add_generation_prompt": False}),
    "several turns": Chat([SYSTEM, USER, SUN, AGAIN], OPEN),
    "two questions in a row": Chat([USER, AGAIN], OPEN),
    "system in the middle": Chat([USER, SUN, SYSTEM, AGAIN], OPEN),
    "tools": Chat([SYSTEM, USER], OPEN | {"tools": [WEATHER, CLOCK]}),
    "a call": Chat([USER, calling(KYOTO)], {"tools": [WEATHER], "add_generation_prompt": False}),
    "a result": Chat([USER, calling(KYOTO), result("rain", "abcdefgh1", "weather")], OPEN | {"tools": [WEATHER]}),
    "two calls and results": Chat(
        [
            SYSTEM,
            USER,
            calling(KYOTO, NOON),
            result('{"rain": true}', "abcdefgh1", "weather"),
            result("12:00", "abcdefgh2", "clock"),
            SUN,
            AGAIN,
        ],
        OPEN | {"tools": [WEATHER, CLOCK]},
    ),
    "an id of another length": Chat(
        [USER, calling(call("clock", {}, "call_1")), result("12", "call_1", "clock")], OPEN | {"tools": [CLOCK]}
    ),
    "null content": Chat([USER, {**calling(KYOTO), "content": None}, result("x", "abcdefgh1", "weather")], OPEN),
    "documents": Chat([USER], OPEN | {"documents": DOCUMENTS}),
    "documents and tools": Chat([USER], OPEN | {"documents": DOCUMENTS, "tools": [WEATHER]}),
    "thoughts in a field": Chat([USER, {**SUN, "reasoning_content": "Hm.\n"}, AGAIN], OPEN),
    "thoughts under another name": Chat([USER, {**SUN, "reasoning": "Hm."}], {"add_generation_prompt": False}),
    "thoughts before a call": Chat(
        [USER, calling(KYOTO, reasoning_content="Ask."), result("rain", "abcdefgh1", "weather")], OPEN
    ),
    "thoughts in the text": Chat(
        [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nDry."}], {"add_generation_prompt": False}
    ),
    "continued": Chat([SYSTEM, USER, {"role": "assistant", "content": "It is"}], CONTINUE),
    "continued behind blanks": Chat([USER, {"role": "assistant", "content": "It is \n"}], CONTINUE),
    "continued thoughts": Chat(
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Well"}],
        {"continue_final_message": "reasoning_content"},
    ),
    "continued question": Chat([USER, SUN, AGAIN], CONTINUE),
    "variables": Chat(
        [USER],
        OPEN,
        {
            "enable_thinking": False,
            "thinking": True,
            "date_string": "1 May",
            "today": "May 1",
            "reasoning_effort": "high",
            "controls": {"citations": True, "length": "short"},
            "bos_token": "<begin>",
        },
    ),
}


def sources_of(family: str) -> dict[str, str]:
    """`family.jinja`, and `family.name.jinja` for further ones, as files of a model say them."""
    texts = {path.name.split(".")[1]: path.read_text() for path in DIRECTORY.glob(f"{family}.*jinja")}
    return {("default" if name == "jinja" else name): text for name, text in texts.items()}


@cache
def template_of(family: str) -> ChatTemplate:
    template = ChatTemplate(sources_of(family), TOKENS)
    assert template.failure is None
    return template


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    sources = sources_of(family)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        chat_template=sources if len(sources) > 1 else sources["default"],
        **TOKENS,
    )


FAMILIES = sorted({path.name.split(".")[0] for path in DIRECTORY.glob("*.jinja")})
WANT_TEXT_ARGUMENTS = {"deepseek"}
WANT_PARTS = {"vision"}
CELLS = [(family, name) for family in FAMILIES for name in CHATS]


def ours(family: str, chat: Chat, template_name: str | None = None) -> str | None:
    """None where the chat is refused."""
    messages = template_messages(msgspec.convert(chat.messages, list[Message]))
    try:
        return template_of(family).render(messages, variables=chat.variables, name=template_name, **chat.options).text
    except InvalidRequest:
        return None


def theirs(family: str, chat: Chat, template_name: str | None = None) -> str | None:
    messages = [as_transformers_wants(message, family) for message in chat.messages]
    try:
        return tokenizer_of(family).apply_chat_template(
            messages, tokenize=False, chat_template=template_name, **chat.options, **chat.variables
        )
    except Exception:  # whatever a template raises
        return None


def check(family: str, chat: Chat, template_name: str | None = None) -> str | None:
    """-> what both render."""
    expected = theirs(family, chat, template_name)
    rendered = ours(family, chat, template_name)
    if rendered != expected:
        expected = theirs(family, chat, template_name)  # a template that writes the date may have met midnight
    assert rendered == expected, [message["role"] for message in chat.messages]
    return rendered


def as_transformers_wants(message: dict[str, Any], family: str) -> dict[str, Any]:
    """What a user of transformers gives by hand where OpenAI's shape is another."""
    message = message | {"content": message["content"] or ""}
    if family in WANT_PARTS:
        message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    if "tool_calls" in message and family not in WANT_TEXT_ARGUMENTS:
        calls = [dict(one, function=dict(one["function"])) for one in message["tool_calls"]]
        for one in calls:
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        message["tool_calls"] = calls
    return message


@pytest.mark.row("B: Chat templates: bos and eos, tools, date, raise_exception")
@pytest.mark.fault("TGI#2986", "vllm#25108", "mistral.rs#45", "transformers#45419", "minijinja#815")
@pytest.mark.parametrize(("family", "name"), CELLS)
def test_a_chat_is_rendered_as_transformers_renders_it(family: str, name: str) -> None:
    check(family, CHATS[name])


@pytest.mark.parametrize("name", CHATS)
def test_a_template_that_is_named_is_rendered_as_transformers_renders_it(name: str) -> None:
    rendered = check("command", CHATS[name], "rag")
    assert rendered is None or rendered != ours("command", CHATS[name])


def test_the_table_is_wide_and_most_of_it_is_text() -> None:
    assert len(FAMILIES) >= 15
    assert len(CHATS) >= 12
    refused = [(family, name) for family, name in CELLS if theirs(family, CHATS[name]) is None]
    assert len(refused) < len(CELLS) / 5
    for family in FAMILIES:
        assert len(CHATS) - sum(1 for one, _ in refused if one == family) >= 8, family


CONSTRUCTS = {
    "namespace": r"namespace\(",
    "break": r"{%-? break",
    "continue": r"{%-? continue",
    "macro": r"{%-? macro",
    "call block": r"{%-? call ",
    "set block": r"{%-? set \w+ -?%}",
    "generation block": r"{%-? generation",
    "tojson with indent": r"tojson\(indent=",
    "tojson with separators and order": r"tojson\(separators=.*sort_keys=",
    "strftime_now": r"strftime_now\(",
    "raise_exception": r"raise_exception\(",
    "tools": r"\btools\b",
    "documents": r"\bdocuments\b",
    "reasoning_content": r"\.reasoning_content",
    "thinking": r"\.thinking",
    "reverse slice": r"\[::-1\]",
    "slice": r"\[1:\]",
    "negative index": r"\[-1\]",
    "loop attributes": r"loop\.(first|index0)",
    "loop.last": r"loop\.last",
    "loop neighbours": r"loop\.(previtem|nextitem)",
    "loop filter": r"{%-? for .* if .*-?%}",
    "selectattr": r"selectattr\(",
    "rejectattr": r"rejectattr\(",
    "map": r"map\(attribute=",
    "items": r"\.items\(\)",
    "keys": r"\.keys\(\)",
    "split": r"\.split\(",
    "strip": r"\.strip\(",
    "lstrip": r"\.lstrip\(",
    "startswith": r"\.startswith\(",
    "endswith": r"\.endswith\(",
    "is defined": r"is defined",
    "is not defined": r"is not defined",
    "is none": r"is none",
    "is string": r"is string",
    "is mapping": r"is mapping",
    "is iterable": r"is iterable",
    "is sequence": r"is sequence",
    "is false": r"is false",
    "is even": r"is even",
    "default": r"\| default\(",
    "join": r"\| join\(",
    "trim": r"\| trim",
    "length": r"\| length",
    "replace": r"\| replace\(",
    "upper": r"\| upper",
    "title": r"\| title",
    "capitalize": r"\| capitalize",
    "sort and unique": r"\| sort \| unique",
    "indent": r"\| indent\(",
    "string": r"\| string",
    "concatenation": r" ~ ",
    "condition in an expression": r" if .* else .*}}",
    "tuple assignment": r"{%-? set \w+, \w+ =",
    "comment": r"{#",
    "dict literal": r"{%-? set \w+ = {\"",
}


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_the_templates_use_what_templates_use(construct: str) -> None:
    texts = [path.read_text() for path in DIRECTORY.glob("*.jinja")]
    assert any(re.search(CONSTRUCTS[construct], text) for text in texts)


def scrambled() -> Iterator[Chat]:
    """Every order of a few messages: templates that look at neighbours meet all of them."""
    pool = [SYSTEM, USER, SUN, calling(KYOTO), result("rain", "abcdefgh1", "weather")]
    for first in pool:
        for second in pool:
            for third in pool:
                yield Chat([first, second, third], OPEN)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_order_of_messages_is_rendered_alike(family: str) -> None:
    for chat in scrambled():
        check(family, chat)


WORDS = st.sampled_from(["name", "arguments", "function", "parameters", "properties", "type", "items", "text", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=4)
MESSAGES = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool", "developer", ""]),
        content=st.text(max_size=10),
        tool_calls=st.none() | st.lists(OBJECTS | st.builds(lambda inner: {"function": inner}, OBJECTS), max_size=2),
        tool_call_id=st.none() | st.text(max_size=9),
        reasoning=st.none() | st.text(max_size=5),
    ),
    max_size=4,
)


@pytest.mark.fault("llama.cpp#14051")
@given(
    families=st.lists(st.sampled_from(FAMILIES), min_size=6, max_size=6, unique=True),
    messages=MESSAGES,
    tools=st.none() | st.lists(OBJECTS, max_size=2),
    documents=st.none() | st.lists(OBJECTS, max_size=2),
    variables=st.dictionaries(st.sampled_from(["bos_token", "today", "controls", "raise_exception"]), JSON),
    add_generation_prompt=st.none() | st.booleans(),
    continue_final_message=st.none() | st.booleans() | st.just("thinking"),
)
def test_no_chat_does_more_than_be_refused(families: list[str], messages: list[Message], **options: Any) -> None:
    chat = template_messages(messages)
    for family in families:
        with contextlib.suppress(InvalidRequest):
            assert isinstance(template_of(family).render(chat, **options).text, str)
