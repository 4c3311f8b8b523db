from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, HELLO, Said, Script
from tests.fakes.tokenizer import BOS_ID, unpacked
from tgi.enums import FinishReason
from tgi.errors import GenerationFailed, Overloaded
from tgi.router.api.logprobs import Columns
from tgi.router.api.openai_request import grammar_aside
from tgi.router.backend import PromptToken, TokenEvent, TopToken
from tgi.router.schema.completions import CompletionRequest
from tgi.router.validation.parameters import Limits
from tgi.router.validation.request import ValidRequest

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving() as app:
        yield app


@pytest.fixture(autouse=True)
def hello(app: App) -> None:
    app.backend.script = HELLO
    app.backend.refusal = None


def chunks_of(app: App, **body: Any) -> list[dict[str, Any]]:
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "stream": True, **body})
    assert answer.status == 200, answer.body
    assert answer.events[-1] == b"[DONE]"
    return [json.loads(event) for event in answer.events[:-1]]


def said(text: str, **more: Any) -> Said:
    """A token of one byte."""
    return Said(text, ord(text), **more)


def echoing(*tokens: Said) -> Callable[[ValidRequest], Script]:
    """As the shard: a prompt of single bytes comes back with log probabilities, except the first."""

    def script(request: ValidRequest) -> Script:
        ids = unpacked(request.prompt_ids)
        alternatives = (TopToken(ord("x"), "x", -0.5, False), TopToken(ord("y"), "y", -0.75, False))
        prompt = [
            PromptToken(token_id, chr(token_id), None if at == 0 else -1.5, alternatives[: request.prompt_top_n])
            for at, token_id in enumerate(ids)
        ]
        return Script(tokens, FinishReason.LENGTH, prompt=prompt if request.prompt_logprobs else ())

    return script


