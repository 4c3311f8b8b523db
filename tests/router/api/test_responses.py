"""POST /v1/responses in OpenAI's shapes, and with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response as ClientsResponse
from pydantic import BaseModel

from tests.fakes.app import Answer, App, read_until, serving
from tests.fakes.backend import EOS, HELLO, Said, Script, ScriptedBackend
from tests.fakes.tokenizer import unpacked
from tgi.enums import FinishReason
from tgi.errors import ContextTooLong, GenerationFailed, Overloaded, Unavailable
from tgi.router.backend import TopToken
from tgi.router.validation.parameters import Limits

RESPONSES = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    }
]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
CALLS = f'[{CALL}, {{"name": "weather", "arguments": {{"city": "Bonn"}}}}]'

# Shows roles, calls, results and thoughts.
SPELLED_OUT = (
    "{% for m in messages %}{{ m.role }}({{ m.name or '' }}{{ m.tool_call_id or '' }}): "
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}{{ '\n' }}{% endfor %}{{ reasoning_effort or 'none' }}"
)
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{# answers begin with <think> #}"


def spoken(text: str, size: int = 1, reason: FinishReason = FinishReason.EOS_TOKEN) -> Script:
    """`size`: characters a token."""
    tokens = [Said(text[at : at + size]) for at in range(0, len(text), size)]
    return Script([*tokens, EOS] if reason is FinishReason.EOS_TOKEN else tokens, reason)


def ask(app: App, **body: Any) -> Answer:
    return app.post(RESPONSES, {"model": "gpt", "input": "Hi", **body})


def events_of(app: App, **body: Any) -> list[dict[str, Any]]:
    """Checks what holds for every stream: names, numbers, ids, and that the deltas are what the ends say."""
    answer = ask(app, stream=True, **body)
    assert answer.status == 200, answer.body
    events = [(name, json.loads(payload)) for name, payload in answer.named_events]
    assert all(name == event["type"] for name, event in events)
    events = [event for _, event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    for index, item in enumerate(items):
        joined = "".join(event["delta"] for event in events if "delta" in event and event["output_index"] == index)
        assert joined == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return events


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Without their prefix; of deltas that follow each other one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def prompt_of(app: App) -> str:
    return bytes(unpacked(app.backend.requests[-1].prompt_ids)).decode()


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
THOUGHT = [
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
]
A_CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(scope="module")
def tool_app() -> Iterator[App]:
    """Its template does not know tools, so a call is a JSON object."""
    limits = Limits(max_input_tokens=2000, max_total_tokens=4000, vocab_size=300)
    with serving(limits=limits) as app:
        yield app


@pytest.fixture(scope="module")
def spelling_app() -> Iterator[App]:
    limits = Limits(max_input_tokens=2000, max_total_tokens=4000, vocab_size=300)
    with serving(chat_template=SPELLED_OUT, limits=limits) as app:
        app.backend.script = HELLO
        yield app


@pytest.fixture(scope="module")
def thinking_app() -> Iterator[App]:
    with serving(chat_template=THINKS) as app:
        app.backend.script = spoken("<think>Hm.</think>Yes")
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


@pytest.fixture
def client(tool_app: App) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{tool_app.port}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_an_answer(app: App) -> None:
    app.backend.script = Script(HELLO.tokens, num_cached=16)
    answer = ask(app, metadata={"a": "b"}, store=True, truncation="auto", user="u", prompt_cache_key="k")
    assert answer.status == 200
    assert answer.headers["x-prompt-tokens"] == "20"
    told = answer.json
    assert told["id"].startswith("resp_")
    assert told["completed_at"] >= told["created_at"]
    (item,) = told["output"]
    assert item == {
        "type": "message",
        "id": item["id"],
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}],
    }
    assert item["id"].startswith("msg_")
    assert {key: value for key, value in told.items() if key not in ("id", "created_at", "completed_at", "output")} == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "gpt",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 23,
        },
        "user": "u",
        "metadata": {"a": "b"},
    }
    assert prompt_of(app) == "user: Hi\nassistant: "


def test_what_the_request_said_is_said_again(app: App) -> None:
    said = {
        "instructions": "Be",
        "max_output_tokens": 50,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": TOOLS,
        "top_p": 0.75,
    }
    answer = ask(app, **said).json
    assert {key: answer[key] for key in said} == said
    choice = {"type": "function", "name": "weather"}
    assert events_of(app, **said | {"tool_choice": "none"})[0]["response"]["tools"] == TOOLS
    assert app.post(RESPONSES, {"input": "Hi"}).json["model"] == "test/model"
    with serving(limits=Limits(max_input_tokens=2000, max_total_tokens=4000, vocab_size=300)) as roomy:
        assert ask(roomy, tools=TOOLS, tool_choice=choice).json["tool_choice"] == choice


def test_a_stream(app: App) -> None:
    app.backend.script = Script(HELLO.tokens, num_cached=16)
    events = events_of(app)
    assert types_of(events) == ["created", "in_progress", *TEXT, "completed"]
    created, in_progress, added, part_added, first, second, done, part_done, item_done, completed = events
    start = created["response"]
    assert start == in_progress["response"]
    assert (start["status"], start["output"], start["usage"], start["completed_at"]) == ("in_progress", [], None, None)
    item_id = added["item"]["id"]
    assert added == {
        "type": "response.output_item.added",
        "sequence_number": 2,
        "output_index": 0,
        "item": {"type": "message", "id": item_id, "status": "in_progress", "role": "assistant", "content": []},
    }
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert part_added == {"type": "response.content_part.added", "sequence_number": 3, **place, "part": empty}
    assert [first["delta"], second["delta"]] == ["Hello", " world"]
    assert first == {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        **place,
        "delta": "Hello",
        "logprobs": [],
    }
    assert (done["text"], part_done["part"]) == ("Hello world", {**empty, "text": "Hello world"})
    assert item_done["item"] == {**added["item"], "status": "completed", "content": [part_done["part"]]}
    end = completed["response"]
    plain = ask(app).json
    assert end["output"] == [item_done["item"]]
    assert end["usage"] == plain["usage"]
    assert list(end) == list(plain)
    assert end["id"] == start["id"]


def test_an_answer_that_says_nothing_is_an_empty_text(app: App) -> None:
    app.backend.script = Script((EOS,))
    (item,) = ask(app).json["output"]
    assert item["content"][0]["text"] == ""
    assert types_of(events_of(app)) == ["created", "in_progress", *TEXT, "completed"]


def test_an_answer_that_the_length_cuts_is_incomplete(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("b")), FinishReason.LENGTH)
    answer = ask(app, max_output_tokens=2).json
    assert app.backend.requests[-1].stopping.max_new_tokens == 2
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    events = events_of(app, max_output_tokens=2)
    assert types_of(events) == ["created", "in_progress", *TEXT, "incomplete"]
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


def test_parameters_reach_the_backend(app: App) -> None:
    body = {
        "stop": ["a", "b"],
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "seed": 7,
        "min_tokens": 2,
        "cache_salt": "s",
        "include": ["reasoning.encrypted_content"],
    }
    answer = app.post(RESPONSES, {"input": "Hi", "max_output_tokens": 5, **body}, {"x-tgi-priority": "3"})
    assert answer.status == 200, answer.body
    request = app.backend.requests[-1]
    assert (request.stopping.stop_strings, request.stopping.max_new_tokens) == (("a", "b"), 5)
    assert request.stopping.min_new_tokens == 2
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.75, 0.25)
    assert (sampling.seed, request.cache_salt, request.priority) == (7, "s", 3)


@pytest.mark.parametrize(
    ("body", "client"), [({}, ""), ({"user": "u"}, "u"), ({"user": "u", "safety_identifier": "s"}, "s")]
)
def test_whose_request_it_is(app: App, body: dict[str, str], client: str) -> None:
    assert app.post(RESPONSES, {"input": "Hi", **body}).status == 200
    assert app.backend.requests[-1].client == client


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_text(app: App, stream: bool) -> None:
    """Of each of its tokens, with those that show nothing by themselves, and without the end."""
    top = (TopToken(ord("a"), "a", -0.25, False), TopToken(ord("b"), "b", -0.5, False))
    parts = "é".encode()
    app.backend.script = Script((Said("a", ord("a"), top=top), Said("", parts[0]), Said("é", parts[1]), EOS))
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = events_of(app, **wanted)
        told = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert [len(entries) for entries in deltas] == [1, 2]
        assert [entry for entries in deltas for entry in entries] == told
        (done,) = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == told
    else:
        told = ask(app, **wanted).json["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for entry in told for byte in entry["bytes"]).decode() == "aé"
    assert [alternative["token"] for alternative in told[0]["top_logprobs"]] == ["a", "b"]
    assert ask(app, top_logprobs=2).json["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "name": "weather"}])
def test_a_call(tool_app: App, choice: Any) -> None:
    tool_app.backend.script = spoken(CALL)
    answer = ask(tool_app, tools=TOOLS, tool_choice=choice).json
    (item,) = answer["output"]
    assert item == {
        "type": "function_call",
        "id": item["id"],
        "status": "completed",
        "call_id": item["call_id"],
        "name": "weather",
        "arguments": '{"city": "Ulm"}',
    }
    assert item["id"].startswith("fc_")
    assert item["call_id"]
    assert answer["status"] == "completed"
    assert (tool_app.backend.requests[-1].grammar is not None) == (choice not in (None, "auto"))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 200])
def test_streamed_calls_however_they_are_cut(tool_app: App, size: int) -> None:
    tool_app.backend.script = spoken(f"Let me see. {CALLS}", size)
    events = events_of(tool_app, tools=TOOLS)
    assert types_of(events) == ["created", "in_progress", *TEXT, *A_CALL, *A_CALL, "completed"]
    text, *calls = events[-1]["response"]["output"]
    assert text["content"][0]["text"] == "Let me see."
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"][1:]
    assert added == [{**call, "status": "in_progress", "arguments": ""} for call in calls]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in done] == [
        (call["name"], call["arguments"]) for call in calls
    ]


def test_a_call_that_the_length_cuts_is_incomplete(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL[:45], reason=FinishReason.LENGTH)
    answer = ask(tool_app, tools=TOOLS).json
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")
    assert types_of(events_of(tool_app, tools=TOOLS))[-1] == "incomplete"


def test_one_call_where_several_are_not_wanted(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALLS)
    assert len(ask(tool_app, tools=TOOLS, parallel_tool_calls=False).json["output"]) == 1
    assert len(ask(tool_app, tools=TOOLS).json["output"]) == 2


def test_allowed_tools_are_all_that_the_model_sees(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL)
    tools = [*TOOLS, {"type": "function", "name": "clock"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    answer = ask(tool_app, tools=tools, tool_choice=choice)
    assert answer.json["output"][0]["name"] == "weather"
    assert answer.json["tool_choice"] == choice
    assert "clock" not in prompt_of(tool_app)
    assert tool_app.backend.requests[-1].grammar is not None


def test_thoughts_are_items_of_their_own(thinking_app: App) -> None:
    answer = ask(thinking_app).json
    thought, text = answer["output"]
    assert thought == {
        "type": "reasoning",
        "id": thought["id"],
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": None,
    }
    assert text["content"][0]["text"] == "Yes"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3
    events = events_of(thinking_app)
    assert types_of(events) == ["created", "in_progress", *THOUGHT, *TEXT, "completed"]
    assert events[-1]["response"]["usage"] == answer["usage"]


def test_a_conversation_in_the_templates_words(spelling_app: App) -> None:
    conversation = [
        {"role": "developer", "content": "Dev"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "1", "output": "Sun"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Rain"}]},
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": "B"},
    ]
    answer = ask(spelling_app, input=conversation, instructions="Be kind", reasoning={"effort": "high"})
    assert answer.status == 200, answer.body
    assert prompt_of(spelling_app).splitlines() == [
        "system(): Be kind",
        "",
        "Dev",
        "user(): A",
        "assistant(): <Hm>Let me see[1 weather Ulm][2 weather Bonn]",
        "tool(weather1): Sun",
        "tool(weather2): Rain",
        "assistant(): Well",
        "user(): B",
        "high",
    ]
    ask(spelling_app, input=[{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}])
    assert prompt_of(spelling_app).startswith("assistant(): <Hm>")
    sealed = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}
    ask(spelling_app, input=[{"role": "user", "content": "A"}, sealed, {"role": "user", "content": "B"}])
    assert prompt_of(spelling_app).splitlines() == ["user(): A", "user(): B", "none"]


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}},
    ],
)
def test_formats_become_a_grammar(app: App, format: dict[str, Any]) -> None:
    assert ask(app, text={"format": format}).status == 200
    assert app.backend.requests[-1].grammar is not None
    assert ask(app, text={"format": {"type": "text"}}).status == 200
    assert app.backend.requests[-1].grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "`max_output_tokens` must be strictly positive"),
        ({"max_output_tokens": 181}, "max_output_tokens", "`input` tokens + `max_output_tokens`"),
        ({"input": "a" * 150}, "input", "`input` must have less than"),
        ({"top_p": 2.0}, "top_p", "`top_p` must be"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps nothing"),
        ({"conversation": "conv_1"}, "conversation", "keeps nothing"),
        ({"prompt": {"id": "x"}}, "prompt", "keeps no prompts"),
        ({"background": True}, "background", "`background` is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "`input[0]` refers to an item"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "`web_search_call`"),
        ({"input": [{"type": "message", "content": "x"}]}, "input", "needs `role` and `content`"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "needs `call_id`"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "input", "needs `call_id`"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input",
            "`input[0].content[0]` is an image",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "is a file"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "has no text"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input", "takes `input_text` only"),
        ({"tools": [{"type": "web_search"}]}, "tools", "`web_search`"),
        ({"tools": [{"type": "function"}]}, "tools", "`tools[0].name` must not be empty"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "tool_choice", "`tool_choice` must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "name x not found"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "`tool_choice.mode`"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice",
            "names `x`",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["x"]}]}},
            "tool_choice",
            "`tool_choice.tools[0]` needs a `name`",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "`text.format.type` must be one of"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a `schema`"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "`text.format` and"),
        ({"input": 5}, "input", "input"),
        ({"input": None}, "input", "input"),
    ],
)
def test_what_cannot_be_is_refused_by_name(app: App, body: dict[str, Any], param: str, told: str, stream: bool) -> None:
    answer = ask(app, stream=stream, **body)
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert told in error["message"]
    assert app.services.infer.free_permits == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (GenerationFailed("x"), 424, "server_error"),
        (Unavailable("x"), 503, "server_error"),
        (Overloaded(retry_after_s=7), 429, "rate_limit_error"),
        (ContextTooLong("x", "input"), 400, "invalid_request_error"),
    ],
)
def test_errors_before_the_first_token_have_their_status(
    app: App, error: Any, status: int, kind: str, stream: bool
) -> None:
    app.backend.script = Script((), error=error)
    answer = ask(app, stream=stream)
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (GenerationFailed("out of luck"), 424, "server_error"),
        (Overloaded("out of luck"), 429, "rate_limit_exceeded"),
        (ContextTooLong("out of luck"), 400, "invalid_prompt"),
    ],
)
def test_an_error_in_a_stream_fails_the_response(app: App, error: Any, status: int, code: str) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=error)
    events = [json.loads(payload) for payload in ask(app, stream=True).events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *_, last, told, failed = events
    assert last["type"] == "response.output_text.delta"
    assert (told["type"], told["http_status_code"]) == ("error", status)
    assert "out of luck" in told["message"]
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", code)
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "a")


def test_the_key_is_asked_for() -> None:
    with serving(api_key="secret") as app:
        assert ask(app).status == 401
        assert app.post(RESPONSES, {"input": "Hi"}, {"authorization": "Bearer secret"}).status == 200


def test_hanging_up_cancels() -> None:
    with serving(ScriptedBackend(None)) as app:
        for stream in (False, True):
            client = app.open(RESPONSES, {"input": "Hi", "stream": stream})
            playing = app.backend.next_playing()
            if stream:
                playing.say("a")
                read_until(client, b"output_text.delta")
            client.close()
            assert playing.cancelled.wait(20)


def test_openais_client(client: OpenAI, tool_app: App) -> None:
    tool_app.backend.script = HELLO
    answer = client.responses.create(model="m", input="Hi")
    assert answer.output_text == "Hello world"
    # The client itself takes anything for an answer; its types do not.
    ClientsResponse.model_validate_json(answer.to_json())
    tool_app.backend.script = spoken(f"See. {CALLS}")
    ClientsResponse.model_validate_json(client.responses.create(model="m", input="Hi", tools=TOOLS).to_json())  # pyright: ignore
    with client.responses.stream(model="m", input="Hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == f"See. {CALLS}"


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_parses(client: OpenAI, tool_app: App, stream: bool) -> None:
    tool_app.backend.script = spoken('{"city": "Ulm"}', 4)
    if stream:
        with client.responses.stream(model="m", input="Hi", text_format=Weather) as events:
            answer = events.until_done().get_final_response()
    else:
        answer = client.responses.parse(model="m", input="Hi", text_format=Weather)
    assert answer.output_parsed == Weather(city="Ulm")
    assert tool_app.backend.requests[-1].grammar is not None


@pytest.mark.parametrize("size", [1, 5])
def test_openais_client_streams_calls_over_two_turns(client: OpenAI, tool_app: App, size: int) -> None:
    tool_app.backend.script = spoken(f"Let me see. {CALLS}", size)
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    with client.responses.stream(model="m", input=conversation, tools=TOOLS) as stream:  # pyright: ignore
        answer = stream.until_done().get_final_response()
    text, *calls = answer.output
    assert text.type == "message"
    assert [call.parsed_arguments for call in calls if call.type == "function_call"] == [
        {"city": "Ulm"},
        {"city": "Bonn"},
    ]
    conversation += [item.to_dict() for item in answer.output]
    conversation += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
        for call in calls
        if call.type == "function_call"
    ]
    tool_app.backend.script = spoken("Sun in both.", size)
    assert client.responses.create(model="m", input=conversation).output_text == "Sun in both."


def test_openais_client_raises_its_own_errors(client: OpenAI, tool_app: App) -> None:
    tool_app.backend.script = Script((), error=Overloaded())
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="m", input="Hi", previous_response_id="resp_1")
    tool_app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    events = list(client.responses.create(model="m", input="Hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
