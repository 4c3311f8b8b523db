"""huggingface_hub's clients, both halves, against the whole server with the real model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError, ValidationError

from benchmarks.server_process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.row("F: Hub client", "G: 1 hub client", "F: Behaviour that TGI's integration tests exercise"),
]

PROMPT, TEXT = "One, two, three, four,", " five, six, seven,"  # six tokens
QUESTION = [{"role": "user", "content": "Name a colour."}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
}


class Both:
    """Calls one of the clients; streams become lists."""

    def __init__(self, url: str, is_async: bool) -> None:
        self._url = url
        self._is_async = is_async

    def __call__(self, method: str, *given: Any, **more: Any) -> Any:
        if self._is_async:
            return asyncio.run(self._call(method, given, more))
        with InferenceClient(self._url, provider="hf-inference", timeout=60) as client:
            answer = getattr(client, method)(*given, **more)
            return list(answer) if more.get("stream") else answer

    async def _call(self, method: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        async with AsyncInferenceClient(self._url, provider="hf-inference", timeout=60) as client:
            answer = await getattr(client, method)(*given, **more)
            return [event async for event in answer] if more.get("stream") else answer

    def generate(self, prompt: str = PROMPT, **more: Any) -> Any:
        return self("text_generation", prompt, **{"max_new_tokens": 6, "return_full_text": False, **more})

    def chat(self, **more: Any) -> Any:
        return self("chat_completion", QUESTION, **{"max_tokens": 12, "temperature": 0, **more})


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def hub(bundled_server: Server, request: pytest.FixtureRequest) -> Both:
    return Both(bundled_server.url, request.param)


@pytest.mark.fault("TGI#2466", "TGI#1024")
@pytest.mark.row("A: POST / (list answer, stream switch)", "A: details, decoder_input_details", "A: return_full_text")
def test_text_plain_detailed_and_streamed(hub: Both) -> None:
    text = hub.generate()
    assert text == TEXT
    answer = hub.generate(details=True, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text == text
    details = answer.details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 6, None)
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert [token.logprob is None for token in details.prefill[:2]] == [True, False]
    assert "".join(token.text for token in details.tokens) == text
    for token, tops in zip(details.tokens, details.top_tokens, strict=True):
        assert [top["id"] for top in tops][:1] == [token.id]  # greedy: the likeliest is the one
        assert len(tops) == 2
    assert "".join(hub.generate(stream=True)) == text
    events = hub.generate(stream=True, details=True)
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert [event.index for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.generated_text for event in events] == [None] * 5 + [text]
    assert (events[-1].details.finish_reason, events[-1].details.generated_tokens) == ("length", 6)
    assert hub.generate(return_full_text=True) == PROMPT + text
    assert hub("text_generation", PROMPT, max_new_tokens=6) == PROMPT + text  # as TGI does at `/`


@pytest.mark.fault("TGI#189", "llama.cpp#7381")
@pytest.mark.row("A: best_of, best_of_sequences", "A: truncate", "A: stop")
def test_sampling_best_of_truncate_and_stop(hub: Both) -> None:
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95, "typical_p": 0.95}
    first = hub.generate(**sampled, seed=7, details=True)
    assert first.details.seed == 7
    assert hub.generate(**sampled, seed=7) == first.generated_text
    best = hub.generate(**sampled, best_of=2, details=True)
    (other,) = best.details.best_of_sequences
    means = [sum(token.logprob for token in one.tokens) / len(one.tokens) for one in (best.details, other)]
    assert means[0] >= means[1]
    assert best.details.seed != other.seed
    cut = hub.generate("zero " * 40 + PROMPT, truncate=3, details=True, decoder_input_details=True)
    assert len(cut.details.prefill) == 3
    stopped = hub.generate(stop=["six"], details=True)
    assert stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text == " five, six"
    assert hub.generate(repetition_penalty=1.9) != TEXT


@pytest.mark.fault("llama.cpp#24097", "vllm#12028")
@pytest.mark.row("A: grammar: json, regex, json_schema")
def test_grammars(hub: Both) -> None:
    asked = {"max_new_tokens": 40, "details": True}
    number = hub.generate("Call me:", grammar={"type": "regex", "value": r"\d{3}-\d{4}"}, **asked)
    assert re.fullmatch(r"\d{3}-\d{4}", number.generated_text)
    assert number.details.finish_reason == "eos_token"
    for grammar in (
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}},
    ):
        answer = hub.generate("David is 30 years old.", grammar=grammar, **asked)
        jsonschema.validate(json.loads(answer.generated_text), SCHEMA)


@pytest.mark.row("B: stream_options.include_usage")
def test_chats_plain_and_streamed(hub: Both) -> None:
    answer = hub.chat()
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)
    assert answer.id and answer.model and answer.system_fingerprint
    for usage in (True, False, None):
        options: dict[str, Any] = {} if usage is None else {"stream_options": {"include_usage": usage}}
        chunks = hub.chat(stream=True, **options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        counted = [chunk.usage.total_tokens for chunk in chunks if chunk.usage]
        assert counted == [answer.usage.total_tokens] * bool(usage)
        assert len([chunk for chunk in chunks if not chunk.choices]) == bool(usage)


@pytest.mark.row("B: logprobs, top_logprobs", "B: stop as string or list, top_p = 1, null stream_options")
def test_chats_with_all_that_the_client_can_ask(hub: Both) -> None:
    answer = hub.chat(
        logprobs=True, top_logprobs=2, stop=["zzz"], presence_penalty=0.5, frequency_penalty=0.5, seed=3, n=1, top_p=1.0
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.fault("TGI#3058")
@pytest.mark.row("B: response_format, both forms")
@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},  # which the client rewrites
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
    ids=["rewritten", "json_object", "json"],
)
def test_response_formats(hub: Both, format: dict[str, Any]) -> None:
    answer = hub.chat(response_format=format, max_tokens=40)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


@pytest.mark.row("B: /info, /health, /ping, GET /")
def test_the_server_is_seen(hub: Both) -> None:
    assert hub("health_check") is True
    info = hub("get_endpoint_info")
    assert info["model_id"].endswith("SmolLM2-135M-Instruct")
    assert info["max_total_tokens"] > info["max_input_tokens"] > 0


@pytest.mark.row("A: Error JSON, error types and statuses")
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes(hub: Both, stream: bool) -> None:
    with pytest.raises(ValidationError, match=r"`top_p` must be > 0\.0 and < 1\.0"):
        hub.generate(top_p=2.0, stream=stream)
    with pytest.raises(ValidationError, match="grammar is not valid"):
        hub.generate(grammar={"type": "json", "value": {"type": "nonsense", "properties": {}}}, stream=stream)
    with pytest.raises(ValidationError, match="adapter"):
        hub.generate(adapter_id="no/such", stream=stream)
    with pytest.raises(BadRequestError, match="top_p"):
        hub.chat(top_p=2.0, stream=stream)
