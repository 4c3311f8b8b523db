"""The router's own parts put together with a tracer, before a scripted shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.servers import local_router
from tests.fakes.collector import Collector
from tests.fakes.shard import ScriptedShard
from tests.fakes.tokenizer import write_byte_tokenizer
from tgi.errors import StartupError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_byte_tokenizer(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@pytest.mark.row("F: OTLP traces, traceparent")
def test_the_shard_is_told_of_the_requests_span(model: Path, tmp_path: Path) -> None:
    uds_path = str(tmp_path / "s-0")
    options = {"otlp_service_name": "a-router"}
    with Collector() as collector, ScriptedShard(uds_path) as shard:
        shard.keep_commands = True
        with local_router(model, uds_path, otlp_endpoint=collector.endpoint, **options) as router:

            async def ask() -> None:
                async with Client(router.url) as client:
                    await client.generate("Hi", stream=True, max_new_tokens=5)

            router.run(ask())
        # A router that has stopped has sent all it had.
        (root,) = [span for span in collector.spans if span.name == "generate_stream"]
        (admit,) = [admit for command in shard.commands for admit in command.admit]
        parts = collector.children(root)
        steps = collector.children(parts["infer"])
    assert admit.traceparent.startswith(f"{root.ids}-")
    assert (root.service, root.parent_id, root.is_error) == ("a-router", "", False)
    assert set(parts) == {"validate", "queued", "infer"}
    moments = [root.start, parts["validate"].start, parts["validate"].end, parts["queued"].start, parts["queued"].end]
    moments += [steps["prefill"].start, steps["prefill"].end, steps["decode"].start, steps["decode"].end]
    assert [*moments, root.end] == sorted([*moments, root.end])


def test_an_endpoint_that_cannot_be_used_ends_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with (
        pytest.raises(StartupError, match=r"^No traces can be sent to --otlp-endpoint http://x"),
        local_router(model, str(tmp_path / "nobody"), otlp_endpoint="http://x"),
    ):
        pass
