"""openai's client against the whole server with the real model: what it sends is taken, what it reads is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import requests
from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from benchmarks.server_process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.row("F: openai client", "G: 2 openai client", "F: Behaviour that TGI's integration tests exercise"),
]

QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]
ASKED: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
PROMPTS = ["The capital of France is", "One, two, three, four,", "Red, green and"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "levels": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 5},
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "required": ["colour", "levels"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(bundled_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{bundled_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(client: OpenAI) -> ChatCompletion:
    """What the model says with nothing else asked: what the others are compared with."""
    return client.chat.completions.create(**ASKED)


@pytest.fixture(scope="module")
def greedy(plain: ChatCompletion) -> Choice:
    return plain.choices[0]


def chat(client: OpenAI, **more: Any) -> Choice:
    return client.chat.completions.create(**{**ASKED, **more}).choices[0]


def ids_of(server: Server, text: str) -> list[int]:
    body = {"inputs": text, "parameters": {}}
    return [token["id"] for token in requests.post(f"{server.url}/tokenize", json=body, timeout=60).json()]


# Chats.


@pytest.mark.fault("TGI#2296", "vllm#27572")
@pytest.mark.row("B: /v1/chat/completions", "B: stream_options.include_usage", "B: system_fingerprint")
@pytest.mark.parametrize("usage", [True, False, None])
def test_a_stream_is_the_plain_answer_and_is_counted_when_asked(
    client: OpenAI, plain: ChatCompletion, usage: bool | None
) -> None:
    """With nulls and fields that ask for nothing."""
    answer = plain
    options: dict[str, Any] = {"stream_options": None if usage is None else {"include_usage": usage}}
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stop=None, top_p=1, user="me", **options))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == answer.choices[0].message.content
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert answer.choices[0].finish_reason == "length"
    assert {(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, answer.model, answer.system_fingerprint)
    }
    assert chunks[0].id != answer.id
    counted = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(counted) == len(chunks) - len(choices) == (1 if usage else 0)
    assert answer.usage is not None
    for found in counted:
        assert (found.prompt_tokens, found.completion_tokens) == (answer.usage.prompt_tokens, 12)
        assert found.total_tokens == answer.usage.total_tokens


@pytest.mark.fault("TGI#3203", "sglang#888")
@pytest.mark.row("B: /chat_tokenize")
def test_usage_counts_the_tokens_that_chat_tokenize_shows(bundled_server: Server, client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *QUESTION]
    shown = requests.post(f"{bundled_server.url}/chat_tokenize", json={"messages": messages}, timeout=60).json()
    usage = client.chat.completions.create(model="tgi", messages=messages, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == len(shown["tokenize_response"])
    # The ids themselves are a prompt, too.
    ids = [token["id"] for token in shown["tokenize_response"]]
    text = client.completions.create(model="tgi", prompt=ids, max_tokens=8, temperature=0).choices[0].text
    assert text == chat(client, messages=messages, max_tokens=8).message.content


@pytest.mark.row("B: Assistant continuation")
def test_a_last_message_of_the_assistant_is_continued(client: OpenAI) -> None:
    begun = {"role": "assistant", "content": "The sky is blue, and the grass is"}
    answer = chat(client, messages=[*QUESTION, begun], max_tokens=4)
    assert "green" in (answer.message.content or "")
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(client, messages=[*QUESTION, begun], max_tokens=4, extra_body=asked).message == answer.message
    new = {"continue_final_message": False, "add_generation_prompt": True}
    assert chat(client, messages=[*QUESTION, begun], max_tokens=4, extra_body=new).message != answer.message


@pytest.mark.row("B: logprobs, top_logprobs")
def test_logprobs_spell_the_text_byte_by_byte(client: OpenAI) -> None:
    """Also characters of several tokens. The same streamed."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": {"guided_choice": ["Ω 🌧 é"]}}
    answer = chat(client, **asked, max_tokens=20)
    assert answer.message.content == "Ω 🌧 é"
    assert answer.logprobs is not None
    tokens = answer.logprobs.content or []
    raw = bytes(byte for token in tokens for byte in token.bytes or ())
    assert raw.removesuffix(b"<|im_end|>").decode() == answer.message.content
    assert len(tokens) > len("Ω 🌧 é")
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert 0 >= token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert token.logprob <= 0
    stream = client.chat.completions.create(**{**ASKED, **asked, "max_tokens": 20}, stream=True)
    streamed = [
        token
        for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert [token.bytes for token in streamed] == [token.bytes for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], rel=0.2)


@pytest.mark.fault("TGI#1724", "lmdeploy#1047")
@pytest.mark.row("B: stop as string or list, top_p = 1, null stream_options")
def test_content_ends_before_the_stop_string(client: OpenAI, greedy: Choice) -> None:
    text = greedy.message.content or ""
    word = text.split()[3]
    for stop in (word, ["no such text", word]):
        answer = chat(client, stop=stop)
        assert answer.finish_reason == "stop"
        assert answer.message.content == text[: text.index(word)]


