"""What every test run shares: hypothesis profiles, who may be skipped, the summary of a lane, one running server.

A skip is allowed when its reason matches a line of tests/allowed_skips.txt; any other is reported as a failure, so that
no test falls silent unnoticed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.record import Figure, write_record
from benchmarks.server_process import Server, serving

ROOT = Path(__file__).resolve().parent.parent
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
NO_CUDA = "needs a CUDA device"
# Marks whose runs leave a record, and the words that run them.
RECORDED = {"gpu": "make test-gpu", "soak": "make soak", "failures and not soak": "make failures"}

# No test reaches the hub: its address is a port of this machine where nobody listens. (HF_HUB_OFFLINE would also stop
# huggingface_hub's client from talking to a server of ours.)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
# Workers that share the cores must not each start a thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("lane", derandomize=True, deadline=None, database=None, suppress_health_check=_QUIET)
settings.register_profile("soak", deadline=None, max_examples=2_000, print_blob=True, suppress_health_check=_QUIET)
settings.load_profile("lane")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write counts, machine and commit of this run to FILE (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.perf_counter()


@pytest.hookimpl(trylast=True)  # what -m and -k took out is gone by now
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not config.option.collectonly and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_CUDA))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_unknown_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_unknown_skip((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = Counter(_skip_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5d}  {reason}")
    figures = [figure for report in terminalreporter.stats.get("passed", ()) for figure in _measured(report)]
    if figures:
        terminalreporter.section("measured")
        for what, value, unit in figures:
            terminalreporter.write_line(f"{what}: {value:.3g} {unit}")
    minutes = (time.perf_counter() - config.stash[_STARTED]) / 60
    terminalreporter.section("lane")
    terminalreporter.write_line(f"{config.option.markexpr or 'all tests'}: {minutes:.1f} min")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--record")
    if path is None or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    counts = {word: len(reporter.stats.get(word, ())) for word in ("passed", "failed", "error", "skipped")}
    if not counts["passed"] + counts["failed"] + counts["error"]:
        return  # nothing ran: an earlier record says more
    figures = [Figure(word, count, "tests") for word, count in counts.items()]
    figures += [Figure(*measured) for report in reporter.stats.get("passed", ()) for measured in _measured(report)]
    figures.append(Figure("duration", round(time.perf_counter() - session.config.stash[_STARTED], 1), "s"))
    mark = session.config.option.markexpr
    write_record(Path(path), figures, title=f"Tests marked {mark}", command=RECORDED.get(mark, f"pytest -m {mark}"))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Show a number that a test has measured in the run's summary, and in its record (`--record`), if there is one."""

    def measure(what: str, value: float, unit: str) -> None:
        record_property(what, [round(value, 3), unit])

    return measure


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[Server]:
    """Launcher, router and shard with the bundled model, for tests that do not mind what else was asked before."""
    with serving() as server:
        yield server


_STARTED = pytest.StashKey[float]()
Measured = Callable[[str, float, str], None]
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _measured(report: pytest.TestReport) -> list[tuple[str, float, str]]:
    return [(what, *value) for what, value in report.user_properties if isinstance(value, list)]


def _has_cuda() -> bool:
    import torch  # takes seconds: asked only when a test that needs the device will run

    return torch.cuda.is_available()


def _refuse_unknown_skip(report: Report) -> Report:
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = _skip_reason(report)
        if not any(fnmatchcase(reason, pattern) for pattern in _allowed_reasons()):
            report.outcome = "failed"
            report.longrepr = f"skipped without leave: {reason!r} matches no line of tests/allowed_skips.txt"
    return report


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _allowed_reasons() -> list[str]:
    lines = (line.strip() for line in ALLOWED_SKIPS.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]
