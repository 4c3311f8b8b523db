"""The clients that people use, against the real application: what they send is taken, what they need is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import text_generation
from huggingface_hub import InferenceClient, constants
from huggingface_hub import errors as hub_errors
from text_generation import errors as old_errors

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, HELLO, Said, Script, ScriptedBackend
from tgi.errors import GenerationFailed, Overloaded
from tgi.router.validation.parameters import Limits

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


@pytest.fixture
def gpt(app: App) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{app.port}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def old(app: App) -> text_generation.Client:
    return text_generation.Client(f"http://127.0.0.1:{app.port}", timeout=20)


@pytest.fixture
def hub(app: App, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    # The server is on this machine; what offline mode forbids is the hub.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    return InferenceClient(f"http://127.0.0.1:{app.port}", timeout=20)


@pytest.mark.row("F: openai client", "B: /v1/models")
def test_openai_chats(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(model="gpt-x", messages=USER, temperature=0, top_p=1, stop="zz", max_tokens=9)
    assert answer.choices[0].message.content == "Hello world"
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", "gpt-x")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 3, 23)
    assert [model.id for model in gpt.models.list()] == ["test/model"]
    assert gpt.models.retrieve("test/model").owned_by == "test/model"


@pytest.mark.parametrize("usage", [True, False, None])
def test_openai_streams(gpt: openai.OpenAI, usage: bool | None) -> None:
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    chunks = list(gpt.chat.completions.create(model="tgi", messages=USER, stream=True, logprobs=True, **options))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[0].choices[0].logprobs.content[0].token == "Hello"
    last = chunks[-1]
    assert bool(last.usage) is bool(usage)
    assert (last.choices == []) is bool(usage)


@pytest.mark.row("B: /v1/completions")
def test_openai_completes(gpt: openai.OpenAI) -> None:
    answer = gpt.completions.create(model="gpt-x", prompt=["Hi", "Ho"], n=2, logprobs=0, max_tokens=9)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"Hello world"}
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hello", " world", "</s>"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    texts = {0: "", 1: ""}
    options = {"include_usage": True}
    *chunks, last = gpt.completions.create(
        model="tgi", prompt=[[72, 105], [72]], stream=True, stream_options=options, echo=True
    )
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "HiHello world", 1: "HHello world"}
    assert last.usage is not None
    assert last.usage.total_tokens == 9


@pytest.mark.row("B: n, presence_penalty, logit_bias")
def test_openai_chats_with_several_choices(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(model="tgi", messages=USER, n=2, seed=3)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    texts = {0: "", 1: ""}
    for chunk in gpt.chat.completions.create(model="tgi", messages=USER, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "Hello world", 1: "Hello world"}


@pytest.mark.row("B: tools, tool_choice, tool_prompt")
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_openai_calls_a_tool(choice: Any) -> None:
    """Plain, and put together from a stream by the client itself."""
    script = Script([*map(Said, ('{"name": "weather", ', '"arguments": {"city":', ' "Ulm"}}')), EOS])
    limits = Limits(max_input_tokens=2000, max_total_tokens=4000, vocab_size=300)
    with (
        serving(ScriptedBackend(script), limits=limits) as app,
        openai.OpenAI(base_url=f"http://127.0.0.1:{app.port}/v1", api_key="-", max_retries=0) as gpt,
    ):
        asked: dict[str, Any] = {"model": "tgi", "messages": USER, "tools": [WEATHER], "tool_choice": choice}
        plain = gpt.chat.completions.create(**asked).choices[0]
        with gpt.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        for answer in (plain, streamed):
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls or ()
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
            again = [*USER, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
            assert gpt.chat.completions.create(**(asked | {"messages": again, "tool_choice": "auto"})).choices


def test_openai_knows_the_errors(app: App, gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        gpt.chat.completions.create(model="tgi", messages=USER, max_tokens=1000, stream=True)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    app.backend.refusal = Overloaded()
    with pytest.raises(openai.RateLimitError):
        gpt.chat.completions.create(model="tgi", messages=USER)
    with pytest.raises(openai.NotFoundError) as missing:
        gpt.models.retrieve("no/such")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    app.backend.refusal = None
    app.backend.script = Script((Said("a"), EOS), error=GenerationFailed("out of luck"))
    with pytest.raises(openai.APIError, match="out of luck"):
        list(gpt.chat.completions.create(model="tgi", messages=USER, stream=True))


@pytest.mark.row("F: Hub client", "G: 1 hub client")
def test_the_hub_client_generates(hub: InferenceClient) -> None:
    assert hub.text_generation("Hi", max_new_tokens=9, return_full_text=False) == "Hello world"
    answer = hub.text_generation("Hi", details=True, return_full_text=False, temperature=0.5, seed=7, stop=["zz"])
    assert answer.generated_text == "Hello world"
    assert (answer.details.finish_reason, answer.details.generated_tokens, answer.details.seed) == ("eos_token", 3, 7)
    assert [token.text for token in answer.details.tokens] == ["Hello", " world", "</s>"]


def test_the_hub_client_streams(hub: InferenceClient) -> None:
    assert list(hub.text_generation("Hi", stream=True)) == ["Hello", " world", "</s>"]
    events = list(hub.text_generation("Hi", stream=True, details=True, return_full_text=False))
    assert [event.index for event in events] == [1, 2, 3]
    assert events[-1].generated_text == "Hello world"
    assert events[-1].details.input_length == 2


def test_the_hub_client_chats(hub: InferenceClient) -> None:
    answer = hub.chat_completion(USER, max_tokens=9)
    assert answer.choices[0].message.content == "Hello world"
    chunks = list(hub.chat_completion(USER, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[-1].usage.total_tokens == 23


def test_the_hub_client_sees_the_server(app: App, hub: InferenceClient) -> None:
    hub = InferenceClient(f"http://127.0.0.1:{app.port}", provider="hf-inference", timeout=20)
    assert hub.health_check()
    assert hub.get_endpoint_info()["model_id"] == "test/model"


def test_the_hub_client_knows_the_errors(app: App, hub: InferenceClient) -> None:
    for stream in (False, True):
        with pytest.raises(hub_errors.ValidationError):
            list(hub.text_generation("Hi", top_p=7.0, stream=stream))
        app.backend.refusal = Overloaded()
        with pytest.raises(hub_errors.OverloadedError):
            list(hub.text_generation("Hi", stream=stream))
        app.backend.refusal = None
    app.backend.script = Script((Said("a"), EOS), error=GenerationFailed("out of luck"))
    with pytest.raises(hub_errors.GenerationError, match="out of luck"):
        list(hub.text_generation("Hi", stream=True))


# The client speaks to pydantic in the words of its version 1.
@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
@pytest.mark.row("F: Old Python client")
def test_the_old_client_generates_and_streams(old: text_generation.Client) -> None:
    answer = old.generate("Hi", max_new_tokens=9)
    assert answer.generated_text == "Hello world"
    assert answer.details.finish_reason == "eos_token"
    assert answer.details.prefill == []
    assert [token.special for token in answer.details.tokens] == [False, False, True]
    sampled = old.generate("Hi", do_sample=True, temperature=0.5, top_k=5, top_p=0.9, seed=7, truncate=5)
    assert sampled.details.seed == 7
    events = list(old.generate_stream("Hi"))
    assert [event.token.text for event in events] == ["Hello", " world", "</s>"]
    assert events[-1].generated_text == "Hello world"
    assert events[-1].details.generated_tokens == 3


@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
def test_the_old_client_chats(old: text_generation.Client) -> None:
    answer = old.chat([text_generation.types.Message(role="user", content="Hi")], max_tokens=9)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.usage["total_tokens"] == 23


@pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")
def test_the_old_client_knows_the_errors(app: App, old: text_generation.Client) -> None:
    with pytest.raises(old_errors.ValidationError):
        old.generate("Hi" * 200)
    app.backend.refusal = Overloaded()
    with pytest.raises(old_errors.OverloadedError):
        list(old.generate_stream("Hi"))
    app.backend.refusal = None
    app.backend.script = Script((), error=GenerationFailed("x"))
    with pytest.raises(old_errors.GenerationError):
        old.generate("Hi")
    app.backend.script = Script((Said("a"), EOS), error=GenerationFailed("x"))
    with pytest.raises(old_errors.GenerationError):
        list(old.generate_stream("Hi"))
