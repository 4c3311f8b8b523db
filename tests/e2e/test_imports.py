"""What router and shard have imported after serving a request, asked from the running programs themselves.

The programs run under wrappers of the same name, which write down `sys.modules` at the end of an orderly stop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.process import free_port
from tests.e2e.client import Client
from tests.e2e.servers import launch_command, running
from tests.fakes.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

WRAPPER = """#!{python}
import atexit, json, sys
from {module} import main

def note():
    with open({target!r}, "w") as file:
        json.dump(sorted(sys.modules), file)

atexit.register(note)
sys.exit(main())
"""
LAUNCHER = "import sys; from pathlib import Path; from tgi.launcher.cli import main; sys.exit(main(Path({!r})))"
PROGRAMS = {"text-generation-router": "tgi.router.cli", "text-generation-server": "tgi.server.cli"}


@dataclass(frozen=True, slots=True)
class Seen:
    modules: dict[str, set[str]]  # by program
    maps: dict[str, str]  # files mapped into memory after serving


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("programs")
    for program, module in PROGRAMS.items():
        path = directory / program
        path.write_text(WRAPPER.format(python=sys.executable, module=module, target=f"{path}.json"))
        path.chmod(0o755)
    model = write_tiny_llama(directory / "model")
    port = free_port()
    arguments = launch_command(port, "--model-id", str(model))[1:]
    with running([sys.executable, "-c", LAUNCHER.format(str(directory)), *arguments]) as launcher:
        launcher.wait_for(r"\bConnected\b")
        asyncio.run(serve_something(f"http://127.0.0.1:{port}"))
        maps = {program: Path(f"/proc/{launcher.child(program)}/maps").read_text() for program in PROGRAMS}
        assert launcher.stop() == 0, launcher.log
    modules = {program: set(json.loads((directory / f"{program}.json").read_text())) for program in PROGRAMS}
    return Seen(modules, maps)


async def serve_something(url: str) -> None:
    async with Client(url) as client:
        await client.generate("hello", max_new_tokens=5, temperature=0.7, top_k=20, top_p=0.9, stop=["§"])
        await client.chat([{"role": "user", "content": "hello"}], stream=True, max_tokens=5, top_logprobs=2)
        await client.metric("tgi_queue_size")


def imported(modules: set[str], *packages: str) -> list[str]:
    return sorted(name for name in modules for package in packages if f"{name}.".startswith(f"{package}."))


def test_the_router_has_no_tensors(seen: Seen) -> None:
    modules = seen.modules["text-generation-router"]
    assert imported(modules, "tgi.router.scheduling.core"), "this is not the router"
    assert imported(modules, "torch", "transformers", "numba", "triton", "tgi.server", "opentelemetry") == []
    assert "libtorch" not in seen.maps["text-generation-router"]


def test_the_shard_has_no_modelling_code_and_no_compiler(seen: Seen) -> None:
    modules = seen.modules["text-generation-server"]
    assert imported(modules, "torch.nn"), "this is not the shard"
    assert imported(modules, "transformers.models", "transformers.modeling_utils", "torch._dynamo") == []
    assert imported(modules, "starlette", "uvicorn", "tgi.router", "opentelemetry") == []
    assert "libtorch" in seen.maps["text-generation-server"]
