from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, read_until, serving
from tests.fakes.backend import EOS, HELLO, Said, Script, ScriptedBackend
from tests.fakes.tokenizer import unpacked
from tgi.enums import FinishReason
from tgi.errors import ContextTooLong, GenerationFailed, Overloaded
from tgi.router.backend import TopToken
from tgi.router.validation.parameters import Limits

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


def spoken(text: str, *, reason: FinishReason = FinishReason.EOS_TOKEN) -> Script:
    """A character a token."""
    tokens = [Said(character, ord(character)) for character in text]
    return Script([*tokens, EOS] if reason is FinishReason.EOS_TOKEN else tokens, reason)


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(scope="module")
def tool_app() -> Iterator[App]:
    """With room for tools in the prompt. Its template does not know them, so a call is a JSON object."""
    limits = Limits(max_input_tokens=2000, max_total_tokens=4000, vocab_size=300)
    with serving(limits=limits) as app:
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
    ("seed", "drawn_with"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (2**63 - 1, 2**63 - 1)]
)
def test_seeds_are_signed_as_openais_or_not_as_tgis(app: App, seed: int, drawn_with: int) -> None:
    assert app.post(CHAT, {"messages": USER, "seed": seed}).status == 200
    assert app.backend.requests[-1].sampling.seed == drawn_with


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_seeds_of_more_than_64_bits_are_refused(app: App, seed: int) -> None:
    answer = app.post(CHAT, {"messages": USER, "seed": seed})
    assert (answer.status, answer.json["error"]["param"]) == (400, "seed")


def test_a_top_p_of_0_leaves_next_to_nothing_to_chance(app: App) -> None:
    assert app.post(CHAT, {"messages": USER, "top_p": 0}).status == 200
    assert 0 < app.backend.requests[-1].sampling.top_p < 1e-6
    assert app.post(CHAT, {"messages": USER, "top_p": -0.1}).status == 400


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({}, 180),
    ],
)
@pytest.mark.fault("vllm#6707")
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
    assert contents == [{"role": "assistant", "content": "a"}, *({"content": text} for text in ("", "", "日 😀", ""))]
    assert app.post(CHAT, {"messages": USER}).json["choices"][0]["message"]["content"] == "a日 😀"


@pytest.mark.fault("sglang#2088")
@pytest.mark.row("B: logprobs, top_logprobs")
def test_top_logprobs_of_each_position(app: App) -> None:
    """At most as many as were asked for, though the shard sends ties along."""

    def top(text: str) -> tuple[TopToken, ...]:
        alternatives = (TopToken(ord(text), text, -0.25, False), TopToken(0xC3, "\ufffd", -0.34000000357627869, False))
        return (*alternatives, TopToken(1, "?", -0.34000000357627869, False))

    tokens = (Said("a", ord("a"), top=top("a")), Said("b", ord("b"), top=top("b")))
    app.backend.script = Script(tokens, FinishReason.LENGTH)
    expected = [
        {
            "token": text,
            "logprob": -0.25,
            "bytes": [ord(text)],
            "top_logprobs": [
                {"token": text, "logprob": -0.25, "bytes": [ord(text)]},
                {"token": "\ufffd", "logprob": -0.34, "bytes": [0xC3]},
            ],
        }
        for text in "ab"
    ]
    body = {"logprobs": True, "top_logprobs": 2}
    assert app.post(CHAT, {"messages": USER, **body}).json["choices"][0]["logprobs"] == {"content": expected}
    assert app.backend.requests[-1].top_n == 2
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(app, **body)]
    assert streamed == [{"content": [entry]} for entry in expected]


