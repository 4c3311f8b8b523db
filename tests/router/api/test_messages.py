"""POST /v1/messages in Anthropic's shapes, and with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.fakes.app import Answer, App, read_until, serving
from tests.fakes.backend import EOS, HELLO, Said, Script, ScriptedBackend
from tests.fakes.tokenizer import unpacked
from tgi.enums import FinishReason
from tgi.errors import ContextTooLong, GenerationFailed, Overloaded, Unavailable
from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.shared_fields import SharedFields
from tgi.router.validation.parameters import Limits

MESSAGES = "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "name": "weather",
        "description": "The weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
CALLS = f'[{CALL}, {{"name": "weather", "arguments": {{"city": "Bonn"}}}}]'

# Shows roles, calls, results, thoughts and the variable for them.
SPELLED_OUT = (
    "{% for m in messages %}{{ m.role }}({{ m.name or '' }}{{ m.tool_call_id or '' }}): "
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}{{ '\n' }}{% endfor %}{{ enable_thinking }}{% if tools %}{% endif %}"
)
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{# answers begin with <think> #}"


def spoken(text: str, size: int = 1, reason: FinishReason = FinishReason.EOS_TOKEN) -> Script:
    """`size`: characters a token."""
    tokens = [Said(text[at : at + size]) for at in range(0, len(text), size)]
    return Script([*tokens, EOS] if reason is FinishReason.EOS_TOKEN else tokens, reason)


def ask(app: App, **body: Any) -> Answer:
    return app.post(MESSAGES, {"model": "claude", "max_tokens": 50, "messages": USER, **body})


def events_of(app: App, **body: Any) -> list[dict[str, Any]]:
    answer = ask(app, stream=True, **body)
    assert answer.status == 200, answer.body
    events = [(name, json.loads(payload)) for name, payload in answer.named_events]
    assert all(name == event["type"] for name, event in events)
    return [event for _, event in events]


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Deltas of one kind that follow each other are told once."""
    names = [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in events]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def prompt_of(app: App) -> str:
    return bytes(unpacked(app.backend.requests[-1].prompt_ids)).decode()


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
        yield app


@pytest.fixture(scope="module")
def thinking_app() -> Iterator[App]:
    with serving(chat_template=THINKS) as app:
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


@pytest.fixture
def client(tool_app: App) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"http://127.0.0.1:{tool_app.port}", api_key="-", max_retries=0) as client:
        yield client


def test_what_is_shared_with_chats_are_fields_of_chats() -> None:
    assert set(SharedFields.__struct_fields__) <= set(ChatRequest.__struct_fields__)


@pytest.mark.fault("vllm#21313")
def test_an_answer(app: App) -> None:
    app.backend.script = Script(HELLO.tokens, num_cached=16)
    answer = ask(app)
    assert answer.status == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-prompt-tokens"] == "20"
    message_id = answer.json["id"]
    assert message_id.startswith("msg_")
    assert answer.json == {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 3,
        },
    }
    assert prompt_of(app) == "user: Hi\nassistant: "
    assert ask(app).json["id"] != message_id


@pytest.mark.fault("vllm#21313")
def test_a_stream(app: App) -> None:
    app.backend.script = Script(HELLO.tokens, num_cached=16)
    answer = ask(app, stream=True)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    start, *events = [json.loads(payload) for payload in answer.events]
    message = start["message"]
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 1,
        },
    }
    assert events == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " world"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 16,
                "output_tokens": 3,
            },
        },
        {"type": "message_stop"},
    ]
    names = [name for name, _ in answer.named_events]
    assert names == ["message_start", *(event["type"] for event in events)]


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [
        (Script((Said("a"), EOS)), "end_turn", None),
        (Script((Said("a"),), FinishReason.STOP_SEQUENCE, stop="END"), "stop_sequence", "END"),
        (Script((Said("a"),), FinishReason.STOP_SEQUENCE, stop=42), "end_turn", None),
        (Script((Said("a"),) * 50, FinishReason.LENGTH), "max_tokens", None),
        (Script((Said("a"),) * 49, FinishReason.LENGTH), "model_context_window_exceeded", None),
    ],
)
def test_reasons(app: App, script: Script, reason: str, sequence: str | None) -> None:
    app.backend.script = script
    answer = ask(app).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    (delta,) = [event["delta"] for event in events_of(app) if event["type"] == "message_delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_without_text_has_no_block(app: App) -> None:
    app.backend.script = Script((EOS,))
    assert ask(app).json["content"] == []
    assert types_of(events_of(app)) == ["message_start", "ping", "message_delta", "message_stop"]


def test_parameters_reach_the_backend(app: App) -> None:
    body = {
        "stop_sequences": ["a", "b"],
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 7,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "cache_salt": "s",
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }
    answer = app.post(MESSAGES, {"max_tokens": 5, "messages": USER, **body}, {"x-tgi-priority": "3"})
    assert answer.status == 200, answer.body
    assert answer.json["model"] == "test/model"
    request = app.backend.requests[-1]
    assert request.stopping.stop_strings == ("a", "b")
    assert (request.stopping.max_new_tokens, request.stopping.min_new_tokens, request.stopping.stop_ids) == (5, 2, (9,))
    assert not request.stopping.include_stop
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.75, 0.25)
    assert (sampling.seed, request.cache_salt, request.priority, request.client) == (7, "s", 3, "u")
    ask(app, temperature=0)
    assert not app.backend.requests[-1].sampling.do_sample


