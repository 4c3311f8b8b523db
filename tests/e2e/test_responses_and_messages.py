"""OpenAI's responses and Anthropic's messages, by their clients, against the whole server: the chat's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from benchmarks.server_process import Server

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]


class Weather(BaseModel):
    city: str


SCHEMA: Any = {**Weather.model_json_schema(), "additionalProperties": False}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]


@pytest.fixture(scope="module")
def openai(bundled_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{bundled_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(bundled_server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=bundled_server.url, api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def of_chat(openai: OpenAI) -> str:
    answer = openai.chat.completions.create(model="tgi", messages=QUESTION, max_tokens=12, temperature=0)
    return answer.choices[0].message.content or ""


def test_responses_are_the_chats_answers(openai: OpenAI, of_chat: str) -> None:
    answer = openai.responses.create(model="tgi", input="Name a colour.", max_output_tokens=12, temperature=0)
    assert answer.output_text == of_chat
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    with openai.responses.stream(model="tgi", input=QUESTION, max_output_tokens=12, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == of_chat


def test_responses_parse(openai: OpenAI) -> None:
    answer = openai.responses.parse(
        model="tgi", input=ASK, text_format=Weather, max_output_tokens=60, temperature=0, extra_body={"seed": 1}
    )
    assert isinstance(answer.output_parsed, Weather)


def test_responses_call_a_tool_over_two_turns(openai: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    answer = openai.responses.create(
        model="tgi", input=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    turns = [*ASK, call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
    after = openai.responses.create(model="tgi", input=turns, tools=tools, max_output_tokens=8, temperature=0)
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.fault("vllm#21313")
def test_messages_are_the_chats_answers(anthropic: Anthropic, of_chat: str) -> None:
    message = anthropic.messages.create(model="tgi", messages=QUESTION, max_tokens=12, extra_body={"temperature": 0})
    assert [block.text for block in message.content if block.type == "text"] == [of_chat]
    count = anthropic.messages.count_tokens(model="tgi", messages=QUESTION)
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    body = {"temperature": 0}
    with anthropic.messages.stream(model="tgi", messages=QUESTION, max_tokens=12, extra_body=body) as stream:
        assert stream.get_final_text() == of_chat


@pytest.mark.fault("vllm#21313")
def test_messages_call_a_tool_over_two_turns(anthropic: Anthropic) -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    turns = list(ASK)
    with anthropic.messages.stream(
        model="tgi", messages=turns, max_tokens=100, tools=tools, tool_choice=choice
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    Weather.model_validate(call.input)
    turns.append({"role": "assistant", "content": [call.to_dict()]})
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}]})
    after = anthropic.messages.create(model="tgi", messages=turns, max_tokens=8, tools=tools)
    assert after.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert after.usage.output_tokens > 0