def test_as_many_alternatives_as_openai_grants(app: App) -> None:
    """The flag's default, 5, would break clients that ask for 20."""
    assert app.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 20}).status == 200
    answer = app.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21})
    assert (answer.status, answer.json["error"]["param"]) == (400, "top_logprobs")
    assert "<= 20" in answer.json["error"]["message"]
    # TGI takes it without `logprobs`, and shows nothing.
    assert app.post(CHAT, {"messages": USER, "top_logprobs": 2}).json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_tell_each_tokens_own_bytes(app: App, stream: bool) -> None:
    """Also of a part of a character, which shows nothing, and of one that the model holds impossible."""
    parts = "😀".encode()
    tokens = [Said("", part) for part in parts[:-1]] + [Said("😀", parts[-1], logprob=float("-inf")), EOS]
    app.backend.script = Script(tokens)
    if stream:
        chunks = chunks_of(app, logprobs=True)
        entries = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    else:
        entries = app.post(CHAT, {"messages": USER, "logprobs": True}).json["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == parts + b"</s>"
    assert [entry["token"] for entry in entries] == ["\ufffd"] * 4 + ["</s>"]
    assert [entry["logprob"] for entry in entries] == [-0.25] * 3 + [-9999.0, -0.5]


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
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),  # more than there are permits
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
        ({"guided_grammar": "start: /a/", "tools": TOOLS}, "guided_grammar"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.fault("llama.cpp#24097")
def test_what_cannot_be_is_refused_by_name(app: App, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = app.post(CHAT, {"messages": USER, "stream": stream, **body})
    assert answer.status == 400, answer.body
    assert list(answer.json) == ["error", "error_type"]
    assert list(answer.json["error"]) == ["message", "type", "param", "code"]
    assert answer.json["error"]["param"] == param
    assert f"`{param}" in answer.json["error"]["message"]
    assert answer.json["error_type"] == "validation"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": USER, "n": -1}, "n"),
    ],
)
def test_a_body_of_the_wrong_shape_names_the_place(app: App, body: dict[str, Any], param: str) -> None:
    answer = app.post(CHAT, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body


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


def test_where_the_template_gets_its_variables(app: App) -> None:
    template = "{{ reasoning_effort or 'none' }} {{ messages[0].content }}"
    with serving(chat_template=template) as app:
        for body, expected in (
            ({}, b"none Hi"),
            ({"reasoning_effort": "high"}, b"high Hi"),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, b"low Hi"),
        ):
            app.post(CHAT, {"messages": USER, **body})
            assert bytes(unpacked(app.backend.requests[-1].prompt_ids)) == expected


