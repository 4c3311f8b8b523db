"""The whole command: exit codes, one clear line for what cannot be, order of the checks, the key out of sight."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.launcher.fake_programs import CONFIG, launched, write_programs
from tgi.launcher.cli import run, take_key


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    return write_programs(tmp_path / "programs")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "FAKE_EVENTS": str(tmp_path / "events"),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def one_error_line(
    argv: list[str], environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """The only line on stderr of a start that must fail with exit code 1 before any child exists."""
    assert run(argv, environment, programs) == 1
    captured = capsys.readouterr()
    assert not Path(environment["FAKE_EVENTS"]).exists(), "a child was started"
    assert "Traceback" not in captured.out
    assert captured.err.startswith("Error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("Error: ").strip()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_busy_port(
    model: Path, environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        line = one_error_line(["--model-id", str(model), "-p", str(port)], environment, programs, capsys)
    assert line == f"Port {port} at 0.0.0.0 is in use. Stop the program that holds it, or choose another --port"


def test_vertex_ai_chooses_the_port_that_is_tried(
    model: Path, environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        environment["AIP_HTTP_PORT"] = str(other.getsockname()[1])
        line = one_error_line(["--model-id", str(model), "-p", free_port()], environment, programs, capsys)
    assert line.startswith(f"Port {environment['AIP_HTTP_PORT']} at 0.0.0.0 is in use.")
    environment["AIP_HTTP_PORT"] = "70000"
    line = one_error_line(["--model-id", str(model)], environment, programs, capsys)
    assert line == "AIP_HTTP_PORT must be a port, 1 to 65535. Given: 70000"


def test_missing_model(environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_error_line(["--model-id", "/no/such/model", "-p", free_port()], environment, programs, capsys)
    assert line == "The model path /no/such/model does not exist. Check --model-id"


def test_corrupt_gguf(
    tmp_path: Path, environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    line = one_error_line(["--model-id", str(file), "-p", free_port()], environment, programs, capsys)
    assert "is not a valid GGUF file" in line


def test_long_socket_path(
    model: Path, environment: dict[str, str], programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model-id", str(model), "-p", free_port(), "--shard-uds-path", "/tmp/" + "x" * 120]
    line = one_error_line(argv, environment, programs, capsys)
    assert line.endswith("has 127 bytes, the system allows 107. Give a shorter --shard-uds-path (or TMPDIR)")


@pytest.mark.parametrize(
    ("argv", "variables", "line"),
    [
        (["--quantize", "gptq"], {}, "Invalid argument: --quantize is not supported: "),
        ([], {"SPECULATE": "2"}, "Invalid argument: --speculate is not supported: "),
        (["--api-key", ""], {}, "Invalid argument: `api_key` is empty"),
        (["--validation-workers", "0"], {}, "Invalid argument: `validation_workers` must be > 0"),
        (["--num-shard", "0"], {}, "Invalid argument: `num_shard` cannot be < 1"),
        (["--sharded", "true"], {}, "not enough cuda devices: "),
        ([], {"ATTENTION": "flashinfer"}, "ATTENTION=flashinfer needs a GPU"),
        ([], {"PREFIX_CACHING": "maybe"}, "Invalid value 'maybe' in the environment variable PREFIX_CACHING"),
        ([], {"WEIGHTS_CACHE_OVERRIDE": "/nowhere"}, "The directory of WEIGHTS_CACHE_OVERRIDE=/nowhere does not exist"),
    ],
)
def test_what_cannot_be_is_one_line(
    model: Path,
    environment: dict[str, str],
    programs: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    variables: dict[str, str],
    line: str,
) -> None:
    full = ["--model-id", str(model), "-p", free_port(), *argv]
    assert one_error_line(full, environment | variables, programs, capsys).startswith(line)


def test_programs_that_are_not_installed(
    tmp_path: Path, model: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    argv = ["--model-id", str(model), "-p", free_port()]
    line = one_error_line(argv, environment | {"PATH": "/nowhere"}, missing, capsys)
    assert line.startswith("The program text-generation-server is not installed")


@pytest.mark.parametrize("argv", [["--port", "x"], ["--nonsense"], ["--model-id"]])
def test_bad_command_line(argv: list[str], environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv, environment) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Error: " in captured.err


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_help_and_version(argv: list[str], environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv, environment) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "text-generation-launcher" in captured.out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--port", "80"], (["--port", "80"], None)),
        (["--api-key", "k", "--port", "80"], (["--port", "80"], "k")),
        (["--port", "80", "--api-key=k=1"], (["--port", "80"], "k=1")),
        (["--api-key", "a", "--api-key=b"], ([], "b")),
        (["--api-key"], (["--api-key"], None)),
        (["--api-key", ""], (["--api-key", ""], None)),
        (["--api-key="], (["--api-key="], None)),
        (["--api-keys", "k"], (["--api-keys", "k"], None)),
    ],
)
def test_take_key(argv: list[str], expected: tuple[list[str], str | None]) -> None:
    assert take_key(argv) == expected


def test_first_lines_of_the_log(tmp_path: Path, model: Path) -> None:
    """All arguments, then one line for each flag without its usual effect; `--env` shows the machine first."""
    argv = ["--model-id", str(model), "-p", free_port(), "--env", "--usage-stats", "off", "--hostname", "pod-1"]
    with launched(tmp_path, argv, FAKE_SHARD="clear", LOG_COLORIZE="0") as launcher:
        assert launcher.exit_code() == 1
        lines = launcher.output.splitlines()
    assert lines[0].endswith("Runtime environment:")
    assert any(line.startswith("Python version: 3.") for line in lines)
    start = next(i for i, line in enumerate(lines) if "Args { model_id: " in line)
    assert lines[start + 1].endswith("--usage-stats has no effect: usage statistics are never sent")
    rest = "\n".join(lines[start:])
    assert "Default `max_batch_prefill_tokens` to 512" in rest
    assert "Invalid hostname, defaulting to 0.0.0.0 ('pod-1' is no IP address)" in rest
    assert "Using attention flashdecoding-ipex - Prefix caching on" in rest
    assert "\x1b[" not in launcher.output


@pytest.mark.row("C: --env, --json-output, LOG_LEVEL")
@pytest.mark.parametrize(
    ("variables", "has_info", "has_colour"),
    [
        ({}, True, False),
        ({"LOG_LEVEL": "warn"}, False, False),
        ({"LOG_LEVEL": "text_generation_launcher=error"}, False, False),
        ({"LOG_COLORIZE": "1"}, True, True),
    ],
)
def test_level_and_colour(
    tmp_path: Path, model: Path, variables: dict[str, str], has_info: bool, has_colour: bool
) -> None:
    with launched(tmp_path, ["--model-id", str(model), "-p", free_port()], FAKE_SHARD="clear", **variables) as launcher:
        assert launcher.exit_code() == 1
        assert ("Args {" in launcher.output) is has_info
        assert ("\x1b[" in launcher.output) is has_colour


def test_bundled_model_without_a_model_id(tmp_path: Path) -> None:
    with launched(tmp_path, ["-p", free_port()], FAKE_SHARD="clear") as launcher:
        assert launcher.exit_code() == 1
        assert launcher.event("shard start")["argv"][:2] == ["serve", "SmolLM2-135M-Instruct"]
        assert "No --model-id given: serving SmolLM2-135M-Instruct" in launcher.output
        assert "download" not in launcher.names()


def test_hidden_key_keeps_the_other_arguments(tmp_path: Path, model: Path) -> None:
    port = free_port()
    argv = ["--model-id", str(model), "--api-key", "k-0123456789", "-p", port]
    with launched(tmp_path, argv, FAKE_ROUTER="clear") as launcher:
        assert launcher.exit_code() == 1
        router = launcher.event("router start")
    assert router["argv"][router["argv"].index("--port") + 1] == port
    assert router["environ"]["API_KEY"] == "k-0123456789"
