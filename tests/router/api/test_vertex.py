"""POST /vertex, and the paths that Vertex AI chooses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes.app import VOCAB_SIZE, App, serving
from tests.fakes.backend import EOS, WAIT_S, Said, Script, ScriptedBackend
from tgi.errors import GenerationFailed, Overloaded
from tgi.router.app import table
from tgi.router.validation.parameters import Limits
from tgi.router.validation.request import ValidRequest

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}


def echo(request: ValidRequest) -> Script:
    """Says how long its prompt was."""
    return Script((Said(f"{request.num_prompt_tokens}"), EOS))


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(ScriptedBackend(echo), max_concurrent_requests=4) as app:
        yield app


@pytest.mark.row("B: /invocations, /vertex, AIP routes")
def test_texts_come_in_the_order_of_the_instances(app: App) -> None:
    lengths = [5, 1, 3]
    answer = app.post("/vertex", {"instances": [{"inputs": "x" * length} for length in lengths]})
    assert answer.status == 200
    assert answer.json == {"predictions": [str(length) for length in lengths]}


def test_prompts_and_chats_may_stand_together(app: App) -> None:
    answer = app.post("/vertex", {"instances": [CHAT, {"inputs": "xx"}]})
    chat, prompt = answer.json["predictions"]
    assert (int(chat) > 2, prompt) == (True, "2")


def test_all_instances_run_at_once(app: App) -> None:
    backend = ScriptedBackend(None)
    with serving(backend, max_concurrent_requests=3) as app, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(app.post, "/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}, {"inputs": "c"}]})
        playing = [backend.next_playing() for _ in range(3)]  # all are running before any has ended
        for index, request in reversed(list(enumerate(playing))):
            request.say(f"{index}", EOS, script=Script(()))
        assert answer.result().json == {"predictions": ["0", "1", "2"]}


def test_every_parameter_counts() -> None:
    backend = ScriptedBackend()
    with serving(backend) as app:
        parameters = {"temperature": 0.5, "top_k": 7, "seed": 3, "max_new_tokens": 9, "stop": ["z"]}
        assert app.post("/vertex", {"instances": [{"inputs": "x", "parameters": parameters}]}).status == 200
    (request,) = backend.requests
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 7, 3)
    assert (request.stopping.max_new_tokens, request.stopping.stop_strings) == (9, ("z",))


def test_without_parameters_an_instance_is_what_generate_makes_of_it() -> None:
    backend = ScriptedBackend()
    with serving(backend) as app:
        app.post("/vertex", {"instances": [{"inputs": "x"}]})
        app.post("/generate", {"inputs": "x"})
    first, second = backend.requests
    assert (first.sampling, first.stopping) == (second.sampling, second.stopping)


def test_no_instances_are_refused_in_tgis_words(app: App) -> None:
    answer = app.post("/vertex", {"instances": []})
    assert answer.status == 422
    assert answer.json == {"error": "Input validation error", "error_type": "Input validation error"}


@pytest.mark.parametrize(
    ("instance", "told"),
    [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": "x", "parameters": {"temperature": 0}}, "`temperature` must be strictly positive"),
        ({"messages": [], "max_tokens": 0}, "max_tokens"),
        ({"inputs": "x", "stream": True}, "`stream` is not supported"),
        (CHAT | {"stream": True}, "`stream` is not supported"),
    ],
)
def test_a_wrong_instance_is_a_422_that_names_its_place(app: App, instance: Any, told: str) -> None:
    answer = app.post("/vertex", {"instances": [{"inputs": "x"}, instance]})
    assert (answer.status, answer.json["error_type"]) == (422, "validation")
    assert told in answer.json["error"]
    assert answer.json["error"].endswith("(in instances[1])")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{}", "missing field `instances`"),
        (b'{"instances":{}}', "instances: Expected `array`"),
        (b'{"instances":[5]}', "instances[0]: Expected `object`"),
        (b'{"instances":[{"inputs":"x"},{}]}', "instances[1]: expected `inputs` or `messages`"),
        (b'{"instances":[{"inputs":5}]}', "inputs: Expected `str`, got `int` (in instances[0])"),
    ],
)
def test_instances_of_another_shape_are_a_422_that_names_the_place(app: App, raw: bytes, told: str) -> None:
    answer = app.post("/vertex", raw=raw)
    assert (answer.status, told in answer.body.decode()) == (422, True), answer.body


def test_one_failure_is_the_answer_and_stops_the_others() -> None:
    backend = ScriptedBackend(None)
    with serving(backend) as app, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(app.post, "/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}]})
        first, second = backend.next_playing(), backend.next_playing()
        second.fail(GenerationFailed("the model broke"))
        assert answer.result().status == 424
        assert answer.result().json["error_type"] == "generation"
        assert first.cancelled.wait(20)
        assert app.services.infer.free_permits == app.services.infer.max_answers


def test_a_client_that_hangs_up_ends_all_instances() -> None:
    backend = ScriptedBackend(None)
    with serving(backend) as app:
        client = app.open("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}, CHAT]})
        playing = [backend.next_playing() for _ in range(3)]
        client.close()
        assert all(request.cancelled.wait(WAIT_S) for request in playing)


def test_a_chat_that_calls_a_tool_gives_the_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    backend = ScriptedBackend(Script((Said(call), EOS)))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    limits = Limits(max_input_tokens=2000, max_total_tokens=3000, vocab_size=VOCAB_SIZE)
    with serving(backend, limits=limits) as app:
        (text,) = app.post("/vertex", {"instances": [CHAT | {"tools": [tool], "max_tokens": 50}]}).json["predictions"]
    assert '"name":"f"' in text


def test_overload_is_a_429() -> None:
    backend = ScriptedBackend()
    backend.refusal = Overloaded()
    with serving(backend) as app:
        answer = app.post("/vertex", {"instances": [{"inputs": "x"}]})
        assert (answer.status, "retry-after" in answer.headers) == (429, True)


def test_more_instances_than_ever_run_at_once_are_refused(app: App) -> None:
    answer = app.post("/vertex", {"instances": [{}] * 5})  # not even looked at
    assert answer.status == 422
    assert "at most 4 answers" in answer.json["error"]


def test_more_instances_than_can_start_now_start_none() -> None:
    backend = ScriptedBackend(None)
    with serving(backend, max_concurrent_requests=2) as app, ThreadPoolExecutor(1) as pool:
        running = pool.submit(app.post, "/generate", {"inputs": "x"})
        request = backend.next_playing()
        assert app.post("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}]}).status == 429
        assert len(backend.requests) == 1
        request.say(EOS, script=Script(()))
        assert running.result().status == 200


@pytest.mark.parametrize("path", ["/predict", "/v1/endpoints/1/deployedModels/2:predict", "/generate"])
def test_vertex_ai_chooses_the_paths(path: str) -> None:
    rows = table(predict_route=path, health_route="/v1/alive")
    with serving(ScriptedBackend(echo), rows=rows, api_key="k") as app:
        assert app.post(path, {"instances": [{"inputs": "xx"}]}).status == 401
        key = {"authorization": "Bearer k"}
        assert app.post(path, {"instances": [{"inputs": "xx"}]}, key).json == {"predictions": ["2"]}
        assert app.post(path, {"instances": [{"inputs": ""}]}, key).json["error_type"] == "validation"
        assert app.get("/v1/alive").status == 200
        app.backend.healthy = False
        assert app.get("/v1/alive").status == 503


@pytest.mark.parametrize("path", ["/predict", "/v1/alive"])
def test_unset_paths_do_not_exist(app: App, path: str) -> None:
    assert app.post(path, {"instances": [{"inputs": "x"}]}).status == 404
