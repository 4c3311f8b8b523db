from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, HELLO, Said, Script
from tests.fakes.tokenizer import unpacked
from tgi.enums import FinishReason
from tgi.errors import ContextTooLong, GenerationFailed, Overloaded
from tgi.router.api.chat import ChatFrames, Frame
from tgi.router.backend import Finish, Times, TokenEvent, TopToken
from tgi.router.schema.chat import ChatRequest
from tgi.router.validation.parameters import Limits

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


def chunks_of(app: App, **body: Any) -> list[dict[str, Any]]:
    answer = app.post(CHAT, {"messages": USER, "stream": True, **body})
    assert answer.status == 200, answer.body
    assert answer.events[-1] == b"[DONE]"
    return [json.loads(event) for event in answer.events[:-1]]


@pytest.mark.row("B: /v1/chat/completions")
def test_the_prompt_is_the_templates_without_special_tokens(app: App) -> None:
    app.post(CHAT, {"messages": [{"role": "system", "content": "Be"}, *USER]})
    assert bytes(unpacked(app.backend.requests[-1].prompt_ids)) == b"system: Be\nuser: Hi\nassistant: "


def test_a_chat_samples_unless_its_temperature_is_zero(app: App) -> None:
    for temperature, samples in ((None, True), (1.0, True), (0.7, True), (0, False)):
        answer = app.post(CHAT, {"messages": USER, "temperature": temperature, "seed": 5})
        assert app.backend.requests[-1].sampling.do_sample is samples
        assert app.backend.requests[-1].sampling.raw_logprobs
        assert answer.json["choices"][0].get("seed") == (5 if samples else None)
    assert app.post(CHAT, {"messages": USER, "temperature": -0.1}).status == 400


@pytest.mark.row("B: stop as string or list, top_p = 1, null stream_options")
@pytest.mark.parametrize(("stop", "strings"), [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ()), ("", ())])
def test_stop_as_string_or_list(app: App, stop: Any, strings: tuple[str, ...]) -> None:
    answer = app.post(CHAT, {"messages": USER, "stop": stop, "top_p": 1, "stream_options": None})
    assert answer.status == 200
    assert app.backend.requests[-1].stopping.stop_strings == strings
    assert not app.backend.requests[-1].stopping.include_stop


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({}, 180),
    ],
)
def test_both_names_of_the_length(app: App, body: dict[str, int], expected: int) -> None:
    assert app.post(CHAT, {"messages": USER, **body}).status == 200
    assert app.backend.requests[-1].stopping.max_new_tokens == expected


def test_our_additions_reach_the_backend(app: App) -> None:
    body = {
        "min_tokens": 2,
        "stop_token_ids": [9, 4],
        "ignore_eos": True,
        "priority": 3,
        "cache": False,
        "cache_salt": "s",
        "top_k": 5,
        "min_p": 0.25,
        "include_stop_str_in_output": True,
    }
    assert app.post(CHAT, {"messages": USER, **body}).status == 200
    request = app.backend.requests[-1]
    assert (request.stopping.min_new_tokens, request.stopping.stop_ids, request.stopping.ignore_eos) == (
        2,
        (9, 4),
        True,
    )
    assert (request.priority, request.use_cache, request.cache_salt) == (3, False, "s")
    assert (request.sampling.top_k, request.sampling.min_p, request.stopping.include_stop) == (5, 0.25, True)


@pytest.mark.fault("TGI#2296", "vllm#27572")
@pytest.mark.parametrize(
    ("reason", "stop", "word"),
    [
        (FinishReason.EOS_TOKEN, None, "stop"),
        (FinishReason.STOP_SEQUENCE, "END", "stop"),
        (FinishReason.STOP_SEQUENCE, 42, "stop"),
        (FinishReason.LENGTH, None, "length"),
    ],
)
def test_reasons_are_openais_and_only_the_last_chunk_has_one(
    app: App, reason: FinishReason, stop: str | int | None, word: str
) -> None:
    app.backend.script = Script((Said("a"), Said("b")), reason, stop=stop)
    choice = app.post(CHAT, {"messages": USER}).json["choices"][0]
    assert (choice["finish_reason"], choice.get("stop_reason")) == (word, stop)
    choices = [chunk["choices"][0] for chunk in chunks_of(app)]
    assert [choice["finish_reason"] for choice in choices] == [None, word]
    assert choices[-1].get("stop_reason") == stop
    assert "stop_reason" not in choices[0]


