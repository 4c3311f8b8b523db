"""What each program imports before it can serve: nothing that costs seconds, nothing that another program owns.

The modules of transformers' architectures cost seconds each, torch._dynamo a second, and torch in the router would
double the memory of the smallest process. Checked in fresh interpreters, since this one may have imported anything.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("transformers.models.", "transformers.modeling_utils", "torch._dynamo", "torch._inductor")
NOT_IN_ROUTER = ("torch", "transformers", "triton", "numba", "opentelemetry")


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def loaded(modules: set[str], names: tuple[str, ...]) -> list[str]:
    return sorted(m for m in modules if any(m == n.rstrip(".") or m.startswith(n.rstrip(".") + ".") for n in names))


@pytest.mark.parametrize("module", ["tgi.launcher.cli", "tgi.router.cli", "tgi.router.main", "tgi.router.app"])
def test_launcher_and_router_know_no_tensors(module: str) -> None:
    modules = modules_after(f"import {module}")
    assert loaded(modules, NOT_IN_ROUTER) == []


def test_the_router_imports_the_engine_of_grammars_with_the_first_of_them() -> None:
    assert "llguidance" not in modules_after("import tgi.router.main")


def test_launcher_knows_no_web_framework_and_no_grpc() -> None:
    modules = modules_after("import tgi.launcher.cli")
    assert loaded(modules, ("starlette", "uvicorn", "grpc")) == []


@pytest.mark.parametrize("module", ["tgi.server.cli", "tgi.server.serve", "tgi.server.models.registry"])
def test_shard_imports_no_modelling_code_and_no_compiler(module: str) -> None:
    modules = modules_after(f"import {module}")
    assert [m for m in modules if m.startswith((*HEAVY, "opentelemetry"))] == []


def test_the_check_sees_what_it_looks_for() -> None:
    modules = modules_after("import tgi.errors, colorsys, email.message")
    assert {"colorsys", "email.message"} <= set(loaded(modules, ("colorsys", "email")))
    assert loaded({"torch._dynamo.config", "torchvision"}, ("torch",)) == ["torch._dynamo.config"]