def test_a_length_beyond_the_context_is_cut(tool_app: App) -> None:
    tool_app.backend.script = HELLO
    assert ask(tool_app, max_tokens=32_000).status == 200
    assert tool_app.backend.requests[-1].stopping.max_new_tokens == 4000 - 20


@pytest.mark.fault("vllm#21313")
@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call(tool_app: App, choice: Any) -> None:
    tool_app.backend.script = spoken(CALL)
    answer = ask(tool_app, tools=TOOLS, tool_choice=choice).json
    (block,) = answer["content"]
    assert block == {"type": "tool_use", "id": block["id"], "name": "weather", "input": {"city": "Ulm"}}
    assert block["id"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    is_forced = choice is not None and choice["type"] != "auto"
    assert (tool_app.backend.requests[-1].grammar is not None) == is_forced


def test_a_stop_sequence_within_a_call_makes_it_no_call(tool_app: App) -> None:
    tokens = [Said(character, ord(character)) for character in CALL[:-6]]
    tool_app.backend.script = Script(tokens, FinishReason.STOP_SEQUENCE, stop="m")
    answer = ask(tool_app, tools=TOOLS).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "m")


@pytest.mark.fault("vllm#21313")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 200])
def test_streamed_calls_however_they_are_cut(tool_app: App, size: int) -> None:
    tool_app.backend.script = spoken(f"Let me see. {CALLS}", size)
    events = events_of(tool_app, tools=TOOLS)
    call = ["content_block_start", "input_json_delta", "content_block_stop"]
    head, tail = ["message_start", "ping"], ["message_delta", "message_stop"]
    text = ["content_block_start", "text_delta", "content_block_stop"]
    assert types_of(events) == [*head, *text, *call, *call, *tail]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(start["type"], start.get("name"), start.get("input")) for start in starts] == [
        ("text", None, None),
        ("tool_use", "weather", {}),
        ("tool_use", "weather", {}),
    ]
    inputs = {1: "", 2: ""}
    for event in events:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            inputs[event["index"]] += event["delta"]["partial_json"]
    assert [json.loads(text) for text in inputs.values()] == [{"city": "Ulm"}, {"city": "Bonn"}]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_one_call_where_several_are_not_wanted(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(tool_app, tools=TOOLS, tool_choice=choice).json["content"]) == 1
    assert len(ask(tool_app, tools=TOOLS).json["content"]) == 2


def test_tools_that_must_not_be_called_are_text(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL)
    answer = ask(tool_app, tools=TOOLS, tool_choice={"type": "none"}).json
    assert answer["content"] == [{"type": "text", "text": CALL}]
    assert "weather" not in prompt_of(tool_app)


def test_a_call_that_the_length_cuts(tool_app: App) -> None:
    """Its input would be no JSON: it is empty, and the reason says why."""
    script = spoken(CALL[:45], reason=FinishReason.LENGTH)
    tool_app.backend.script = script
    answer = ask(tool_app, tools=TOOLS, max_tokens=len(script.tokens)).json
    assert answer["content"][0]["input"] == {}
    assert answer["stop_reason"] == "max_tokens"
    events = events_of(tool_app, tools=TOOLS, max_tokens=len(script.tokens))
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_conversation_with_tools_in_the_templates_words(spelling_app: App) -> None:
    spelling_app.backend.script = HELLO
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "user", "content": "C"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Ulm"}},
                {"type": "tool_use", "id": "2", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Now?"},
                {"type": "tool_result", "tool_use_id": "1", "content": "Sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "text", "text": "no "}, {"type": "text", "text": "net"}],
                    "is_error": True,
                },
            ],
        },
    ]
    system = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "kind"}]
    answer = ask(spelling_app, messages=conversation, system=system, tools=TOOLS)
    assert answer.status == 200, answer.body
    assert prompt_of(spelling_app).splitlines() == [
        "system(): Be kind",
        "user(): AB",
        "",
        "C",
        "assistant(): <Hm>Let me see[1 weather Ulm][2 weather Bonn]",
        "tool(weather1): Sun",
        "tool(weather2): Error: no net",
        "user(): Now?",
        "False",
    ]