@pytest.mark.row("B: n, presence_penalty, logit_bias")
def test_a_bias_bans_and_forces(bundled_server: Server, client: OpenAI, greedy: Choice) -> None:
    (first, *_) = ids_of(bundled_server, greedy.message.content or "")
    banned = chat(client, logit_bias={str(first): -100}, max_tokens=4).message.content or ""
    assert banned
    assert ids_of(bundled_server, banned)[0] != first
    (green,) = ids_of(bundled_server, " green")
    assert chat(client, logit_bias={str(green): 100}, max_tokens=3).message.content == " green" * 3


@pytest.mark.row("B: n, presence_penalty, logit_bias", "A: repetition_penalty, frequency_penalty")
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_changes_the_answer_and_zero_does_not(client: OpenAI, greedy: Choice, penalty: str) -> None:
    assert chat(client, **{penalty: 0}).message.content == greedy.message.content
    penalised = chat(client, **{penalty: 2.0}, max_tokens=16).message.content or ""
    assert not penalised.startswith(greedy.message.content or "")


@pytest.mark.fault("llama.cpp#7381", "vllm#1211")
@pytest.mark.row(
    "B: n, presence_penalty, logit_bias", "A: Sampling: temperature, top_k, top_p, typical_p, do_sample, seed"
)
def test_several_choices_of_one_seed(client: OpenAI) -> None:
    """They differ; the first is the answer of that seed alone; all come again, streamed too."""
    asked = {**ASKED, "temperature": 1.0, "max_tokens": 8, "seed": 11}
    answer = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    alone = client.chat.completions.create(**asked)
    assert alone.choices[0].message.content == texts[0]
    assert alone.usage is not None
    assert alone.usage.prompt_tokens == answer.usage.prompt_tokens
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts
    assert client.chat.completions.create(**{**asked, "seed": 12}).choices[0].message.content != texts[0]


# Formats.


@pytest.mark.fault("TGI#3058", "TGI#2899", "llama.cpp#24097", "vllm#12201", "vllm#12028")
@pytest.mark.row("B: response_format, both forms")
@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "value": {"name": "colour", "schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_object"},
        {"type": "regex", "value": "#[0-9a-f]{6}"},
        {"type": "text"},
    ],
    ids=["nested", "schema-value", "object-value", "json-value", "object", "regex", "text"],
)
def test_the_answer_has_the_format_that_was_asked_for(client: OpenAI, greedy: Choice, format: dict[str, Any]) -> None:
    """OpenAI's shapes and TGI's."""
    asked = {"temperature": 0, "max_tokens": 80, "response_format": format}
    if format["type"] == "text":
        assert chat(client, response_format=format).message.content == greedy.message.content
        return
    if format == {"type": "json_object"}:
        # No schema says when to stop: of the model's own accord it does so with this question.
        asked["messages"] = [{"role": "user", "content": 'Answer with the JSON object {"ok": true} and nothing else.'}]
    answer = chat(client, **asked)
    assert answer.finish_reason == "stop"
    text = answer.message.content or ""
    if format["type"] == "regex":
        assert len(text) == 7
        assert int(text[1:], 16) >= 0
        return
    value = json.loads(text)
    assert isinstance(value, dict)
    if format != {"type": "json_object"}:
        jsonschema.validate(value, SCHEMA)


def test_the_client_parses_into_a_model_of_its_own(client: OpenAI) -> None:
    class Colour(BaseModel):
        name: str

    answer = client.chat.completions.parse(
        model="tgi", messages=QUESTION, temperature=0, max_tokens=40, response_format=Colour
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.name


@pytest.mark.row("A: grammar: json, regex, json_schema")
@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"guided_choice": ["teal", "ochre"]}, "teal|ochre"),
        ({"guided_regex": "[A-Z][a-z]{2,6}"}, "[A-Z][a-z]{2,6}"),
        ({"guided_grammar": 'start: "a" ("b" | "c")'}, "ab|ac"),
        ({"guided_json": {"enum": ["red"]}}, '"red"'),
        ({"structured_outputs": {"choice": ["teal", "ochre"]}}, "teal|ochre"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_guides(client: OpenAI, guide: dict[str, Any], pattern: str) -> None:
    answer = chat(client, max_tokens=20, extra_body=guide)
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.message.content or "")
    completed = client.completions.create(
        model="tgi", prompt="A colour:", max_tokens=20, temperature=0, extra_body=guide
    )
    assert re.fullmatch(pattern, completed.choices[0].text)


# Text completions.