def test_streamed_and_plain_content_are_the_same_without_special_tokens(app: App) -> None:
    tokens = [Said("a"), Said("<|im_start|>", special=True), Said(""), Said("日 😀"), EOS]
    app.backend.script = Script(tokens)
    contents = [chunk["choices"][0]["delta"] for chunk in chunks_of(app)]
    assert contents == [{"role": "assistant", "content": text} for text in ("a", "", "", "日 😀", "")]
    assert app.post(CHAT, {"messages": USER}).json["choices"][0]["message"]["content"] == "a日 😀"


def test_text_that_was_held_back_comes_with_the_last_chunk(app: App) -> None:
    """A special last token has no text of its own, but what may have become a stop string must still go out."""
    body = msgspec.convert({"messages": USER}, ChatRequest)
    frames = ChatFrames(Frame(body, app.services), body)
    times = Times(0, 0, 0, 0, 0)
    finish = Finish(FinishReason.EOS_TOKEN, "abc", 2, 5, 0, None, None, times)
    first = frames.token(TokenEvent(1, "a", -0.1, False))
    last = frames.token(TokenEvent(EOS.id, EOS.text, -0.1, True, finish=finish))
    assert b'"content":"a"' in first
    assert b'"content":"bc"' in last
    assert frames.close() == b"data: [DONE]\n\n"


@pytest.mark.fault("sglang#2088")
@pytest.mark.row("B: logprobs, top_logprobs")
def test_top_logprobs_of_each_position(app: App) -> None:
    def top(text: str) -> tuple[TopToken, ...]:
        return (TopToken(1, text, -0.25, False), TopToken(2, "é", -0.34000000357627869, False))

    app.backend.script = Script((Said("a", top=top("a")), Said("b", top=top("b"))), FinishReason.LENGTH)
    expected = [
        {
            "token": text,
            "logprob": -0.25,
            "bytes": [ord(text)],
            "top_logprobs": [
                {"token": text, "logprob": -0.25, "bytes": [ord(text)]},
                {"token": "é", "logprob": -0.34, "bytes": [195, 169]},
            ],
        }
        for text in "ab"
    ]
    body = {"logprobs": True, "top_logprobs": 2}
    assert app.post(CHAT, {"messages": USER, **body}).json["choices"][0]["logprobs"] == {"content": expected}
    assert app.backend.requests[-1].top_n == 2
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(app, **body)]
    assert streamed == [{"content": [entry]} for entry in expected]
    assert app.post(CHAT, {"messages": USER, "top_logprobs": 6}).json["error"]["param"] == "top_logprobs"
    assert app.post(CHAT, {"messages": USER, "top_logprobs": 2}).json["choices"][0]["logprobs"] is None


@pytest.mark.row("B: stream_options.include_usage")
@pytest.mark.fault("llama.cpp#4288")
def test_usage_counts_cached_tokens(app: App) -> None:
    app.backend.script = Script((Said("a"), EOS), num_cached=16)
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 2,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert app.post(CHAT, {"messages": USER}).json["usage"] == usage
    chunks = chunks_of(app, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None, None, usage]
    assert chunks[-1]["choices"] == []
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        assert [chunk["usage"] for chunk in chunks_of(app, stream_options=options)] == [None, None]


def test_all_chunks_of_an_answer_share_its_id_and_no_other_answer_does(app: App) -> None:
    first, second = chunks_of(app), chunks_of(app)
    ids = {chunk["id"] for chunk in first}
    assert len(ids) == 1
    assert ids != {chunk["id"] for chunk in second}