@pytest.mark.row("B: n, presence_penalty, logit_bias")
def test_each_of_n_choices_has_its_index_and_seed(app: App) -> None:
    app.backend.script = lambda request: Script((Said(f"{request.sampling.seed % 97}"), EOS), num_cached=3)
    answer = app.post(CHAT, {"messages": USER, "n": 3, "seed": 5}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    seeds = [choice["seed"] for choice in answer["choices"]]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert [choice["message"]["content"] for choice in answer["choices"]] == [str(seed % 97) for seed in seeds]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (20, 6)
    assert answer["usage"]["total_tokens"] == 26
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    requests = app.backend.requests[-3:]
    assert requests[0].siblings is requests[2].siblings is not None
    again = app.post(CHAT, {"messages": USER, "n": 3, "seed": 5}).json
    assert [choice["seed"] for choice in again["choices"]] == seeds


def test_n_choices_are_streamed_side_by_side_and_end_once(app: App) -> None:
    app.backend.script = None
    with serving(ScriptedBackend(None)) as app:
        client = app.open(CHAT, {"messages": USER, "stream": True, "n": 2, "stream_options": {"include_usage": True}})
        first, second = app.backend.next_playing(), app.backend.next_playing()
        second.say("b")
        read_until(client, b'"b"')
        first.say("a", EOS, script=HELLO)
        received = read_until(client, b'"stop"')
        assert b"[DONE]" not in received
        second.say("c", EOS, script=HELLO)
        received = read_until(client, b"[DONE]", received)
        events = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
        *chunks, usage = events
        assert [(chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
            (0, None),
            (0, "stop"),
            (1, None),
            (1, "stop"),
        ]
        assert (usage["choices"], usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == ([], 20, 5)


def test_too_many_choices_are_refused(app: App) -> None:
    """More than there can ever be: 400. More than there is room for now: 429."""
    assert app.post(CHAT, {"messages": USER, "n": 9}).status == 400
    with serving(ScriptedBackend(None)) as app:
        app.open(CHAT, {"messages": USER, "n": 5})
        app.backend.next_playing()
        assert app.post(CHAT, {"messages": USER, "n": 4}).status == 429


def test_one_choice_that_fails_fails_all(app: App) -> None:
    count = iter(range(2))
    app.backend.script = lambda request: HELLO if next(count) else Script((), error=GenerationFailed("x"))
    assert app.post(CHAT, {"messages": USER, "n": 2}).status == 424
    assert app.services.infer.free_permits == 8


def test_usage_in_every_chunk(app: App) -> None:
    chunks = chunks_of(app, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [21, 22, 23, 23]
    only = chunks_of(app, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"] for chunk in only] == [None] * 3


@pytest.mark.parametrize(("body", "text"), [({}, "ab"), ({"skip_special_tokens": False}, "a<|im_start|>b")])
def test_special_tokens_are_text_when_asked_for(app: App, body: dict[str, Any], text: str) -> None:
    """But the one that ends the answer is none."""
    app.backend.script = Script((Said("a"), Said("<|im_start|>", special=True), Said("b"), EOS))
    assert app.post(CHAT, {"messages": USER, **body}).json["choices"][0]["message"]["content"] == text
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks_of(app, **body)) == text


def test_special_tokens_before_the_prompt_when_asked_for(app: App) -> None:
    app.post(CHAT, {"messages": USER, "add_special_tokens": True})
    assert len(unpacked(app.backend.requests[-1].prompt_ids)) == 20  # this tokenizer adds none
    assert app.backend.requests[-1].sampling.raw_logprobs


def test_the_priority_of_the_header(app: App) -> None:
    assert app.post(CHAT, {"messages": USER}, {"x-tgi-priority": "7"}).status == 200
    assert app.backend.requests[-1].priority == 7
    assert app.post(CHAT, {"messages": USER, "priority": 2}, {"x-tgi-priority": "7"}).status == 200
    assert app.backend.requests[-1].priority == 2
    assert app.post(CHAT, {"messages": USER}, {"x-tgi-priority": "high"}).status == 400


def test_whose_request_it_is(app: App) -> None:
    """A gateway's header wins over what a client writes: another `user` in each request gains nothing."""
    for user, header, client in (
        (None, None, ""),
        ("u", None, "u"),
        (None, "tenant", "tenant"),
        ("u", "tenant", "tenant"),
        ("u", "", "u"),
    ):
        headers = {} if header is None else {"x-tgi-client": header}
        assert app.post(CHAT, {"messages": USER, "user": user}, headers).status == 200
        assert app.backend.requests[-1].client == client


def test_a_long_name_is_kept_as_its_digest(app: App) -> None:
    clients: set[str] = set()
    for name in ("x" * 5_000, "x" * 5_000 + "y", "ü" * 65):
        assert app.post(CHAT, {"messages": USER, "user": name}).status == 200
        clients.add(app.backend.requests[-1].client)
    assert len(clients) == 3
    assert all(len(client) == 32 for client in clients)


def test_a_long_answer_with_logprobs_is_complete(app: App) -> None:
    """It is rendered beside the event loop."""
    app.backend.script = spoken("ab" * 400)
    choice = app.post(CHAT, {"messages": USER, "logprobs": True}).json["choices"][0]
    assert choice["message"]["content"] == "ab" * 400
    assert len(choice["logprobs"]["content"]) == 801


def test_headers_of_several_choices(app: App) -> None:
    app.backend.script = HELLO
    headers = app.post(CHAT, {"messages": USER, "n": 2}).headers
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"], headers["x-total-time"]) == ("20", "6", "171")


@pytest.mark.fault("TGI#2794")
@pytest.mark.row("B: tools, tool_choice, tool_prompt")
def test_a_tool_call_in_openais_shape(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL)
    choice = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS}).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert list(message) == ["role", "content", "tool_calls"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert list(call) == ["id", "type", "function"]
    assert call["id"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}


@pytest.mark.fault("TGI#2794", "vllm#44098", "vllm#9209", "vllm#31501")
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_streamed_tool_call(tool_app: App, choice: Any, size: int) -> None:
    """Id and name once, then arguments, then the reason in a chunk of its own, however the text was cut."""
    pieces = [CALL[at : at + size] for at in range(0, len(CALL), size)]
    tool_app.backend.script = Script([*map(Said, pieces), EOS])
    chunks = [chunk["choices"][0] for chunk in chunks_of(tool_app, tools=TOOLS, tool_choice=choice)]
    *deltas, last = [chunk["delta"] for chunk in chunks]
    assert last == {}
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * len(deltas) + ["tool_calls"]
    assert deltas[0].pop("role") == "assistant"
    assert all(list(delta) == ["tool_calls"] for delta in deltas)
    (head,) = deltas[0]["tool_calls"]
    assert head == {
        "index": 0,
        "id": head["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    rest = [call for delta in deltas[1:] for call in delta["tool_calls"]]
    assert all(list(call) == ["index", "function"] and list(call["function"]) == ["arguments"] for call in rest)
    assert json.loads("".join(call["function"]["arguments"] for call in rest)) == {"city": "Ulm"}


@pytest.mark.fault("TGI#2145")
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_an_answer_that_calls_none_or_breaks_off(tool_app: App, stream: bool) -> None:
    def ask() -> tuple[str, str]:
        if not stream:
            (choice,) = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS}).json["choices"]
            return choice["message"]["content"] or "", choice["finish_reason"]
        choices = [chunk["choices"][0] for chunk in chunks_of(tool_app, tools=TOOLS)]
        return "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]

    tool_app.backend.script = HELLO
    assert ask() == ("Hello world", "stop")
    tool_app.backend.script = spoken(CALL[:30], reason=FinishReason.LENGTH)
    assert ask()[1] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "reason"), [(-1, "tool_calls"), (-2, "stop"), (-6, "stop")])
def test_a_stop_string_within_a_call_makes_it_no_call(tool_app: App, stream: bool, length: int, reason: str) -> None:
    """Its arguments are no JSON. One that cuts no more than what ends the call leaves it whole."""
    tokens = [Said(character, ord(character)) for character in CALL[:length]]
    tool_app.backend.script = Script(tokens, FinishReason.STOP_SEQUENCE, stop="}")
    if stream:
        choice = chunks_of(tool_app, tools=TOOLS)[-1]["choices"][0]
    else:
        (choice,) = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS}).json["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, "}")