@pytest.mark.row("B: /v1/completions")
@pytest.mark.fault("TGI#1997")
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [b"Hi"]),
        (["Hi", "Ho"], [b"Hi", b"Ho"]),
        ([72, 105], [b"Hi"]),
        ([[72, 105], [72]], [b"Hi", b"H"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_kind(app: App, prompt: Any, expected: list[bytes], stream: bool) -> None:
    app.backend.script = lambda request: Script((Said(f"after {len(request.prompt_ids) // 4}"), EOS))
    answer = app.post(COMPLETIONS, {"prompt": prompt, "stream": stream})
    assert answer.status == 200, answer.body
    requests = app.backend.requests[-len(expected) :]
    assert [bytes(unpacked(request.prompt_ids)) for request in requests] == expected
    if stream:
        texts = [""] * len(expected)
        for event in answer.events[:-1]:
            (choice,) = json.loads(event)["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(len(expected)))
        texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == [f"after {len(prompt)}" for prompt in expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        pytest.param({"prompt": [999_999]}, "prompt", marks=pytest.mark.fault("vllm#9634")),
        pytest.param({"prompt": [[1], [300]]}, "prompt", marks=pytest.mark.fault("vllm#9634")),
        ({"n": 0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(app: App, body: dict[str, Any], param: str, stream: bool) -> None:
    rest = {} if "prompt" in body or not body else {"prompt": "Hi"}
    answer = app.post(COMPLETIONS, {"stream": stream, **rest, **body})
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert app.services.infer.free_permits == 8


@pytest.mark.parametrize(
    ("body", "message", "error_type"),
    [
        (
            {"suffix": "x"},
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
            "suffix not supported",
        ),
        (
            {"prompt": ["a"] * 5},
            "Number of prompts exceeds the maximum allowed batch size of 4",
            "batch size exceeded",
        ),
    ],
)
def test_refusals_in_tgis_words(app: App, body: dict[str, Any], message: str, error_type: str) -> None:
    answer = app.post(COMPLETIONS, {"prompt": "Hi", **body})
    assert answer.status == 400
    assert (answer.json["error"]["message"], answer.json["error_type"]) == (message, error_type)


def test_nulls_are_absent_and_unknown_fields_ignored(app: App) -> None:
    names = ("model", "best_of", "echo", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed")
    names += ("stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user")
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "unheard_of": 1, **dict.fromkeys(names)})
    assert answer.status == 200, answer.body
    request = app.backend.requests[-1]
    assert request.stopping.max_new_tokens == 198, "as many as fit, as in TGI"
    assert request.sampling.do_sample
    assert request.top_n == 0


@pytest.mark.fault("TGI#1999")
@pytest.mark.parametrize(("stop", "strings"), [("END", ("END",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_reach_the_backend(app: App, stop: Any, strings: tuple[str, ...]) -> None:
    app.post(COMPLETIONS, {"prompt": "Hi", "stop": stop})
    assert app.backend.requests[-1].stopping.stop_strings == strings
    assert not app.backend.requests[-1].stopping.include_stop


@pytest.mark.fault("TGI#2296", "vllm#27572")
def test_the_last_chunk_of_each_choice_has_the_reason(app: App) -> None:
    app.backend.script = Script((said("a"), said("b")), FinishReason.STOP_SEQUENCE, stop="END")
    chunks = chunks_of(app, prompt=["x", "y"])
    assert [chunk["object"] for chunk in chunks] == ["text_completion"] * 4
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("a", None), ("b", "stop")]
        assert choices[-1]["stop_reason"] == "END"


def test_usage_sums_prompts_and_answers(app: App) -> None:
    app.backend.script = lambda request: Script((said("a"), EOS), num_cached=len(request.prompt_ids) // 4 - 1)
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    body = {"prompt": ["abc", "de"], "n": 2}
    answer = app.post(COMPLETIONS, {**body, "best_of": 2})
    assert answer.json["usage"] == usage
    headers = {name: answer.headers[name] for name in ("x-prompt-tokens", "x-generated-tokens", "x-total-time")}
    assert headers == {"x-prompt-tokens": "5", "x-generated-tokens": "8", "x-total-time": str(2 * 171)}
    assert answer.headers["x-compute-characters"] == "5"
    assert "x-compute-time" not in answer.headers
    assert all(chunk["usage"] is None for chunk in chunks_of(app, **body))
    *_, last = chunks_of(app, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], usage)
    chunks = chunks_of(app, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_choices_are_numbered_by_prompt_then_choice(app: App) -> None:
    app.backend.script = lambda request: Script((Said(f"{unpacked(request.prompt_ids)[0]}"), EOS))
    choices = app.post(COMPLETIONS, {"prompt": [[1], [2]], "n": 2, "seed": 3}).json["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "1"), (1, "1"), (2, "2"), (3, "2")]
    seeds = [choice["seed"] for choice in choices]
    assert seeds[0] == seeds[2] == 3, "the same for every prompt"
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("n", [1, 2])
def test_the_best_by_mean_logprob(app: App, n: int) -> None:
    logprobs = iter((-0.5, -0.125, -0.25))
    app.backend.script = lambda request: Script(
        (Said("x", logprob=(mean := next(logprobs))), Said(f"{mean}", logprob=mean))
    )
    limits = Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300, max_best_of=3)
    with serving(app.backend, limits=limits) as app:
        answer = app.post(COMPLETIONS, {"prompt": "Hi", "n": n, "best_of": 3}).json
    assert [choice["text"] for choice in answer["choices"]] == ["x-0.125", "x-0.25"][:n]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1][:n]
    assert answer["usage"]["completion_tokens"] == 6, "what was made counts, shown or not"


def test_the_best_cannot_be_streamed(app: App) -> None:
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "best_of": 2, "stream": True})
    assert (answer.status, answer.json["error"]["param"]) == (400, "best_of")
    assert app.post(COMPLETIONS, {"prompt": "Hi", "best_of": 2, "n": 2, "stream": True}).status == 200


@pytest.mark.parametrize(("prompt", "text"), [("Hé", "Hé"), (list("Hé".encode()), "Hé"), ([BOS_ID, 72], "<s>H")])
def test_the_prompt_is_echoed(app: App, prompt: Any, text: str) -> None:
    app.backend.script = Script((said("a"), said("b"), EOS))
    assert app.post(COMPLETIONS, {"prompt": prompt, "echo": True}).json["choices"][0]["text"] == text + "ab"
    texts = [chunk["choices"][0]["text"] for chunk in chunks_of(app, prompt=prompt, echo=True)]
    assert texts == [text + "a", "b", ""]


@pytest.mark.fault("llama.cpp#11346")
@pytest.mark.row("B: logprobs, top_logprobs")
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_columns(app: App, stream: bool) -> None:
    top = (TopToken(ord("b"), "b", -0.125, False), TopToken(ord("c"), "c", -0.34000000357627869, False))
    first, second = "é".encode()
    tokens = (Said("", first, top=top), Said("é", second, top=top), said("b", logprob=-0.125, top=top), EOS)
    app.backend.script = Script(tokens)
    alternatives = {"b": -0.125, "c": -0.34}
    expected = {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "b", "</s>"],
        "token_logprobs": [-0.25, -0.25, -0.125, -0.5],
        "top_logprobs": [
            {**alternatives, "bytes:\\xc3": -0.25},
            {**alternatives, "bytes:\\xa9": -0.25},
            alternatives,
            {"</s>": -0.5},
        ],
        "text_offset": [0, 0, 1, 2],
    }
    if not stream:
        assert app.post(COMPLETIONS, {"prompt": "Hi", "logprobs": 2}).json["choices"][0]["logprobs"] == expected
        assert app.backend.requests[-1].top_n == 2
        return
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(app, logprobs=2)]
    assert all(len(part["tokens"]) == 1 for part in parts)
    assert {name: [part[name][0] for part in parts] for name in expected} == expected


def test_zero_alternatives_still_name_the_chosen_token(app: App) -> None:
    app.backend.script = Script((said("a", top=(TopToken(98, "b", -0.125, False),)),), FinishReason.LENGTH)
    logprobs = app.post(COMPLETIONS, {"prompt": "Hi", "logprobs": 0}).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.25}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echoed_prompt_is_scored(app: App, stream: bool, n: int) -> None:
    app.backend.script = echoing(said("c"))
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "n": n}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(app, **body)]
    else:
        choices = app.post(COMPLETIONS, body).json["choices"]
    assert len(choices) == n
    for choice in choices:
        assert choice["text"] == "abc"
        assert choice["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [None, -1.5, -0.25],
            "top_logprobs": [None, {"x": -0.5, "b": -1.5}, {"c": -0.25}],
            "text_offset": [0, 1, 2],
        }


@pytest.mark.fault("vllm#6521")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_a_prompt_is_scored_without_an_answer(app: App, stream: bool, logprobs: int | None) -> None:
    app.backend.script = echoing(said("c"))
    body = {"prompt": [97, 98], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        first, last = chunks_of(app, **body, stream_options={"include_usage": True})
        choice, usage = first["choices"][0], last["usage"]
    else:
        answer = app.post(COMPLETIONS, body).json
        choice, usage = answer["choices"][0], answer["usage"]
    assert app.backend.requests[-1].stopping.max_new_tokens == 1
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.5} if logprobs == 0 else {"x": -0.5, "b": -1.5}]


