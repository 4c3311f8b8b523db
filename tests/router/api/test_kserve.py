"""KServe's protocol, version 2: TGI's bytes and the protocol's strings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, Said, Script, ScriptedBackend
from tgi.errors import Overloaded
from tgi.router.app import table
from tgi.router.validation.request import ValidRequest

ROWS = table(kserve_routes=True)
MODEL = "/v2/models/org/name"


def echo(request: ValidRequest) -> Script:
    return Script((Said(f"{request.num_prompt_tokens} é"), EOS))


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(ScriptedBackend(echo), rows=ROWS) as app:
        yield app


def tensor(data: list[Any], name: str = "in", **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": data, **fields}


@pytest.mark.row("B: KServe v2 routes")
@pytest.mark.parametrize("version", ["", "/versions/3"])
def test_bytes_in_bytes_out_as_in_tgi(app: App, version: str) -> None:
    body = {"id": "7", "inputs": [tensor(list("né".encode()))], "outputs": [{"name": "out"}]}
    answer = app.post(f"{MODEL}{version}/infer", body)
    assert answer.status == 200
    text = list("3 é".encode())
    expected = {"id": "7", "model_name": "org/name"}
    expected |= {"model_version": "3"} if version else {}
    outputs = [{"name": "out", "shape": [1, len(text)], "datatype": "BYTES", "data": text}]
    assert answer.json == expected | {"outputs": outputs}


def test_strings_in_strings_out_as_in_the_protocol(app: App) -> None:
    answer = app.post(f"{MODEL}/infer", {"inputs": [tensor(["x", "xxx"], shape=[2]), tensor(["xx"], "other")]})
    assert answer.json["outputs"] == [
        {"name": "in", "shape": [2], "datatype": "BYTES", "data": ["1 é", "3 é"]},
        {"name": "other", "shape": [1], "datatype": "BYTES", "data": ["2 é"]},
    ]
    assert "id" not in answer.json


def test_parameters_are_those_of_generate() -> None:
    backend = ScriptedBackend()
    with serving(backend, rows=ROWS) as app:
        parameters = {"max_new_tokens": 9, "seed": 3, "do_sample": True}
        app.post(f"{MODEL}/infer", {"inputs": [tensor(["x"])], "parameters": parameters})
        app.post(f"{MODEL}/infer", {"inputs": [tensor(["x"])]})
        app.post("/generate", {"inputs": "x"})
    first, absent, plain = backend.requests
    assert (first.stopping.max_new_tokens, first.sampling.seed) == (9, 3)
    assert (absent.stopping, absent.sampling) == (plain.stopping, plain.sampling)


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        ({"inputs": [tensor([0xFF])]}, "utf8"),
        ({"inputs": [tensor(["x"])], "outputs": []}, "length mismatch"),
        ({"inputs": [tensor(["x"])], "outputs": [{"name": "a"}, {"name": "b"}]}, "length mismatch"),
        ({"inputs": [tensor([])]}, "validation"),
        ({"inputs": [tensor(["x"])], "parameters": {"top_k": -1}}, "validation"),
    ],
)
def test_errors_have_tgis_types(app: App, body: Any, error_type: str) -> None:
    answer = app.post(f"{MODEL}/infer", body)
    assert (answer.status, answer.json["error_type"]) == (422, error_type)


@pytest.mark.parametrize("data", [[256], [-1], [1.5], ["x", 1], [1, "x"], "x", None])
def test_data_of_another_shape_is_a_422(app: App, data: Any) -> None:
    answer = app.post(f"{MODEL}/infer", {"inputs": [{**tensor([]), "data": data}]})
    assert answer.status == 422
    assert answer.body.startswith(b"Failed to deserialize the JSON body into the target type: inputs[0]")


def test_no_inputs_have_no_outputs(app: App) -> None:
    assert app.post(f"{MODEL}/infer", {"inputs": [], "outputs": []}).json == {"model_name": "org/name", "outputs": []}


@pytest.mark.parametrize("parameters", [{"truncate": 100_000}, {"temperature": -1.0}])
def test_parameters_are_looked_at_without_inputs(app: App, parameters: dict[str, Any]) -> None:
    answer = app.post(f"{MODEL}/infer", {"inputs": [], "parameters": parameters})
    assert answer.status == 422
    assert next(iter(parameters)) in answer.json["error"]


def test_overload_has_its_own_status() -> None:
    backend = ScriptedBackend()
    backend.refusal = Overloaded()
    with serving(backend, rows=ROWS) as app:
        assert app.post(f"{MODEL}/infer", {"inputs": [tensor(["x"])]}).status == 429


def test_health_tells_the_truth() -> None:
    with serving(rows=ROWS) as app:
        for healthy, status in ((True, 200), (False, 503)):
            app.backend.healthy = healthy
            assert app.get("/v2/health/live").json == {"live": True}
            ready = app.get("/v2/health/ready")
            assert (ready.status, ready.json) == (status, {"live": healthy, "ready": healthy})
            for path in (f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
                ready = app.get(path)
                expected = {"name": "org/name", "live": healthy, "ready": healthy}
                assert (ready.status, ready.json) == (status, expected)


def test_metadata(app: App) -> None:
    assert app.get("/v2").json == {"name": "text-generation-inference", "version": "1.2.3", "extensions": []}
    model = app.get(f"{MODEL}/versions/1").json
    assert (model["name"], model["versions"]) == ("org/name", ["1"])
    assert app.get(MODEL).json == model | {"versions": []}


def test_without_the_flag_there_are_no_such_routes() -> None:
    with serving() as app:
        assert app.get("/v2/health/ready").status == 404
        assert app.post(f"{MODEL}/infer", {"inputs": []}).status == 404


def test_only_infer_asks_for_the_key() -> None:
    with serving(rows=ROWS, api_key="k") as app:
        assert app.post(f"{MODEL}/infer", {"inputs": []}).status == 401
        assert app.get("/v2/health/ready").status == 200
