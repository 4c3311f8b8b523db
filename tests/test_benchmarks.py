"""The benchmarks run, and what they write is what the page reads. No figure is judged here."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import load, page, record
from benchmarks.load import Answer, Load, Outcome
from benchmarks.process import DidNotStart, running
from benchmarks.record import Figure

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "allocator",
    "wire",
    "plan_transport",
    "simulator",
    "router_stream",
    "request_path",
    "serve_cpu",
    "grammar_cpu",
    "loading",
    "gpu_steps",
    "gpu_experts",
    "load",
]


def run_benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_is_measured(name: str) -> None:
    result = run_benchmark(name, "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: python -m benchmarks.{name}" in result.stdout
    assert len(result.stdout.splitlines()) > 8


def test_make_bench_names_benchmarks_that_exist() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "for name in allocator" in line]
    names = line.split("for name in ")[1].split(";")[0].split()
    assert set(names) == set(SCRIPTS) - {"load", "gpu_steps", "gpu_experts"}


def check_record(path: Path, name: str) -> list[Figure]:
    written = json.loads(path.read_text())
    assert set(written) == {"name", "title", "machine", "date", "commit", "command", "figures"}
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "gpu", "python"}
    assert written["command"].startswith(f"python -m benchmarks.{name}")
    assert "--json" not in written["command"]
    return [Figure(**figure) for figure in written["figures"]]


def test_allocator_benchmark_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "allocator.json"
    result = run_benchmark("allocator", "--rounds", "3", "--block-size", "16", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = check_record(path, "allocator")
    assert [figure.target for figure in figures] == ["<= 25", "<= 8", "<= 15", "<= 100"]
    assert all(figure.value > 0 for figure in figures)
    assert len(result.stdout.splitlines()) == 1 + len(figures)


@pytest.mark.slow
def test_wire_benchmark_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    result = run_benchmark("wire", "--steps", "100", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert all(figure.value > 0 for figure in check_record(path, "wire"))


@pytest.mark.slow
@pytest.mark.real_model
def test_router_benchmark_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    result = run_benchmark("router_stream", "--tokens", "20", "--rounds", "10", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert all(figure.value > 0 for figure in check_record(path, "router_stream"))


@pytest.mark.soak
@pytest.mark.real_model
def test_serve_benchmark_writes_its_record(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    result = run_benchmark("serve_cpu", "--clients", "1", "--rounds", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = check_record(path, "serve_cpu")
    assert not [figure for figure in figures if "failed" in figure.note]


def test_load_stays_on_this_machine() -> None:
    with pytest.raises(SystemExit, match="loopback addresses only"):
        asyncio.run(load.run("http://192.0.2.1:3000", Load(clients=1, requests=1)))


def test_prompts_share_a_beginning_and_differ_after_it() -> None:
    first, second = (load.prompt(Load(1, 2, prompt_words=5, shared_words=7), index).split() for index in range(2))
    assert first[:7] == second[:7]
    assert first[7:] != second[7:]
    assert len(first) == 12


def test_outcome_counts_what_was_read() -> None:
    answers = [Answer(0.0, [0.1, 0.2, 0.4], 9), Answer(1.0, [1.3, 1.4], 9), Answer(2.0, error="503")]
    outcome = Outcome(Load(clients=2, requests=3), 2.0, answers)
    assert outcome.tokens_per_s == 2.5
    assert outcome.first_token_ms(0) == pytest.approx(100)
    assert outcome.first_token_ms(100) == pytest.approx(300)
    assert outcome.gap_ms(100) == pytest.approx(200)
    assert "1 failed: 503" in outcome.figures("x")[0].note


def test_page_shows_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [Figure("a | b", 12.0, "ms", "<= 10"), Figure("c", 200.0, "tokens/s", ">= 100", "idle")]
    record.write_record(tmp_path / "x.json", figures, title="Title", command="python -m benchmarks.x")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    text = page.render()
    assert "## Title" in text
    assert "| a \\| b | 12 | ms | ≤ 10 | missed |  |" in text
    assert "| c | 200 | tokens/s | ≥ 100 | met | idle |" in text


def test_a_child_that_does_not_start_is_told_with_its_log() -> None:
    command = [sys.executable, "-c", "print('no disk'); raise SystemExit(3)"]
    with pytest.raises(DidNotStart, match=r"code 3:\nno disk"), running(command, "ready"):
        pass


def test_a_child_is_ended_with_what_it_left_behind() -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); print('ready', flush=True); time.sleep(300)"
    )
    with running([sys.executable, "-c", script], "ready") as child:
        assert child.process.poll() is None
        group = child.process.pid
        assert child.memory_bytes() > 0
    assert child.process.returncode is not None
    # A killed process takes a moment to die: what must not be there is one that lives on.
    deadline = time.monotonic() + 30
    while left := running_members(group):
        assert time.monotonic() < deadline, left


def running_members(group: int) -> list[str]:
    states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True).stdout.split()
    return [state for state in states if not state.startswith("Z")]
