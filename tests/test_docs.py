"""README and docs are true: links lead somewhere, words and files exist, commands and programs run as they stand."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import Server

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ADDRESS = "localhost:3000"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def curl_commands() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", ROOT / "docs/quicktour.md"):
        for block in fences(page, "bash"):
            for line in block.splitlines():
                if line.startswith("curl "):
                    yield page.name, line


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_words_of_make_exist(page: Path) -> None:
    words = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= words


def test_source_files_that_pages_name_exist() -> None:
    for name in ("architecture.md", "request-path.md", "how-to/add-a-model.md", "how-to/add-a-route.md"):
        text = (ROOT / "docs" / name).read_text()
        named = set(re.findall(r"`((?:src/tgi/|tests/|[a-z_]+/)[a-z_/]+\.py)`", text))
        found = [path for path in named if (ROOT / path).exists() or (ROOT / "src/tgi" / path).exists()]
        assert sorted(found) == sorted(named), f"{name} names files that are not there"


def test_readme_shows_the_two_commands_and_a_request() -> None:
    section = (ROOT / "README.md").read_text().split("## Two commands")[1].split("\n## ")[0]
    commands = [line for _, body in FENCE.findall(section) for line in body.splitlines()]
    assert [command.split()[0:2] for command in commands] == [["make", "serve"], ["curl", "-s"], ["make", "test"]]


def test_ci_runs_the_command_of_readme() -> None:
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("exec make test")


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_python_in_pages_is_python(page: Path) -> None:
    for block in fences(page, "python"):
        ast.parse(block)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(("page", "command"), list(curl_commands()), ids=lambda value: value[:60])
def test_curl_commands_are_answered(bundled_server: Server, page: str, command: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    assert ADDRESS in command
    command = command.replace(f"http://{ADDRESS}", bundled_server.url)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert '"error"' not in result.stdout, f"{page}: {result.stdout}"
    if "%{http_code}" in command:
        assert result.stdout.strip() == "422"
    elif "/health" in command:
        assert result.stdout == ""
    elif "/metrics" in command:
        assert "tgi_request_count" in result.stdout
    elif " -sN " in command or " -N " in command:
        events = [line for line in result.stdout.splitlines() if line.startswith("data: ")]
        assert len(events) > 3
        assert (events[-1] == "data: [DONE]") == ("/v1/" in command)
    else:
        json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.row("F: Hub client")
@pytest.mark.row("F: openai client")
@pytest.mark.parametrize("library", ["openai", "huggingface_hub"])
def test_client_programs_of_readme_print_an_answer(bundled_server: Server, library: str) -> None:
    (program,) = [block for block in fences(ROOT / "README.md", "python") if f"from {library}" in block]
    assert ADDRESS in program
    program = program.replace(f"http://{ADDRESS}", bundled_server.url)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip()) > 10


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.timeout(5_400)
def test_a_newcomer_gets_what_readme_promises() -> None:
    """Clones, installs, serves and tests with an empty HOME. Uses port 3000, as README does."""
    subprocess.run([ROOT / "tests/fresh_clone.sh"], check=True)