@pytest.mark.fault("TGI#1997", "TGI#2296", "vllm#27572")
@pytest.mark.row("B: /v1/completions")
def test_a_list_of_prompts_is_answered_as_each_alone(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 6}
    singles = [client.completions.create(prompt=prompt, **asked) for prompt in PROMPTS]
    together = client.completions.create(prompt=PROMPTS, **asked)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in singles]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in singles if one.usage)
    texts, reasons = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}
    *chunks, last = client.completions.create(
        prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **asked
    )
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index].append(choice.finish_reason)
    assert list(texts.values()) == [choice.text for choice in together.choices]
    for index, choice in enumerate(together.choices):
        assert reasons[index] == [None] * (len(reasons[index]) - 1) + [choice.finish_reason]
    assert last.usage is not None
    assert last.usage.total_tokens == together.usage.total_tokens


@pytest.mark.fault("llama.cpp#11346", "vllm#6521", "TGI#2973")
@pytest.mark.row("B: /v1/completions", "B: logprobs, top_logprobs")
def test_ids_echo_and_logprobs(bundled_server: Server, client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 2}
    ids = ids_of(bundled_server, PROMPTS[0])
    (answer,) = client.completions.create(prompt=ids, **asked).choices
    assert answer.text.startswith(PROMPTS[0])
    columns = answer.logprobs
    assert columns is not None
    tokens, offsets = columns.tokens or [], columns.text_offset or []
    assert "".join(tokens) == answer.text
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert len(tokens) == len(ids) + 3
    chances, tops = columns.token_logprobs or [], columns.top_logprobs or []
    assert [chance is None for chance in chances] == [True] + [False] * (len(tokens) - 1)
    assert [top is None for top in tops] == [True] + [False] * (len(tokens) - 1)
    for token, chance, top in list(zip(tokens, chances, tops, strict=True))[1:]:
        assert 2 <= len(top) <= 3
        assert top[token] == chance <= 0
    # The text is the same prompt, and several lists are several prompts; scoring alone makes nothing.
    assert client.completions.create(prompt=PROMPTS[0], **asked).choices[0].text == answer.text
    scored = client.completions.create(prompt=[ids, ids[:2]], **{**asked, "max_tokens": 0})
    assert [choice.text for choice in scored.choices] == [PROMPTS[0], "".join(tokens[:2])]
    first = scored.choices[0].logprobs
    assert first is not None
    assert (first.token_logprobs or [])[1:] == pytest.approx(chances[1 : len(ids)], rel=0.2)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


@pytest.mark.fault("TGI#1999")
def test_completions_stop_before_the_stop_string(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tgi", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}
    text = client.completions.create(**asked).choices[0].text
    word = text.split()[1]
    (answer,) = client.completions.create(**asked, stop=word).choices
    assert (answer.text, answer.finish_reason) == (text[: text.index(word)], "stop")


# Responses.


def test_responses_plain_and_streamed(client: OpenAI, plain: ChatCompletion) -> None:
    asked: dict[str, Any] = {"model": "tgi", "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 12}
    answer = client.responses.create(**asked)
    assert answer.output_text == plain.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert plain.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (plain.usage.prompt_tokens, 12)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == answer.usage.total_tokens


def test_responses_call_tools(client: OpenAI) -> None:
    """The client's own items are sent back with the result."""
    tool: Any = {
        "type": "function",
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    }
    asked: dict[str, Any] = {"model": "tgi", "tools": [tool], "temperature": 0}
    history: list[Any] = [{"role": "user", "content": "What time is it in Paris?"}]
    answer = client.responses.create(**asked, input=history, tool_choice="required", parallel_tool_calls=False)
    (call,) = (item for item in answer.output if item.type == "function_call")
    assert call.name == "get_time"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "10:30"}]
    answer = client.responses.create(**asked, input=history, tool_choice="none", max_output_tokens=12)
    assert answer.output_text


# Errors.


@pytest.mark.fault("vllm#37011", "vllm#33418", "TGI#2749")
@pytest.mark.row("A: Error JSON, error types and statuses")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"max_tokens": 1_000_000}, "context_length_exceeded", "max_tokens"),
        ({"max_completion_tokens": 1_000_000}, "context_length_exceeded", "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a b " * 9_000}]}, "context_length_exceeded", "messages"),
        ({"temperature": -1}, None, "temperature"),
        ({"logit_bias": {"999999": 1}}, None, "logit_bias"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]}]},
         None, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, None,
         "response_format"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_bad_request_is_one(
    client: OpenAI, stream: bool, asked: dict[str, Any], code: str | None, param: str
) -> None:
    """Streamed too: before the stream begins."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**ASKED, "stream": stream, **asked})
    error = raised.value
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert error.message.startswith("Error code: 400 - ")


@pytest.mark.row("B: /v1/models")
def test_models_and_what_is_not_there(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no/such")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model.id, input="x")
