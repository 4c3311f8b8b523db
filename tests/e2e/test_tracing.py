"""Traces of a whole server: launcher, router and shard with one collector, on real sockets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from benchmarks.process import free_port
from tests.e2e.servers import launch_command, launched, running
from tests.fakes.collector import Collector
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MAX_NEW_TOKENS = 8


async def generate(url: str) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}}
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()


@pytest.mark.row("F: OTLP traces, traceparent")
def test_a_request_through_all_programs(tmp_path: Path) -> None:
    """The stop comes at once: what is not sent by then is sent while stopping."""
    model = write_tiny_llama(tmp_path / "model")
    with Collector() as collector:
        options = ("--otlp-endpoint", collector.endpoint, "--otlp-service-name", "mine")
        with launched("--model-id", str(model), *options) as server:
            asyncio.run(generate(server.url))
            assert server.launcher.stop() == 0, server.log
            assert "Traces cannot" not in server.log
        root = collector.named("generate")
        assert (root.trace_id, root.parent_id, root.service) == (TRACE_ID, CALLER_ID, "mine")
        parts = collector.children(root)
    assert set(parts) == {"validate", "queued", "infer", "generate_tokens"}
    row = parts["generate_tokens"]
    assert (row.service, row.attributes["generated_tokens"]) == ("mine", MAX_NEW_TOKENS)
    steps = collector.children(parts["infer"])
    moments = [root.start, parts["validate"].start, parts["validate"].end, parts["queued"].start, parts["queued"].end]
    moments += [steps["prefill"].start, steps["prefill"].end, steps["decode"].start, steps["decode"].end]
    moments += [parts["infer"].end, root.end]
    assert moments == sorted(moments)
    assert parts["infer"].start == steps["prefill"].start


def test_a_server_whose_collector_is_absent_serves_and_stops(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    options = ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
    with launched("--model-id", str(model), *options) as server:
        asyncio.run(generate(server.url))
        assert server.launcher.stop() == 0, server.log


def test_missing_packages_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "hidden" / "opentelemetry").mkdir(parents=True)
    (tmp_path / "hidden" / "opentelemetry" / "__init__.py").write_text("")  # without what is needed
    model = write_tiny_llama(tmp_path / "model")
    command = launch_command(free_port(), "--model-id", str(model), "--otlp-endpoint", "http://127.0.0.1:4317")
    paths = [str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with running(command, {"PYTHONPATH": os.pathsep.join(paths)}) as launcher:
        assert launcher.wait() == 1
    assert "--otlp-endpoint needs the OpenTelemetry packages" in launcher.log
    assert "Traceback" not in launcher.log
