from __future__ import annotations

import re

import pytest

from tgi import __version__
from tgi.env import Kind
from tgi.errors import StartupError
from tgi.router import cli
from tgi.router.cli import FLAGS, read_config

# What TGI's launcher passes to its router, and the defaults of the router alone.
TGIS = {
    "max-concurrent-requests": 128,
    "max-best-of": 2,
    "max-stop-sequences": 4,
    "max-top-n-tokens": 5,
    "max-input-tokens": None,
    "max-total-tokens": None,
    "waiting-served-ratio": 1.2,
    "max-batch-prefill-tokens": 4096,
    "max-batch-total-tokens": None,
    "max-waiting-tokens": 20,
    "queue-timeout": None,
    "host-cache-bytes": 0,
    "max-batch-size": None,
    "hostname": "0.0.0.0",
    "port": 3000,
    "prometheus-port": 9000,
    "master-shard-uds-path": "/tmp/text-generation-server-0",
    "tokenizer-name": "bigscience/bloom",
    "tokenizer-config-path": None,
    "chat-template": None,
    "tool-call-parser": "auto",
    "reasoning-parser": "auto",
    "revision": None,
    "trust-remote-code": False,
    "validation-workers": 2,
    "api-key": None,
    "json-output": False,
    "otlp-endpoint": None,
    "otlp-service-name": "text-generation-inference.router",
    "cors-allow-origin": (),
    "ngrok": False,
    "ngrok-authtoken": None,
    "ngrok-edge": None,
    "disable-grammar-support": False,
    "max-client-batch-size": 4,
    "usage-stats": "on",
    "payload-limit": 2_000_000,
    "kserve": False,  # a build feature in TGI
    "max-image-fetch-size": 1_073_741_824,
}


@pytest.mark.row("C: All flags and their environment mirrors")
def test_the_flags_are_tgis() -> None:
    assert {flag.name: flag.default for flag in FLAGS} == TGIS
    assert {flag.name: flag.short for flag in FLAGS if flag.short} == {"port": "p"}


