"""`--env`: what this server runs on, for bug reports. Asks versions from package metadata, imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

from tgi import __version__, env
from tgi.launcher.devices import Runner, run_command

PACKAGES = ("torch", "numpy", "numba", "transformers", "tokenizers", "grpcio", "flashinfer-python", "flash-attn")


def describe_runtime(environment: Mapping[str, str], run: Runner = run_command) -> str:
    """Several lines, the first one saying what they are."""
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    lines = [
        "Runtime environment:",
        f"Target: {platform.machine()}-{platform.system().lower()} ({platform.platform()})",
        f"tgi version: {__version__}",
        f"Python version: {platform.python_version()}",
        f"Packages: {', '.join(versions)}",
        f"Commit sha: {env.get('GIT_SHA', environment) or 'N/A'}",
        f"Docker label: {env.get('DOCKER_LABEL', environment) or 'N/A'}",
    ]
    for tool in ("nvidia-smi", "xpu-smi", "hl-smi"):
        output = run([tool])
        lines.append(f"{tool}:" + (" N/A" if output is None else "\n" + output.rstrip()))
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
