"""The OpenAPI document: whole, true to the routes and to what validation enforces; and how it differs from TGI's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from docs import openapi as comparison
from tests.fakes.app import App, serving
from tgi.router.api.openapi import Document
from tgi.router.app import ROUTES, Row, table

EVERY_ROW = table(kserve_routes=True, predict_route="/predict", health_route="/alive")
METHODS = {"get", "post"}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(payload_limit=200_000, rows=EVERY_ROW) as app:
        yield app


@pytest.fixture(scope="module")
def tree(app: App) -> dict[str, Any]:
    return app.get("/api-doc/openapi.json").json


def document(app: App, rows: Sequence[Row], has_key: bool = False) -> Document:
    return Document(rows, app.services.infer.validator.limits, app.services.info.version, has_key)


def operations(tree: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in tree["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def validator(tree: dict[str, Any], schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": tree["components"]})


@pytest.mark.row("B: /docs, /api-doc/openapi.json")
def test_it_is_served_and_may_be_kept(app: App) -> None:
    answer = app.get("/api-doc/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert app.get("/api-doc/openapi.json", {"if-none-match": answer.headers["etag"]}).status == 304


def test_it_is_the_same_at_every_start(app: App) -> None:
    first, second = (document(app, EVERY_ROW).content for _ in range(2))
    assert first == second == app.get("/api-doc/openapi.json").body
    turned = document(app, EVERY_ROW[::-1]).tree
    assert turned["components"] == json.loads(first)["components"]


def test_routes_and_document_are_one(tree: dict[str, Any]) -> None:
    served = {(row.method.lower(), row.path.replace(":path}", "}")) for row in EVERY_ROW if row.operation}
    assert {(method, path) for method, path, _ in operations(tree)} == served
    untold = [row.path for row in EVERY_ROW if row.operation is None]
    assert all(path.startswith("/docs") for path in untold)


def test_every_operation_is_whole(tree: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(tree)]
    assert len(set(names)) == len(names)
    tags = {tag["name"] for tag in tree["tags"]}
    for method, path, operation in operations(tree):
        assert method in METHODS
        assert operation["summary"]
        assert set(operation["tags"]) <= tags
        assert "200" in operation["responses"]
        assert all(re.fullmatch("[1-5][0-9]{2}", status) for status in operation["responses"])
        assert all(response["description"] for response in operation["responses"].values())
        in_path = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path))
        if method == "post" and path != "/flush_cache":
            assert operation["requestBody"]["content"].keys() == {"application/json"}


def test_every_schema_is_a_schema_and_every_reference_leads_somewhere(tree: dict[str, Any]) -> None:
    for name, schema in tree["components"]["schemas"].items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(tree)))
    known = {f"#/components/schemas/{name}" for name in tree["components"]["schemas"]}
    assert references <= known
    roots = {reference for reference in known if json.dumps(tree["paths"]).count(f'"{reference}"')}
    assert known <= references | roots, "a schema that nothing uses"


def test_examples_are_valid_and_work(app: App, tree: dict[str, Any]) -> None:
    for method, path, operation in operations(tree):
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            validator(tree, content["schema"]).validate(content["example"])
            answer = app.request(
                method.upper(), path.replace("{name}", "m").replace("{version}", "1"), content["example"]
            )
            assert answer.status == 200, (path, answer.body)
            media_type = answer.headers["content-type"].partition(";")[0]
            schema = operation["responses"]["200"]["content"][media_type]["schema"]
            payloads = [answer.json] if media_type == "application/json" else map(json.loads, answer.events)
            for payload in payloads:
                validator(tree, schema).validate(payload)


def test_streams_are_what_the_document_says(app: App, tree: dict[str, Any]) -> None:
    for method, path, operation in operations(tree):
        content = operation["responses"]["200"].get("content", {})
        if {"application/json", "text/event-stream"} <= content.keys():
            example = operation["requestBody"]["content"]["application/json"]["example"]
            answer = app.request(method.upper(), path, example | {"stream": True})
            for event in answer.events:
                if event != b"[DONE]":
                    validator(tree, content["text/event-stream"]["schema"]).validate(json.loads(event))


@pytest.mark.parametrize("has_key", [False, True])
def test_the_key_is_told_where_it_is_asked_for(app: App, has_key: bool) -> None:
    tree = document(app, EVERY_ROW, has_key).tree
    guarded = {(row.method.lower(), row.path.replace(":path}", "}")) for row in EVERY_ROW if row.is_guarded}
    told = {(method, path) for method, path, operation in operations(tree) if "security" in operation}
    assert told == {(method, path) for method, path, operation in operations(tree) if "401" in operation["responses"]}
    assert told == (guarded if has_key else set())
    assert ("securitySchemes" in tree["components"]) == has_key


def test_all_that_costs_work_is_guarded() -> None:
    assert {row.path for row in ROUTES if row.is_guarded} == {row.path for row in ROUTES if row.method == "POST"}


def _beyond(field: str, kind: str, name: str, limit: Any) -> Any:
    """A value just outside of one limit."""
    match name:
        case "minimum":
            return limit - (1 if kind == "integer" else 0.5)
        case "exclusiveMinimum" | "exclusiveMaximum":
            return limit
        case "maximum":
            return limit + 1 if kind == "integer" else limit * 2
        case "maxItems":
            return [_item(field, index) for index in range(limit + 1)]
    raise AssertionError(f"no test for {name}")


def _item(field: str, index: int) -> Any:
    if field == "tools":
        return {"type": "function", "name": f"f{index}", "function": {"name": f"f{index}"}}
    return str(index) if field in ("stop", "stop_sequences", "bad_words") else 7


def _at(field: str, kind: str, name: str, limit: Any) -> Any:
    """A value just inside of it."""
    match name:
        case "exclusiveMinimum":
            return limit + 0.25
        case "maxItems":
            return [_item(field, index) for index in range(limit)]
    return limit


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GenerateParameters": ("/generate", {"inputs": "x"}),
    "ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "CompletionRequest": ("/v1/completions", {"prompt": "x"}),
    "ResponsesRequest": ("/v1/responses", {"input": "x"}),
    "MessagesRequest": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
}

# An integer's own width alone is what these say; the limits of a server's memory are found later.
TOO_MUCH_TO_RUN = {
    "max_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "tools",
}
HANGS_ON_OTHERS = {"top_n_tokens", "top_logprobs", "logprobs"}


def _limits(tree: dict[str, Any]) -> Iterator[tuple[str, str, str, str, Any]]:
    for struct in REQUESTS:
        for field, schema in tree["components"]["schemas"][struct]["properties"].items():
            for choice in schema.get("anyOf", [schema]):
                for name in ("minimum", "maximum", "exclusiveMinimum", "maxItems"):
                    if name in choice:
                        yield struct, field, choice["type"], name, choice[name]
                    if name in choice.get("items", {}):
                        yield struct, f"{field}[]", choice["items"]["type"], name, choice["items"][name]


def test_ranges_are_those_that_are_enforced(app: App, tree: dict[str, Any]) -> None:
    found = list(_limits(tree))
    assert len(found) > 60
    wrong = []
    for struct, field, kind, name, limit in found:
        path, body = REQUESTS[struct]

        def status(value: Any, field: str = field, path: str = path, body: dict[str, Any] = body) -> int:
            if field.endswith("[]"):
                field, value = field.removesuffix("[]"), [value]
            asked = {field: value, "do_sample": True} if path == "/generate" else {field: value}
            return app.post(path, body | ({"parameters": asked} if path == "/generate" else asked)).status

        if status(_beyond(field, kind, name, limit)) not in (400, 422):
            wrong.append(f"{struct}.{field}: beyond {name} {limit} is accepted")
        if field not in TOO_MUCH_TO_RUN | HANGS_ON_OTHERS and status(_at(field, kind, name, limit)) != 200:
            wrong.append(f"{struct}.{field}: {name} {limit} is refused")
    assert wrong == []


def test_every_difference_to_tgis_document_has_a_reason() -> None:
    assert comparison.problems() == []


def test_the_page_says_what_the_reasons_say() -> None:
    assert comparison.PAGE.read_text() == comparison.render_page(), "run `make docs`"


def test_the_comparison_sees_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = comparison.our_document()
    before = set(comparison.differences())
    del ours["components"]["schemas"]["GenerateParameters"]["properties"]["top_k"]
    ours["components"]["schemas"]["Token"]["properties"]["logprob"] = {"type": "string"}
    del ours["paths"]["/tokenize"]
    ours["paths"]["/generate"]["post"]["responses"].pop("424")
    monkeypatch.setattr(comparison, "our_document", lambda: ours)
    new = {str(item) for item in set(comparison.differences()) - before}
    assert {
        "GenerateParameters.top_k: field: there -> -",
        "Token.logprob: type: number -> string",
        "POST /tokenize: route: there -> -",
        "POST /generate: answer 424: there -> -",
    } <= new


def test_rows_are_told_once() -> None:
    def key(row: Row) -> tuple[str, str]:
        return row.method, row.path

    assert len({key(row) for row in EVERY_ROW}) == len(EVERY_ROW)