def test_scoring_says_what_it_needs() -> None:
    with serving(limits=Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300)) as app:
        answer = app.post(COMPLETIONS, {"prompt": "Hi", "echo": True, "logprobs": 1})
        assert (answer.status, answer.json["error"]["param"]) == (400, "echo")
        assert "--enable-prefill-logprobs" in answer.json["error"]["message"]
        assert app.post(COMPLETIONS, {"prompt": "Hi", "echo": True}).status == 200


class Words:
    """A vocabulary as a test says it; ids below 100 are special."""

    def __init__(self, *tokens: bytes) -> None:
        self._tokens = dict(enumerate(tokens, 100)) | {1: b"<s>"}

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def token_text(self, token_id: int) -> str:
        return self._tokens[token_id].decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id < 100


@pytest.mark.parametrize(
    ("tokens", "ids", "text", "offsets"),
    [
        ((b"a", b"b"), (100, 101), "ab", [0, 1]),
        ((b"a", b"b"), (1, 100, 101), "ab", [0, 0, 1]),  # added by the tokenizer, no part of the text
        ((b"a", b"b"), (1, 100, 1, 101), "<s>a<s>b", [0, 3, 4, 7]),
        ((b" Hi", b" you"), (100, 101), "Hi you", [0, 2]),  # SentencePiece puts a blank before the text
        ((b"\xc3", b"\xa9", b"x"), (100, 101, 102), "éx", [0, 0, 1]),
        ((b"\xc3", b"x", b"\xa9", b"y"), (100, 101, 102, 103), "\ufffdx\ufffdy", [0, 1, 2, 3]),  # ids of no valid text
    ],
)
def test_where_the_tokens_of_a_prompt_lie(
    tokens: tuple[bytes, ...], ids: tuple[int, ...], text: str, offsets: list[int]
) -> None:
    columns = Columns(Words(*tokens), 0)
    columns.add_prompt([PromptToken(token_id, "", -0.5) for token_id in ids], text)
    assert columns.take().text_offset == offsets
    assert columns.take().tokens == []


@given(st.lists(st.sampled_from(("é", "😀", "a", " b")) | st.binary(min_size=1, max_size=3), max_size=12))
def test_where_the_tokens_of_an_answer_lie(pieces: list[str | bytes]) -> None:
    """Also where their bytes are no UTF-8: behind the text of all tokens before, or inside the last character of it."""
    tokens = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    columns = Columns(Words(*tokens), 0)
    for index in range(len(tokens)):
        columns.add(TokenEvent(100 + index, "", -0.5, False), "")
    for index, offset in enumerate(columns.take().text_offset):
        before = len(b"".join(tokens[:index]).decode("utf-8", "replace"))
        assert offset in ((before - 1, before) if tokens[index][0] & 0xC0 == 0x80 else (before,))


