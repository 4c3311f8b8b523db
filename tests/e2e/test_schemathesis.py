"""Requests made from the OpenAPI document, right and wrong ones, against a real shard with the tiny model.

No answer is a server's error or comes late, all are what the document says, and the shard is unharmed after each case.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode

from tests.e2e.servers import LocalRouter, Process, local_router, shard
from tests.fakes.tiny_model import write_tiny_llama
from tgi.router.api.openapi import EVENTS
from tgi.router.app import Row, table

ANSWER_S = 60.0  # an answer of the tiny model takes a second at most; whatever comes later hangs
CANARY = {"inputs": "the quick brown", "parameters": {"max_new_tokens": 8, "details": True}}
CHOSEN = {"AIP_PREDICT_ROUTE": "/v1/predict", "AIP_HEALTH_ROUTE": "/alive"}
ROWS = [row for row in table(True, *CHOSEN.values()) if row.operation is not None]
QUIET = list(HealthCheck)
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.response_schema_conformance,  # last: not for streams, of which it wants to see whole events described
]
# As in TGI it reads `inputs` alone: parameters that no generation could have are nothing to it.
LENIENT = "/tokenize"


@dataclass(frozen=True, slots=True)
class Served:
    router: LocalRouter
    shard: Process
    schema: Any
    canary: Any

    @property
    def url(self) -> str:
        return self.router.url

    def assert_unharmed(self) -> None:
        assert self.shard.popen.poll() is None, self.shard.log
        assert requests.get(f"{self.url}/health", timeout=ANSWER_S).status_code == 200
        assert ask_canary(self.url) == self.canary


def ask_canary(url: str) -> Any:
    answer = requests.post(f"{url}/generate", json=CANARY, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model: Path = write_tiny_llama(tmp_path_factory.mktemp("model"), seed=5)
    with (
        shard(model, "--dtype", "float32") as (process, uds_path),
        local_router(
            model, uds_path, CHOSEN, max_total_tokens=96, max_best_of=3, kserve=True, payload_limit=100_000
        ) as router,
    ):

        def look() -> tuple[Any, Any]:
            return ask_canary(router.url), schemathesis.openapi.from_url(f"{router.url}/api-doc/openapi.json")

        canary, schema = router.run(asyncio.to_thread(look))
        yield Served(router, process, schema, canary)


def try_cases(served: Served, row: Row, max_examples: int, derandomize: bool) -> None:
    """In a thread of its own, while the router's loop runs."""
    operation = served.schema[row.path.replace(":path}", "}")][row.method]
    modes = [GenerationMode.POSITIVE]
    if row.operation is not None and row.operation.bodies:
        modes.append(GenerationMode.NEGATIVE)
    statuses: set[int] = set()
    whole = [one for one in CHECKS if row.path != LENIENT or one is not checks.negative_data_rejection]
    raw = served.schema.raw_schema
    content = raw["paths"][row.path.replace(":path}", "}")][row.method.lower()]["responses"]["200"].get("content", {})
    event_schema = {**content.get(EVENTS, {}).get("schema", {}), "components": raw["components"]}

    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=QUIET,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=served.url, timeout=ANSWER_S)
        statuses.add(response.status_code)
        # What is refused for its length is not in the library's list of refusals.
        chosen = [one for one in whole if response.status_code != 413 or one is not checks.negative_data_rejection]
        if EVENTS in response.headers.get("content-type", [""])[0]:
            case.validate_response(response, checks=chosen[:-1])
            assert_events(response.text, event_schema)
        else:
            case.validate_response(response, checks=chosen)
        served.assert_unharmed()

    check()
    assert statuses <= {200, 400, 404, 413, 415, 422}


def try_and_look(served: Served, row: Row, max_examples: int, derandomize: bool) -> None:
    served.router.run(asyncio.to_thread(try_cases, served, row, max_examples, derandomize), timeout_s=3600)
    served.router.run(served.router.idle())


def assert_events(body: str, schema: Any) -> None:
    """What the document says is the data of each event."""
    assert body.endswith("\n\n")
    events = [block.partition("data: ")[2] for block in body[:-2].split("\n\n") if block != ":"]  # some have names
    if events[-1] == "[DONE]":
        events.pop()
    assert events
    validator = jsonschema.Draft202012Validator(schema)
    for event in events:
        validator.validate(json.loads(event))


def id_of(row: Row) -> str:
    assert row.operation is not None
    return row.operation.id


@pytest.mark.slow
@pytest.mark.row("B: /docs, /api-doc/openapi.json")
@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_cases_of_every_operation(served: Served, row: Row) -> None:
    try_and_look(served, row, max_examples=15, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_many_cases_of_every_operation(served: Served, row: Row) -> None:
    try_and_look(served, row, max_examples=200, derandomize=False)
