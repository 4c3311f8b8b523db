"""Metrics as Prometheus text, with the names as they are: prometheus-client would append `_total` and `_created`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; charset=utf-8"


def render(registry: CollectorRegistry) -> bytes:
    """All series of `registry` in text format 0.0.4. About 10 ms for the router's: call it off the event loop."""
    lines: list[str] = []
    for metric in registry.collect():
        lines.append(f"# HELP {metric.name} {metric.documentation}\n# TYPE {metric.name} {metric.type}\n")
        for sample in metric.samples:
            if sample.name == f"{metric.name}_created":
                continue
            name = metric.name if metric.type == "counter" else sample.name
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels.items())
            lines.append(f"{name}{{{labels}}} " if labels else f"{name} ")
            lines.append(f"{floatToGoString(sample.value)}\n")
    return "".join(lines).encode()


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