def test_tool_choice_none_is_an_ordinary_chat(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL)
    choice = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"}).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert b"weather" not in bytes(unpacked(tool_app.backend.requests[-1].prompt_ids))


def test_a_tool_that_is_not_there(tool_app: App) -> None:
    answer = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "wether"})
    assert (answer.status, answer.json["error_type"]) == (400, "tool_error")
    assert answer.json["error"]["message"] == "Tool error: Tool with name wether not found"
    assert answer.json["error"]["param"] == "tool_choice"


@pytest.mark.fault("llama.cpp#28478")
def test_logprobs_of_a_streamed_tool_call(tool_app: App) -> None:
    """Every token's, also of those that show nothing."""
    tool_app.backend.script = spoken(CALL)
    chunks = [chunk["choices"][0] for chunk in chunks_of(tool_app, tools=TOOLS, logprobs=True)]
    entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == CALL + "</s>"
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_each_choice_has_calls_of_its_own(tool_app: App) -> None:
    tool_app.backend.script = spoken(CALL)
    choices = tool_app.post(CHAT, {"messages": USER, "tools": TOOLS, "n": 2}).json["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 2


@pytest.mark.fault("vllm#39885")
def test_thinking_text_is_apart() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# answers begin with <think> #}"
    with serving(chat_template=template) as app:
        app.backend.script = spoken("<think>Hm.</think>Yes")
        answer = app.post(CHAT, {"messages": USER}).json
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
        usage = answer["usage"]
        assert 3 <= usage["completion_tokens_details"]["reasoning_tokens"] <= len("<think>Hm.</think>")
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(app)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes"
        *_, last = chunks_of(app, stream_options={"include_usage": True})
        assert last["usage"] == usage


@pytest.mark.fault("TGI#3058", "TGI#2899")
@pytest.mark.row("B: response_format, both forms")
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
        {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
        {"type": "json_object", "value": {"type": "object", "properties": {}}},
        {"type": "json", "value": {"type": "object", "properties": {}}},
        {"type": "regex", "value": "[0-9]+"},
    ],
)
def test_response_formats_become_a_grammar(app: App, response_format: dict[str, Any]) -> None:
    assert app.post(CHAT, {"messages": USER, "response_format": response_format}).status == 200
    assert app.backend.requests[-1].grammar is not None
    assert app.post(CHAT, {"messages": USER, "response_format": {"type": "text"}}).status == 200
    assert app.backend.requests[-1].grammar is None


def test_a_call_or_an_answer_of_a_shape(tool_app: App) -> None:
    """Tools at will and a response format: what is neither cannot come."""
    body = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
    tool_app.backend.script = spoken(CALL)
    answer = tool_app.post(CHAT, body)
    assert answer.status == 200, answer.body
    grammar = tool_app.backend.requests[-1].grammar
    assert grammar is not None
    assert all(word in grammar.source for word in ("weather", "%json"))
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    tool_app.backend.script = spoken('{"a": 1}')
    assert tool_app.post(CHAT, body).json["choices"][0]["message"]["content"] == '{"a": 1}'
    assert tool_app.post(CHAT, {**body, "tool_choice": "none"}).status == 200
    grammar = tool_app.backend.requests[-1].grammar
    assert grammar is not None
    assert "weather" not in grammar.source


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_name_of_a_model_is_no_payload(app: App, path: str) -> None:
    """It is echoed in every event of a stream."""
    answer = app.post(path, {"messages": USER, "prompt": "x", "model": "m" * 513, "stream": True})
    assert answer.status == 400
    assert answer.json["error"]["param"] == "model"
    assert app.post(path, {"messages": USER, "prompt": "x", "model": "m" * 512}).json["model"] == "m" * 512