@pytest.mark.row("B: system_fingerprint")
def test_the_fingerprint_is_version_and_build(app: App) -> None:
    assert app.post(CHAT, {"messages": USER}).json["system_fingerprint"] == "1.2.3-native"


@pytest.mark.row("B: Assistant continuation")
def test_the_last_assistant_message_is_continued(app: App) -> None:
    app.post(CHAT, {"messages": [*USER, {"role": "assistant", "content": "Once upon "}]})
    assert bytes(unpacked(app.backend.requests[-1].prompt_ids)) == b"user: Hi\nassistant: Once upon"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"logit_bias": [0.5]}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.fault("llama.cpp#24097")
def test_what_is_not_there_is_refused_by_name(app: App, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = app.post(CHAT, {"messages": USER, "stream": stream, **body})
    assert answer.status == 400
    assert list(answer.json) == ["error", "error_type"]
    assert list(answer.json["error"]) == ["message", "type", "param", "code"]
    assert answer.json["error"]["param"] == param
    assert f"`{param}`" in answer.json["error"]["message"]
    assert answer.json["error_type"] == "validation"


@pytest.mark.fault("vllm#37011", "vllm#33418")
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_has_its_own_code(app: App, stream: bool) -> None:
    long = [{"role": "user", "content": "a" * 150}]
    for body in ({"messages": long}, {"messages": USER, "max_tokens": 181}):
        answer = app.post(CHAT, {**body, "stream": stream})
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    app.backend.refusal = ContextTooLong("more than the pool", "max_new_tokens")
    answer = app.post(CHAT, {"messages": USER, "stream": stream})
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(app: App, stream: bool) -> None:
    app.backend.script = Script((), error=GenerationFailed("x"))
    answer = app.post(CHAT, {"messages": USER, "stream": stream})
    assert (answer.status, answer.json["error"]["type"], answer.json["error_type"]) == (
        424,
        "server_error",
        "generation",
    )
    app.backend.refusal = Overloaded(retry_after_s=7)
    answer = app.post(CHAT, {"messages": USER, "stream": stream})
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert answer.json["error"]["type"] == "rate_limit_error"


def test_an_error_in_a_stream_is_an_event_and_then_done(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    answer = app.post(CHAT, {"messages": USER, "stream": True})
    assert answer.status == 200
    assert len(answer.events) == 3
    assert json.loads(answer.events[1]) == {
        "error": {
            "message": "Request failed during generation: Server error: out of luck",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
            "http_status_code": 424,
        },
        "error_type": "generation",
    }
    assert answer.events[2] == b"[DONE]"


@pytest.mark.fault("TGI#1743", "vllm#25108")
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "Template error: template not found"),
        ("{% if %}", "Template error: the model's chat template does not compile"),
        ("{{ raise_exception('No system role') }}", "Template error: No system role"),
    ],
)
def test_template_errors_are_the_chats_alone(template: str | None, told: str) -> None:
    with serving(chat_template=template) as app:
        answer = app.post(CHAT, {"messages": USER, "stream": True})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(told)
        assert answer.json["error_type"] == "template_error"
        assert app.metric('tgi_request_failure{err="template"}') == 1
        assert app.services.infer.free_permits == 8
        assert app.post("/generate", {"inputs": "x"}).status == 200


@pytest.mark.fault("vllm#25001")
@pytest.mark.parametrize("content", [{"a": 1}, 5, [5]])
def test_content_of_another_shape_is_a_clear_400(app: App, content: Any) -> None:
    answer = app.post(CHAT, {"messages": [{"role": "tool", "content": content}]})
    assert answer.status == 400
    assert "messages[" in answer.json["error"]["message"]


def test_template_variables(app: App) -> None:
    limits = Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300)
    with serving(chat_template="{{ messages[0].content }}{{ mood }}", limits=limits) as app:
        app.post(CHAT, {"messages": USER, "chat_template_kwargs": {"mood": "!"}})
        assert bytes(unpacked(app.backend.requests[-1].prompt_ids)) == b"Hi!"