def test_a_special_token_that_is_shown_takes_room(app: App) -> None:
    app.backend.script = Script((said("a"), Said("<|im_start|>", special=True), said("b"), EOS))
    body = {"prompt": "Hi", "logprobs": 0}
    for keeps, offsets in ((False, [0, 1, 13, 14]), (True, [0, 1, 1, 2])):
        choice = app.post(COMPLETIONS, {**body, "skip_special_tokens": keeps}).json["choices"][0]
        assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_have_their_status(app: App, stream: bool) -> None:
    app.backend.script = Script((), error=GenerationFailed("x"))
    answer = app.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
    assert (answer.status, answer.json["error_type"]) == (424, "generation")
    app.backend.refusal = Overloaded(retry_after_s=7)
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "stream": stream})
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert app.services.infer.free_permits == 8


def test_an_error_in_a_stream_is_an_event_and_then_done(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("b")), error=GenerationFailed("out of luck"))
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "stream": True})
    assert answer.status == 200
    assert json.loads(answer.events[-2])["error"]["http_status_code"] == 424
    assert answer.events[-1] == b"[DONE]"


@pytest.mark.parametrize(("body", "param"), [({"n": 9}, "n"), ({"prompt": ["a"] * 3, "n": 4}, "n")])
def test_more_answers_than_the_server_ever_gives_are_refused_by_name(
    app: App, body: dict[str, Any], param: str
) -> None:
    answer = app.post(COMPLETIONS, {"prompt": "Hi", **body})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert "at most 8 answers" in answer.json["error"]["message"]


@pytest.mark.fault("vllm#37011")
def test_too_long_has_its_own_code(app: App) -> None:
    for body in ({"prompt": "a" * 150}, {"prompt": "Hi", "max_tokens": 199}):
        answer = app.post(COMPLETIONS, body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


def test_a_grammar(app: App) -> None:
    assert app.post(COMPLETIONS, {"prompt": "Hi", "guided_choice": ["yes", "no"]}).status == 200
    assert app.backend.requests[-1].grammar is not None
    answer = app.post(COMPLETIONS, {"prompt": "Hi", "guided_regex": "a", "guided_json": {"type": "object"}})
    assert answer.status == 400


def test_a_grammar_with_schemas_inside_is_read_beside_the_event_loop() -> None:
    readers: list[int] = []

    class Seen(dict[str, Any]):
        def items(self) -> Any:
            readers.append(threading.get_ident())
            return super().items()

    body = CompletionRequest(prompt="Hi", structured_outputs=Seen(grammar="start: %json {}"))
    wish = asyncio.run(grammar_aside(body))
    assert wish is not None and wish.param == "structured_outputs.grammar"
    assert threading.get_ident() not in readers and readers


def test_special_tokens_are_text_when_asked_for(app: App) -> None:
    app.backend.script = Script((Said("a"), Said("<|im_start|>", special=True), Said("b"), EOS))
    body = {"prompt": "Hi", "skip_special_tokens": False}
    assert app.post(COMPLETIONS, body).json["choices"][0]["text"] == "a<|im_start|>b"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks_of(app, skip_special_tokens=False)) == (
        "a<|im_start|>b"
    )


def test_sagemaker_takes_the_same_body(app: App) -> None:
    assert app.post("/invocations", {"prompt": "Hi"}).json["choices"][0]["text"] == "Hello world"


def test_a_long_answer_with_logprobs_is_complete(app: App) -> None:
    """It is rendered beside the event loop."""
    app.backend.script = Script([*[said("a")] * 600, EOS])
    choice = app.post(COMPLETIONS, {"prompt": "Hi", "logprobs": 1}).json["choices"][0]
    assert choice["text"] == "a" * 600
    assert choice["logprobs"]["text_offset"] == list(range(601))


@pytest.mark.parametrize("n", [1, 2])
def test_a_long_echoed_prompt_is_rendered_beside_the_event_loop(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    add_prompt = Columns.add_prompt

    def watched(self: Columns, tokens: Any, text: str) -> None:
        on_loop.append(asyncio._get_running_loop() is not None)
        add_prompt(self, tokens, text)

    monkeypatch.setattr(Columns, "add_prompt", watched)
    limits = Limits(max_input_tokens=2_000, max_total_tokens=3_000, vocab_size=300, prompt_logprobs=True)
    with serving(limits=limits) as app:
        app.backend.script = echoing(said("c"), said("d"))
        body = {"prompt": "ab" * 400, "echo": True, "logprobs": 1, "n": n}
        plain = app.post(COMPLETIONS, body).json["choices"]
        chunks = [chunk["choices"][0] for chunk in chunks_of(app, **body)]
        for choice in plain:
            mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
            assert "".join(chunk["text"] for chunk in mine) == choice["text"] == "ab" * 400 + "cd"
            for column, values in choice["logprobs"].items():
                assert [value for chunk in mine for value in chunk["logprobs"][column]] == values
        assert on_loop
        assert not any(on_loop)
        app.backend.script = lambda request: Script((), prompt=echoing()(request).prompt, error=GenerationFailed("no"))
        assert app.post(COMPLETIONS, {**body, "stream": True}).status == 424