def run(*argv: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The values that typer hands on for a command line."""
    taken: dict[str, object] = {}

    def take(given: dict[str, object]) -> int:
        taken.update(given)
        return 0

    monkeypatch.setattr(cli, "_run", take)
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    return taken


SAMPLES = {Kind.TEXT: ("some/thing", "some/thing"), Kind.INT: ("7", 7), Kind.FLOAT: ("0.5", 0.5)}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_flag_from_the_command_line(flag: cli.Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    if flag.kind is Kind.BOOL:
        assert run(f"--{flag.name}", monkeypatch=monkeypatch)[flag.field] is True
    elif flag.is_list:
        text = SAMPLES[flag.kind][0]
        assert run(f"--{flag.name}", text, f"--{flag.name}", "b", monkeypatch=monkeypatch)[flag.field] == [text, "b"]
    else:
        text, value = SAMPLES[flag.kind]
        assert run(f"--{flag.name}", text, monkeypatch=monkeypatch)[flag.field] == value
    assert run(monkeypatch=monkeypatch)[flag.field] in (None, [])


def test_the_short_form_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("-p", "8080", monkeypatch=monkeypatch)["port"] == 8080


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"text-generation-router {__version__}\n"


def test_the_command_line_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {"PORT": "80", "MAX_BEST_OF": "3", "JSON_OUTPUT": "true", "CORS_ALLOW_ORIGIN": "https://a,https://b"}
    config = read_config({"port": 8080}, environment)
    assert (config.port, config.max_best_of, config.json_output, config.max_stop_sequences) == (8080, 3, True, 4)
    assert config.cors_allow_origin == ("https://a", "https://b")
    assert read_config({"cors_allow_origin": ["https://c"]}, environment).cors_allow_origin == ("https://c",)
    assert read_config({}, {"PORT": ""}).port == 3000


def test_what_comes_by_environment_alone() -> None:
    config = read_config(
        {}, {"API_KEY": "k", "COMPUTE_TYPE": "1-x", "DOCKER_LABEL": "d", "GIT_SHA": "s", "PREFIX_CACHING": "0"}
    )
    assert (config.api_key, config.compute_type, config.docker_label, config.git_sha) == ("k", "1-x", "d", "s")
    assert config.prefix_caching is False
    assert read_config({}, {}).prefix_caching is None
    assert read_config({}, {}).compute_type == "gpu+optimized"


def test_host_memory_for_the_cache() -> None:
    assert read_config({}, {}).host_cache_bytes == 0
    assert read_config({}, {"HOST_CACHE_BYTES": "1073741824"}).host_cache_bytes == 1 << 30
    for wrong in (-1, 1 << 64):
        with pytest.raises(StartupError, match="`host_cache_bytes` must be >= 0 and < 2"):
            read_config({"host_cache_bytes": wrong}, {})


def test_the_queue_timeout() -> None:
    assert read_config({}, {}).queue_timeout is None
    assert read_config({}, {"QUEUE_TIMEOUT": "2.5"}).queue_timeout == 2.5
    assert read_config({"queue_timeout": 0.0}, {"QUEUE_TIMEOUT": "2.5"}).queue_timeout == 0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(StartupError, match="`queue_timeout` must be >= 0"):
            read_config({"queue_timeout": wrong}, {})


@pytest.mark.row("B: /invocations, /vertex, AIP routes")
def test_vertex_ai_says_by_environment_what_is_served_where() -> None:
    aip = {"AIP_HTTP_PORT": "8081", "AIP_PREDICT_ROUTE": "/v1/predict", "AIP_HEALTH_ROUTE": "/alive"}
    config = read_config({"port": 3001}, aip)
    assert (config.port, config.aip_predict_route, config.aip_health_route) == (8081, "/v1/predict", "/alive")
    config = read_config({"port": 3001}, {})
    assert (config.port, config.aip_predict_route, config.aip_health_route) == (3001, None, None)


@pytest.mark.parametrize("variable", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
@pytest.mark.parametrize("route", ["predict", "https://host/predict", "/{model}", "/predict?x=1"])
def test_a_route_of_vertex_ai_that_is_no_path(variable: str, route: str) -> None:
    with pytest.raises(StartupError, match=variable):
        read_config({}, {variable: route})


def test_kserve_is_off_unless_it_is_asked_for() -> None:
    assert read_config({}, {}).kserve is False
    assert read_config({}, {"KSERVE": "true"}).kserve is True


def test_the_key_is_never_shown() -> None:
    assert "Sesame" not in repr(read_config({"api_key": "Sesame"}, {}))


def test_a_hostname_that_is_no_address(caplog: pytest.LogCaptureFixture) -> None:
    assert read_config({}, {"HOSTNAME": "3f2a9c"}).hostname == "0.0.0.0"
    assert "Invalid hostname, defaulting to 0.0.0.0" in caplog.text
    assert read_config({}, {"HOSTNAME": "::1"}).hostname == "::1"


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        ({"validation_workers": 0}, {}, "Argument validation error: `validation_workers` must be > 0"),
        ({"max_batch_size": 0}, {}, "Argument validation error: `max_batch_size` must be > 0"),
        ({"max_concurrent_requests": 0}, {}, "Argument validation error: `max_concurrent_requests` must be > 0"),
        (
            {"max_input_tokens": 5, "max_total_tokens": 5},
            {},
            "Argument validation error: `max_input_tokens` must be < `max_total_tokens`",
        ),
        ({"port": 65536}, {}, "Argument validation error: `port` must be >= 0 and < 65536. Given: 65536"),
        (
            {"reasoning_parser": "thought"},
            {},
            "Argument validation error: `reasoning_parser` must be one of auto, none, think, seed, magistral, cohere, "
            "reasoning. Given: thought",
        ),
        (
            {},
            {"AIP_HTTP_PORT": "65536"},
            "Argument validation error: `port` must be >= 0 and < 65536. Given: 65536",
        ),
        ({}, {"PORT": "http"}, "Invalid value 'http' in the environment variable PORT: expected integer"),
        ({"ngrok": True}, {}, "--ngrok cannot be used: there is no ngrok tunnel; run ngrok beside the server"),
    ],
)
def test_what_cannot_be_is_one_line(given: dict[str, object], environment: dict[str, str], told: str) -> None:
    with pytest.raises(StartupError, match=f"^{re.escape(told)}$"):
        read_config(given, environment)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.no_effect], ids=lambda flag: flag.name)
def test_a_flag_without_effect_says_so_once_when_it_is_given(flag: cli.Flag, caplog: pytest.LogCaptureFixture) -> None:
    value = True if flag.kind is Kind.BOOL else SAMPLES[flag.kind][1]
    read_config({flag.field: value}, {})
    assert [record.getMessage() for record in caplog.records] == [f"--{flag.name} has no effect: {flag.no_effect}"]
    caplog.clear()
    read_config({}, {})
    assert caplog.records == []
