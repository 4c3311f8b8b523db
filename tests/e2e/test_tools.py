"""Tools with the real model: calls that must come, over three turns, as the clients that people have see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import requests
from huggingface_hub import InferenceClient
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from benchmarks.server_process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.row("B: tools, tool_choice, tool_prompt", "F: Behaviour that TGI's integration tests exercise"),
]

CITY = {"type": "string", "minLength": 2, "maxLength": 20}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a city. {"Not" a \\ call}\n',
            "parameters": {
                "type": "object",
                "properties": {"city": CITY, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Time in a city",
            "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
        },
    },
]
NAMED = {"type": "function", "function": {"name": "get_time"}}
RESULTS = {"get_weather": "22 degrees and sunny", "get_time": "10:30"}
QUESTION = {"role": "user", "content": "How is the weather in Paris, in celsius, and what time is it there?"}
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 100}

Ask = Callable[..., ChatCompletion]


@pytest.fixture
def client(bundled_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{bundled_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def asker(client: OpenAI, streamed: bool) -> Ask:
    def ask(messages: list[Any], **more: Any) -> ChatCompletion:
        asked = {"model": "tgi", "messages": messages, "tools": TOOLS, **SETTINGS, **more}
        if not streamed:
            return client.chat.completions.create(**asked)
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot  # pyright: ignore[reportReturnType]

    return ask


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments, which hold to their tool's schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    found: list[tuple[str, dict[str, Any]]] = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, schemas[call.function.name])
        found.append((call.function.name, arguments))
    return found


def results_of(message: ChatCompletionMessage) -> list[dict[str, str]]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": RESULTS[name]}
        for call, (name, _) in zip(message.tool_calls or (), calls_of(message), strict=True)
    ]


def three_turns(ask: Ask) -> list[tuple[list[tuple[str, dict[str, Any]]], str | None]]:
    """A call at the model's choice, a named one, an answer. The client's own messages are sent back."""
    history: list[Any] = [QUESTION]
    told: list[tuple[list[tuple[str, dict[str, Any]]], str | None]] = []
    ids: set[str] = set()
    for choice in ("required", NAMED):
        answer = ask(history, tool_choice=choice, parallel_tool_calls=False)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert len(calls_of(message)) == 1
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        ids |= {call.id for call in message.tool_calls or ()}
        told.append((calls_of(message), None))
        history += [message, *results_of(message)]
    assert len(ids) == 2
    answer = ask(history, tool_choice="none", max_tokens=8)
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length")
    told.append((calls_of(choice.message), choice.message.content))
    return told


@pytest.mark.fault("TGI#2794", "TGI#2986", "vllm#9209", "vllm#16880", "llama.cpp#27619")
@pytest.mark.row("G: 2 openai client")
def test_three_turns_plain_and_streamed(client: OpenAI) -> None:
    plain = three_turns(asker(client, streamed=False))
    assert plain[1][0][0][0] == "get_time"
    assert plain[2][0] == []
    assert plain[2][1]
    assert three_turns(asker(client, streamed=True)) == plain


@pytest.mark.fault("TGI#2986", "vllm#25001")
def test_the_model_sees_what_it_has_called(bundled_server: Server, client: OpenAI) -> None:
    """Its template knows neither tools nor calls. Prompt and usage count the same tokens."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city":"Paris"}'}}
    history = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "10:30"}]},
    ]
    body = {"model": "tgi", "messages": history, "tools": TOOLS, "max_tokens": 1}
    shown = requests.post(f"{bundled_server.url}/chat_tokenize", json=body, timeout=60).json()
    assert (
        '<|im_start|>assistant\n{"name": "get_time", "arguments": {"city": "Paris"}}<|im_end|>'
        in (shown["templated_text"])
    )
    assert "<|im_start|>tool\n10:30\n---\n" in shown["templated_text"]
    usage = client.chat.completions.create(**body).usage
    assert usage is not None
    assert usage.prompt_tokens == len(shown["tokenize_response"])


@pytest.mark.row("G: 1 hub client")
def test_the_hub_client_calls_tools(bundled_server: Server) -> None:
    hub = InferenceClient(bundled_server.url)
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, **SETTINGS}
    answer = hub.chat_completion([QUESTION], **asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    ((name, arguments),) = calls_of(ChatCompletionMessage.model_validate(answer.message))
    assert name == "get_time"
    chunks = [chunk.choices[0] for chunk in hub.chat_completion([QUESTION], **asked, stream=True)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_time"]
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.fault("TGI#2145", "llama.cpp#28478")
def test_auto_where_no_tool_is_needed_or_the_text_is_cut(client: OpenAI) -> None:
    """Never an error; the length says so."""
    question = [{"role": "user", "content": "Say hello."}]
    for streamed in (False, True):
        answer = asker(client, streamed)(question, max_tokens=5, logprobs=True).choices[0]
        assert answer.finish_reason == "length"
        assert answer.logprobs is not None
        assert len(answer.logprobs.content or ()) == 5


def test_a_call_that_the_length_cuts_off_is_none_to_be_made(client: OpenAI) -> None:
    for streamed in (False, True):
        answer = asker(client, streamed)([QUESTION], tool_choice="required", max_tokens=14).choices[0]
        assert answer.finish_reason == "length"
