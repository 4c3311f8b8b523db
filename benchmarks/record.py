"""A benchmark's result: figures with unit and target, the machine, the commit; a table on stdout and a JSON file.

Knows nothing about what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `target` reads like "<= 25" or ">= 100", in the same unit, or is empty."""

    figure: str
    value: float
    unit: str
    target: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """met, missed, or nothing where there is no target."""
        if not self.target:
            return ""
        relation, limit = self.target.split()
        reached = self.value <= float(limit) if relation == "<=" else self.value >= float(limit)
        return "met" if reached else "missed"


def argument_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{name}.json (then: make docs)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to FILE")
    return parser


def report(arguments: argparse.Namespace, name: str, title: str, figures: Sequence[Figure]) -> None:
    """Print the table, and write the JSON where the user asked for it."""
    print(render_table(figures))
    paths = [arguments.json] if arguments.json else []
    if arguments.save:
        paths.append(RESULTS / f"{name}.json")
    command = " ".join(["python -m", f"benchmarks.{name}", *_without_output_options(sys.argv[1:])])
    for path in paths:
        write_record(path, figures, title=title, command=command)


def write_record(path: Path, figures: Sequence[Figure], title: str, command: str) -> None:
    record: dict[str, Any] = {
        "name": path.stem,
        "title": title,
        "machine": describe_machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": describe_commit(),
        "command": command,
        "figures": [asdict(figure) for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def render_table(figures: Sequence[Figure]) -> str:
    rows = [("figure", "value", "unit", "target", "note")]
    rows += [(f.figure, format_value(f.value), f.unit, f.target, f.note) for f in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def format_value(value: float) -> str:
    """Three digits that matter, no exponent: 1234567 -> 1,234,567; 12.345 -> 12.3; 0.01234 -> 0.0123."""
    if value == 0 or abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace("\n", ", ") or None,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def describe_commit() -> str:
    """The commit, with `-dirty` where a file that is not a result or a page differs from it.

    GIT_SHA names it where the files are a copy: of no repository, or of one that stands elsewhere.
    """
    if given := os.environ.get("GIT_SHA"):
        return given
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    return commit + ("-dirty" if changed else "")


def _without_output_options(arguments: list[str]) -> list[str]:
    kept = [word for word in arguments if word != "--save" and not word.startswith("--json=")]
    if "--json" in kept:
        index = kept.index("--json")
        del kept[index : index + 2]
    return kept


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _output("uname", "-m")
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    # The same name stands for machines with and without matrix units, which differ several times in speed.
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in flags]
    return (names[0] if names else _output("uname", "-m")) + (f" ({units[0]})" if units else "")


def _output(*command: str) -> str:
    """What the command prints, or nothing where it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