def test_the_last_turn_of_the_assistant_is_continued(app: App) -> None:
    ask(app, messages=[*USER, {"role": "assistant", "content": [{"type": "text", "text": "Once upon "}]}])
    assert prompt_of(app) == "user: Hi\nassistant: Once upon"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "False"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True"),
        ({"thinking": {"type": "adaptive"}}, "True"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True"),
    ],
)
def test_the_template_hears_whether_thoughts_are_wanted(spelling_app: App, body: dict[str, Any], word: str) -> None:
    spelling_app.backend.script = HELLO
    assert ask(spelling_app, **body).status == 200
    assert prompt_of(spelling_app).endswith(word)


def test_thoughts_are_blocks_of_their_own(thinking_app: App) -> None:
    thinking_app.backend.script = spoken("<think>Hm.</think>Yes")
    answer = ask(thinking_app).json
    thought, text = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": thought["signature"]}
    assert thought["signature"]
    assert text == {"type": "text", "text": "Yes"}
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] >= 3
    events = events_of(thinking_app)
    assert types_of(events) == [
        "message_start",
        "ping",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"] == answer["usage"]


def test_an_output_format_becomes_a_grammar(app: App) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert ask(app, output_config={"format": {"type": "json_schema", "schema": schema}}).status == 200
    assert app.backend.requests[-1].grammar is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": 0}, "`max_tokens` must be strictly positive"),
        ({"top_p": 2.0}, "`top_p` must be"),
        ({"stop_sequences": ["a"] * 5}, "`stop_sequences` supports up to 4"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "`messages[0].role` must be `user` or `assistant`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "`messages[0].content[0]` is an image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "is a document"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no `text`"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs a `tool_use_id`"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "`messages[0].content[0].content[0]` is an image",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "needs `id`, `name` and `input`"),
        ({"system": [{"type": "image"}]}, "`system[0]` is an image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`web_search_20250305`"),
        ({"tools": [{"type": "mcp_toolset"}]}, "`mcp_toolset`"),
        ({"tools": [{"input_schema": {}}]}, "`tools[0].name` must not be empty"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "`tool_choice.type` must be one of"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "needs a `name`"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "wether"}}, "Tool with name wether not found"),
        ({"thinking": {"type": "hard"}}, "`thinking.type` must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format` must be"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "guided_regex": "a"},
            "`output_config.format` and `guided_regex` exclude each other",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "`messages` must not be empty"),
    ],
)
def test_what_cannot_be_is_refused_by_name(app: App, body: dict[str, Any], told: str, stream: bool) -> None:
    answer = ask(app, stream=stream, **body)
    assert answer.status == 400, answer.body
    assert answer.json == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": answer.json["error"]["message"]},
        "request_id": answer.headers["request-id"],
    }
    assert told in answer.json["error"]["message"]
    assert app.services.infer.free_permits == 8


def test_the_length_must_be_given(app: App) -> None:
    answer = app.post(MESSAGES, {"messages": USER})
    assert answer.status == 400
    assert "missing field `max_tokens`" in answer.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (GenerationFailed("x"), 500, "api_error"),
        (Unavailable("x"), 503, "api_error"),
        (Overloaded(retry_after_s=7), 429, "rate_limit_error"),
        (ContextTooLong("x", "messages"), 400, "invalid_request_error"),
    ],
)
def test_errors_before_the_first_token_have_their_status(
    app: App, error: Exception, status: int, kind: str, stream: bool
) -> None:
    app.backend.script = Script((), error=error)  # pyright: ignore[reportArgumentType]
    answer = app.post(MESSAGES, {"max_tokens": 5, "messages": USER, "stream": stream}, {"x-request-id": "mine"})
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert answer.json["request_id"] == answer.headers["request-id"] == "mine"
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


def test_agents_see_that_a_prompt_is_too_long(app: App) -> None:
    answer = ask(app, messages=[{"role": "user", "content": "a" * 150}])
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("prompt is too long: ")


