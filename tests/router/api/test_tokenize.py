from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, serving
from tests.fakes.backend import HELLO, ScriptedBackend
from tests.fakes.tokenizer import BOS, BOS_ID, byte_tokenizer, unpacked
from tgi.router.api.tokenize import LONG_TEXT

WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
SHOWS_ALL = (
    "{{ chat_mood }}{{ documents | tojson }}"
    "{% for m in messages %}[{{ m.role }}{{ m.tool_call_id }}{{ m.tool_calls | tojson if m.tool_calls }}]"
    "{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ '>' if add_generation_prompt }}"
)
USER = [{"role": "user", "content": "Hi é"}]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    """Tokenizer and template both write BOS."""
    tokenizer = byte_tokenizer(chat_template=WRITES_BOS, adds_bos=True)
    with serving(tokenizer=tokenizer, payload_limit=200_000) as app:
        app.backend.script = HELLO
        yield app


def chat_tokens(app: App, **body: Any) -> dict[str, Any]:
    answer = app.post("/chat_tokenize", body)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.row("B: /chat_tokenize")
def test_a_chats_tokens_lie_in_the_bytes_of_its_text(app: App) -> None:
    answer = app.post("/chat_tokenize", {"messages": USER})
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json) == ["tokenize_response", "templated_text"]
    text = answer.json["templated_text"]
    assert text == f"{BOS}user: Hi é\n"
    slices = answer.json["tokenize_response"]
    assert [list(one) for one in slices] == [["id", "text", "start", "stop"]] * len(slices)
    assert slices[0] == {"id": BOS_ID, "text": BOS, "start": 0, "stop": 3}
    assert slices[-1] == {"id": ord("\n"), "text": "\n", "start": 14, "stop": 15}
    assert [one["id"] for one in slices[1:]] == list(text[3:].encode())


@pytest.mark.fault("sglang#888")
@pytest.mark.parametrize("body", [{}, {"add_special_tokens": True}])
def test_bos_stands_once_and_the_counts_agree(app: App, body: dict[str, Any]) -> None:
    slices = chat_tokens(app, messages=USER, **body)["tokenize_response"]
    ids = [one["id"] for one in slices]
    assert ids.count(BOS_ID) == 1
    answer = app.post("/v1/chat/completions", {"messages": USER, **body})
    assert answer.status == 200, answer.body
    assert unpacked(app.backend.requests[-1].prompt_ids) == ids
    assert answer.json["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.fault("TGI#3203", "sglang#888")
def test_a_chats_text_sent_to_the_native_route_is_the_same_prompt(app: App) -> None:
    tokens = chat_tokens(app, messages=USER)
    ids = [one["id"] for one in tokens["tokenize_response"]]
    inputs = {"inputs": tokens["templated_text"]}
    assert app.post("/generate", inputs).status == 200
    assert unpacked(app.backend.requests[-1].prompt_ids) == ids
    assert app.post("/tokenize", inputs).json == tokens["tokenize_response"]
    app.post("/generate", {"inputs": "Hi"})
    assert unpacked(app.backend.requests[-1].prompt_ids) == [BOS_ID, *b"Hi"], "added where it is not there"


def test_a_long_chat_is_told_alike(app: App) -> None:
    text = "é" * LONG_TEXT
    tokens = chat_tokens(app, messages=[{"role": "user", "content": text}])
    assert len(tokens["tokenize_response"]) == 1 + len(f"user: {text}\n".encode())
    assert tokens["tokenize_response"][-1]["stop"] == len(tokens["templated_text"].encode())


def test_no_permit_is_needed(app: App) -> None:
    with serving(ScriptedBackend(None), max_concurrent_requests=1) as small:
        small.open("/generate", {"inputs": "x"})
        small.backend.next_playing()
        assert small.post("/generate", {"inputs": "x"}).status == 429
        assert small.post("/chat_tokenize", {"messages": USER}).status == 200


def test_the_key_is_needed() -> None:
    with serving(api_key="k") as locked:
        assert locked.post("/chat_tokenize", {"messages": USER}).status == 401
        assert locked.post("/chat_tokenize", {"messages": USER}, {"authorization": "Bearer k"}).status == 200


@pytest.fixture(scope="module")
def mirror() -> Iterator[App]:
    with serving(chat_template=SHOWS_ALL, payload_limit=200_000) as mirror:
        yield mirror


@pytest.mark.fault("TGI#2986", "vllm#13978", "vllm#25001", "transformers#45419")
def test_structure_reaches_the_template(mirror: App) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}],
            "tool_call_id": "c1",
        },
        {"role": "assistant", "content": "y", "reasoning": "z"},
        {"role": "user", "content": "![](http://127.0.0.1:1/cat.png)"},
    ]
    assert chat_tokens(mirror, messages=messages)["templated_text"] == (
        "null[assistant]x"
        '[assistant[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]]'
        "[toolc1]rain[assistant]yz[user]![](http://127.0.0.1:1/cat.png)>"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "null[user]Hi[assistant]Once"),
        ({"add_generation_prompt": True}, "null[user]Hi[assistant]Once >"),
        ({"add_generation_prompt": False}, "null[user]Hi[assistant]Once "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "null[user]Hi[assistant]Once "),
        ({"documents": [{"text": "é"}]}, '[{"text": "é"}][user]Hi[assistant]Once'),
        ({"chat_template_kwargs": {"chat_mood": "!"}}, "!null[user]Hi[assistant]Once"),
        ({"chat_template": "default"}, "null[user]Hi[assistant]Once"),
    ],
)
def test_fields_of_the_template(mirror: App, fields: dict[str, Any], text: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once "}]
    assert chat_tokens(mirror, messages=messages, **fields)["templated_text"] == text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template": "{{ messages }}"}, "`chat_template` must be the name of one of this model's templates"),
        ({"chat_template_kwargs": {"messages": []}}, "`chat_template_kwargs` cannot set `messages`"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_mood": {"a": ["b", None]}}, "documents": ["x"]}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": "role"}, "must be a boolean"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "needs `content` or `tool_calls`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "is an image"),
    ],
)
@pytest.mark.parametrize(("path", "status"), [("/chat_tokenize", 422), ("/v1/chat/completions", 400)])
def test_what_cannot_be_is_refused(mirror: App, fields: dict[str, Any], told: str, path: str, status: int) -> None:
    answer = mirror.post(path, {"messages": USER, **fields})
    assert answer.status == status, answer.body
    assert told in answer.body.decode()


@pytest.mark.fault("TGI#1743", "vllm#25108", "mistral.rs#45")
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "Template error: template not found"),
        ("{% if %}", "Template error: the model's chat template does not compile"),
        ("{{ raise_exception('No such role') }}", "Template error: No such role"),
    ],
)
def test_a_templates_error_is_told_in_the_routes_own_form(template: str | None, told: str) -> None:
    with serving(chat_template=template) as broken:
        answer = broken.post("/chat_tokenize", {"messages": USER})
        assert (answer.status, answer.json["error_type"]) == (422, "template_error")
        assert answer.json["error"].startswith(told)
        assert broken.post("/tokenize", {"inputs": "x"}).status == 200
