"""TGI's own old client against the whole server with the real model. It declares an old huggingface_hub, and works with
today's. (It cannot read streamed chats, TGI's neither: it fails on the `[DONE]` that others need.)
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import text_generation
from text_generation import errors
from text_generation.types import Message, ToolCall

from benchmarks.server_process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.row("F: Old Python client"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),  # the client's own
]

PROMPT = "One, two, three, four,"


@pytest.fixture
def old(bundled_server: Server) -> Any:  # the client's own annotations are wrong
    return text_generation.Client(bundled_server.url, timeout=60)


@pytest.mark.row("A: POST / (list answer, stream switch)", "A: details, decoder_input_details", "A: top_n_tokens")
def test_it_generates_and_streams(old: Any) -> None:
    answer = old.generate(PROMPT, max_new_tokens=6, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text == " five, six, seven,"
    assert answer.details.finish_reason.value == "length"
    assert "".join(token.text for token in answer.details.prefill) == PROMPT
    assert [len(tops) for tops in answer.details.top_tokens or ()] == [2] * 6
    events = list(old.generate_stream(PROMPT, max_new_tokens=6, top_n_tokens=2))
    assert [event.token.id for event in events] == [token.id for token in answer.details.tokens]
    assert events[-1].generated_text == answer.generated_text
    assert events[-1].details is not None
    assert events[-1].details.generated_tokens == 6


def test_it_samples_stops_and_keeps_to_a_grammar(old: Any) -> None:
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "max_new_tokens": 6}
    first = old.generate(PROMPT, seed=5, **sampled)
    assert first.details.seed == 5
    assert old.generate(PROMPT, seed=5, **sampled).generated_text == first.generated_text
    assert len(old.generate(PROMPT, best_of=2, **sampled).details.best_of_sequences or ()) == 1
    stopped = old.generate(PROMPT, stop_sequences=["six"], max_new_tokens=8)
    assert (stopped.generated_text, stopped.details.finish_reason.value) == (" five, six", "stop_sequence")
    number = old.generate("Call me:", max_new_tokens=20, grammar={"type": "regex", "value": r"\d{3}-\d{4}"})
    assert re.fullmatch(r"\d{3}-\d{4}", number.generated_text)


def test_it_chats_and_calls_tools(old: Any) -> None:
    """It reads the id of a call as a number."""
    asked = [Message(role="user", content="How is the weather in Paris?")]
    answer = old.chat(asked, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage["completion_tokens"] == 5
    city = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    called = old.chat(asked, max_tokens=60, temperature=0, tools=[tool], tool_choice="required")
    (call, *_) = called.choices[0].message.tool_calls
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"]
    assert ToolCall(**call).id == int(call["id"])


@pytest.mark.row("A: Error JSON, error types and statuses")
def test_it_raises_its_own_errors(old: Any) -> None:
    with pytest.raises(errors.ValidationError, match="`inputs` cannot be empty"):
        old.generate("", max_new_tokens=8)
    with pytest.raises(errors.ValidationError, match="`truncate` must be strictly positive and less than"):
        old.generate("x", truncate=1_000_000)
    with pytest.raises(errors.ValidationError, match="stop sequences"):
        list(old.generate_stream("x", stop_sequences=list("abcde")))
    with pytest.raises(errors.ValidationError, match="max_tokens"):
        old.chat([Message(role="user", content="Hi")], max_tokens=1_000_000)