def test_an_error_in_a_stream_is_its_last_event(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    *before, (name, payload) = ask(app, stream=True).named_events
    assert [name for name, _ in before][-1] == "content_block_delta"
    assert name == "error"
    event = json.loads(payload)
    assert event == {
        "type": "error",
        "error": {"type": "api_error", "message": "Request failed during generation: Server error: out of luck"},
        "request_id": event["request_id"],
    }


def test_errors_of_no_handler(app: App) -> None:
    for answer, status, kind in (
        (app.get(MESSAGES), 405, "invalid_request_error"),
        (app.post("/v1/messages/batches", {}), 404, "not_found_error"),
        (app.post(MESSAGES, raw=b"{"), 400, "invalid_request_error"),
        (app.post(MESSAGES, raw=b" " * 30_000), 413, "request_too_large"),
        (app.post(MESSAGES, raw=b"x", headers={"content-type": "text/plain"}), 415, "invalid_request_error"),
    ):
        assert (answer.status, answer.json["error"]["type"]) == (status, kind)
        assert answer.json["type"] == "error"


def test_the_key_under_anthropics_name() -> None:
    with serving(api_key="secret") as app:
        answer = ask(app)
        assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")
        body = {"max_tokens": 5, "messages": USER}
        assert app.post(MESSAGES, body, {"x-api-key": "secret", "anthropic-version": "2023-06-01"}).status == 200


def test_hanging_up_cancels() -> None:
    with serving(ScriptedBackend(None)) as app:
        for stream in (False, True):
            client = app.open(MESSAGES, {"max_tokens": 5, "messages": USER, "stream": stream})
            playing = app.backend.next_playing()
            if stream:
                playing.say("a")
                read_until(client, b"text_delta")
            client.close()
            assert playing.cancelled.wait(20)


def test_counting_tokens(app: App, tool_app: App) -> None:
    num_scheduled = len(app.backend.requests)
    answer = app.post(f"{MESSAGES}/count_tokens", {"model": "claude", "messages": USER})
    assert (answer.status, answer.json) == (200, {"input_tokens": 20})
    assert answer.headers["request-id"]
    assert len(app.backend.requests) == num_scheduled
    tool_app.backend.script = HELLO
    body = {"messages": USER, "system": "Be kind", "tools": TOOLS}
    counted = tool_app.post(f"{MESSAGES}/count_tokens", body).json["input_tokens"]
    assert counted == ask(tool_app, **body).json["usage"]["input_tokens"]
    refused = app.post(f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.fault("vllm#21313")
def test_anthropics_client(client: Anthropic, tool_app: App) -> None:
    tool_app.backend.script = HELLO
    message = client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "Hi"}])
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello world"}]
    assert message._request_id
    count = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hi"}])
    assert count.input_tokens == message.usage.input_tokens == 20


@pytest.mark.fault("vllm#21313")
@pytest.mark.parametrize("size", [1, 5])
def test_anthropics_client_streams_calls_over_two_turns(client: Anthropic, tool_app: App, size: int) -> None:
    tool_app.backend.script = spoken(f"Let me see. {CALLS}", size)
    turns: list[Any] = [{"role": "user", "content": "Weather?"}]
    with client.messages.stream(model="m", max_tokens=99, messages=turns, tools=TOOLS) as stream:  # pyright: ignore
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"text", "input_json", "message_stop"} <= kinds
    assert message.stop_reason == "tool_use"
    text, *calls = message.content
    assert text.type == "text"
    assert text.text == "Let me see."
    assert [call.input for call in calls if call.type == "tool_use"] == [{"city": "Ulm"}, {"city": "Bonn"}]
    turns.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"} for call in calls if call.type == "tool_use"
    ]
    turns.append({"role": "user", "content": results})
    tool_app.backend.script = spoken("Sun in both.", size)
    with client.messages.stream(model="m", max_tokens=50, messages=turns) as stream:
        assert stream.get_final_text() == "Sun in both."


def test_anthropics_client_raises_its_own_errors(client: Anthropic, tool_app: App) -> None:
    turns: list[Any] = [{"role": "user", "content": "Hi"}]
    tool_app.backend.script = Script((), error=Overloaded())
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="m", max_tokens=5, messages=turns)
    with pytest.raises(anthropic.BadRequestError, match="strictly positive"):
        client.messages.create(model="m", max_tokens=0, messages=turns)
    tool_app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    with (
        pytest.raises(anthropic.APIStatusError, match="out of luck"),
        client.messages.stream(model="m", max_tokens=5, messages=turns) as stream,
    ):
        stream.get_final_message()
