"""The flag table through the parser: TGI's documented command lines, mirrors, errors, policies, help."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from tgi.errors import StartupError
from tgi.launcher.args import BY_FIELD, FLAGS, Flag, LauncherArgs, Policy, describe
from tgi.launcher.parse import build_command, convert, help_text, parse, refuse_unsupported, remarks

# TGI's documentation and examples: (arguments after the image or the program, environment, fields it sets).
DOCUMENTED: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("--model-id HuggingFaceH4/zephyr-7b-beta", {}, {"model_id": "HuggingFaceH4/zephyr-7b-beta"}),
    ("--model-id bigscience/bloom-560m --num-shard 2", {}, {"num_shard": 2}),
    ("--model-id mistralai/Mistral-7B-Instruct-v0.2 --port 8080", {}, {"port": 8080}),
    ("--model-id x -p 8080", {}, {"port": 8080}),
    ("--model-id x -p8080", {}, {"port": 8080}),
    ("--model-id=x --port=8080", {}, {"model_id": "x", "port": 8080}),
    ("--model-id /data/my-model", {}, {"model_id": "/data/my-model"}),
    ("", {"MODEL_ID": "teknium/OpenHermes-2.5-Mistral-7B"}, {"model_id": "teknium/OpenHermes-2.5-Mistral-7B"}),
    ("", {"MODEL_ID": "x", "NUM_SHARD": "4", "PORT": "80"}, {"model_id": "x", "num_shard": 4, "port": 80}),
    ("--model-id x --sharded true", {}, {"sharded": True}),
    ("--model-id x --sharded false", {}, {"sharded": False}),
    ("--model-id x", {"SHARDED": "true"}, {"sharded": True}),
    ("--model-id x --sharded true --num-shard 8", {}, {"sharded": True, "num_shard": 8}),
    ("--model-id tiiuae/falcon-7b-instruct --quantize bitsandbytes", {}, {"quantize": "bitsandbytes"}),
    ("--model-id x --quantize bitsandbytes-nf4", {}, {"quantize": "bitsandbytes-nf4"}),
    ("--model-id TheBloke/Llama-2-7B-GPTQ --quantize gptq", {}, {"quantize": "gptq"}),
    ("--model-id x --quantize compressed-tensors", {}, {"quantize": "compressed-tensors"}),
    ("--model-id x", {"QUANTIZE": "awq"}, {"quantize": "awq"}),
    ("--model-id x --speculate 2", {}, {"speculate": 2}),
    ("--model-id x --dtype bfloat16", {}, {"dtype": "bfloat16"}),
    ("--model-id x --kv-cache-dtype fp8_e5m2", {}, {"kv_cache_dtype": "fp8_e5m2"}),
    ("--model-id x --revision refs/pr/1 --trust-remote-code", {}, {"revision": "refs/pr/1", "trust_remote_code": True}),
    ("--model-id x", {"TRUST_REMOTE_CODE": "true"}, {"trust_remote_code": True}),
    ("--model-id x --rope-scaling dynamic --rope-factor 2.0", {}, {"rope_scaling": "dynamic", "rope_factor": 2.0}),
    (
        "--model-id x --max-input-length 4000 --max-total-tokens 4096 --max-batch-prefill-tokens 4096",
        {},
        {"max_input_length": 4000, "max_total_tokens": 4096, "max_batch_prefill_tokens": 4096},
    ),
    (
        "--model-id x",
        {"MAX_INPUT_TOKENS": "2047", "MAX_TOTAL_TOKENS": "2048"},
        {"max_input_tokens": 2047, "max_total_tokens": 2048},
    ),
    ("--model-id x --max-batch-total-tokens 16000 --waiting-served-ratio 1.2", {}, {"waiting_served_ratio": 1.2}),
    ("--model-id x --max-concurrent-requests 512 --max-best-of 4", {}, {"max_best_of": 4}),
    ("--model-id x --cuda-graphs 0", {}, {"cuda_graphs": (0,)}),
    ("--model-id x --cuda-graphs 1,2,4", {}, {"cuda_graphs": (1, 2, 4)}),
    ("--model-id x", {"CUDA_GRAPHS": "1,2,4,8"}, {"cuda_graphs": (1, 2, 4, 8)}),
    ("--model-id x --cuda-memory-fraction 0.5", {}, {"cuda_memory_fraction": 0.5}),
    (
        "--model-id x --cors-allow-origin https://a.b --cors-allow-origin http://c",
        {},
        {"cors_allow_origin": ("https://a.b", "http://c")},
    ),
    ("--model-id x", {"CORS_ALLOW_ORIGIN": "https://a.b"}, {"cors_allow_origin": ("https://a.b",)}),
    ("--model-id x --api-key secret", {}, {"api_key": "secret"}),
    ("--model-id x", {"API_KEY": "secret"}, {"api_key": "secret"}),
    ("--model-id x --json-output", {"LOG_LEVEL": "debug"}, {"json_output": True}),
    ("--model-id x", {"JSON_OUTPUT": "false"}, {"json_output": False}),
    ("--model-id x --otlp-endpoint http://localhost:4317", {}, {"otlp_endpoint": "http://localhost:4317"}),
    ("--model-id x --lora-adapters=predibase/dbpedia,other/one", {}, {"lora_adapters": "predibase/dbpedia,other/one"}),
    ("--model-id x", {"LORA_ADAPTERS": "name=/path"}, {"lora_adapters": "name=/path"}),
    ("--model-id x --usage-stats off", {}, {"usage_stats": "off"}),
    ("--model-id x --disable-grammar-support --env", {}, {"disable_grammar_support": True, "show_env": True}),
    ("--model-id x -e -g 30", {}, {"show_env": True, "graceful_termination_timeout": 30}),
    ("--model-id x --payload-limit 8000000 --max-client-batch-size 32", {}, {"payload_limit": 8000000}),
    ("--model-id x --prometheus-port 9100", {}, {"prometheus_port": 9100, "port": 3000}),
    ("--model-id x --enable-prefill-logprobs", {}, {"enable_prefill_logprobs": True}),
    ("--model-id x --tokenizer-config-path /data/t.json", {}, {"tokenizer_config_path": "/data/t.json"}),
    ("--model-id x --chat-template /data/t.jinja", {}, {"chat_template": "/data/t.jinja"}),
    ("--model-id x", {"CHAT_TEMPLATE": "{{ messages }}"}, {"chat_template": "{{ messages }}"}),
    ("--model-id x --huggingface-hub-cache /data", {}, {"huggingface_hub_cache": "/data"}),
]

TGI_DEFAULTS: dict[str, Any] = {
    "validation_workers": 2,
    "max_concurrent_requests": 128,
    "max_best_of": 2,
    "max_stop_sequences": 4,
    "max_top_n_tokens": 5,
    "max_input_tokens": None,
    "max_total_tokens": None,
    "waiting_served_ratio": 0.3,
    "max_batch_prefill_tokens": None,
    "max_batch_total_tokens": None,
    "max_waiting_tokens": 20,
    "queue_timeout": None,
    "max_batch_size": None,
    "cuda_graphs": (1, 2, 4, 8, 16, 32),
    "hostname": "0.0.0.0",
    "port": 3000,
    "prometheus_port": 9000,
    "shard_uds_path": "/tmp/text-generation-server",
    "master_addr": "localhost",
    "master_port": 29500,
    "cuda_memory_fraction": 1.0,
    "otlp_service_name": "text-generation-inference.router",
    "max_client_batch_size": 4,
    "usage_stats": "on",
    "payload_limit": 2_000_000,
    "graceful_termination_timeout": 90,
}


@pytest.mark.row("C: All flags and env mirrors")
@pytest.mark.row("G: 10 TGI's start command works")
@pytest.mark.parametrize(("line", "environment", "expected"), DOCUMENTED)
def test_documented_command_lines(line: str, environment: dict[str, str], expected: dict[str, Any]) -> None:
    parsed = parse(line.split(), environment)
    assert {name: getattr(parsed.args, name) for name in expected} == expected
    changed = {
        field.name for field in dataclasses.fields(LauncherArgs) if getattr(parsed.args, field.name) != field.default
    }
    assert changed <= parsed.given, "something changed that was not given"


def test_defaults_are_those_of_tgi() -> None:
    args = parse([], {}).args
    assert {name: getattr(args, name) for name in TGI_DEFAULTS} == TGI_DEFAULTS
    others = {flag.field for flag in FLAGS} - TGI_DEFAULTS.keys()
    ours = {"tool_call_parser": "auto", "reasoning_parser": "auto", "hung_after": 30.0, "health_timeout": 10.0}
    assert {name: value for name in others if (value := getattr(args, name))} == ours


def _sample(flag: Flag) -> tuple[str, Any]:
    """A text for the environment that differs from the default, and its value."""
    if flag.choices:
        choice = next(choice for choice in flag.choices if choice != flag.default)
        return choice, choice
    samples = {"text": ("some-text", "some-text"), "integer": ("17", 17), "number": ("0.25", 0.25)}
    text, value = samples.get(flag.kind.value, ("true", True))
    return text, (value,) if flag.is_list else value


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_every_flag_by_both_ways_and_the_command_line_wins(flag: Flag) -> None:
    text, value = _sample(flag)
    by_line = parse([flag.name] if flag.is_switch else [flag.name, text], {})
    assert getattr(by_line.args, flag.field) == value
    assert by_line.given == {flag.field}
    if flag.variable is None:
        assert flag.field == "show_env"
        return
    assert flag.variable == flag.name.removeprefix("--").replace("-", "_").upper()
    by_variable = parse([], {flag.variable: text})
    assert getattr(by_variable.args, flag.field) == value
    assert by_variable.given == {flag.field}
    if flag.is_switch:
        assert getattr(parse([flag.name], {flag.variable: "false"}).args, flag.field) is True
    else:
        assert (
            getattr(parse([flag.name, text], {flag.variable: "nonsense" if flag.choices else "19"}).args, flag.field)
            == value
        )
    assert parse([], {flag.variable: "  "}).given == frozenset(), "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["--port", "many"], {}, "Invalid value for '-p' / '--port': 'many' is not a whole number"),
        (["--port", "0"], {}, "0 is not in the range 1 to 65535"),
        ([], {"PORT": "70000"}, "Invalid value in the environment variable PORT: 70000 is not in the range 1 to 65535"),
        ([], {"SHARDED": "perhaps"}, "environment variable SHARDED: 'perhaps' is neither true nor false"),
        (["--dtype", "float64"], {}, "'float64' is not one of float16, bfloat16, float32"),
        (["--max-best-of", "-1"], {}, "-1 is not in the range 0 and up"),
        (["--rope-factor", "nan"], {}, "nan is not in the range"),
        (["--cuda-graphs", "1,x"], {}, "'x' is not a whole number"),
        (["--json-output=true"], {}, "does not take a value"),
        (["--model-id"], {}, "requires an argument"),
        (["--no-such-flag"], {}, "No such option"),
        (["serve"], {}, "unexpected extra argument"),
        (["--max-batch-siz", "3"], {}, "No such option"),
    ],
)
def test_bad_command_lines_are_refused_with_exit_code_2(
    argv: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(click.UsageError) as raised:
        parse(argv, environment)
    assert message in raised.value.format_message()
    assert raised.value.exit_code == 2


REFUSED = {
    "--quantize gptq": "--quantize",
    "--speculate 3": "--speculate",
    "--kv-cache-dtype fp8_e5m2": "--kv-cache-dtype",
    "--ngrok": "--ngrok",
    "--ngrok-authtoken t": "--ngrok-authtoken",
    "--ngrok-edge e": "--ngrok-edge",
    "--lora-adapters a/b": "--lora-adapters",
}


@pytest.mark.parametrize(("line", "name"), REFUSED.items())
def test_flags_that_would_change_answers_or_memory_are_refused_by_name(line: str, name: str) -> None:
    with pytest.raises(StartupError, match=f"^Invalid argument: {name} is not supported: ") as raised:
        refuse_unsupported(parse(["--model-id", "x", *line.split()], {}))
    assert "\n" not in str(raised.value)


def test_the_refused_flags_are_these() -> None:
    assert {flag.name for flag in FLAGS if flag.policy is Policy.REFUSED} == set(REFUSED.values())


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        ([], {}),
        (["--speculate", "0"], {}),
        ([], {"NGROK": "false"}),
        ([], {"QUANTIZE": ""}),
        (["--dtype", "float32"], {}),
    ],
)
def test_what_asks_for_nothing_is_not_refused(argv: list[str], environment: dict[str, str]) -> None:
    refuse_unsupported(parse(argv, environment))


@pytest.mark.row("C: Usage statistics off")
@pytest.mark.parametrize(
    ("line", "on_gpu", "expected"),
    [
        ("--usage-stats on", True, ["--usage-stats has no effect"]),
        ("--disable-custom-kernels", True, ["--disable-custom-kernels has no effect"]),
        ("--cuda-graphs 1,2", False, ["--cuda-graphs has no effect"]),
        ("--cuda-memory-fraction 0.5", False, ["--cuda-memory-fraction has no effect"]),
        ("--cuda-memory-fraction 0.5", True, []),
        ("--prometheus-port 9100", False, ["--prometheus-port has no effect: metrics are served at /metrics"]),
        ("--max-batch-size 8", False, ["--max-batch-size: it limits the running requests"]),
        (
            "--waiting-served-ratio 1.2 --max-waiting-tokens 5",
            False,
            ["--waiting-served-ratio", "--max-waiting-tokens"],
        ),
        ("--otlp-endpoint http://x", False, []),
        ("--trust-remote-code", False, ["--trust-remote-code: code of a model's repository is never run"]),
        ("--model-id x --port 80 --json-output --dtype float32", False, []),
    ],
)
def test_one_line_for_each_flag_without_its_usual_effect(line: str, on_gpu: bool, expected: list[str]) -> None:
    lines = remarks(parse(line.split(), {}), has_gpu=on_gpu)
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_a_switch_set_to_false_is_no_remark() -> None:
    assert remarks(parse([], {"TRUST_REMOTE_CODE": "false"}), has_gpu=False) == []


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"], ["-V"]])
def test_help_and_version_leave_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as left:
        parse(argv, {})
    assert left.value.exit_code == 0
    output = capsys.readouterr().out
    if argv[0] in ("--version", "-V"):
        assert output.startswith("text-generation-launcher ")
    else:
        assert all(flag.name in output for flag in FLAGS)


def test_short_names_belong_to_one_flag_each() -> None:
    shorts = [flag.short for flag in FLAGS if flag.short]
    assert sorted(shorts) == ["-e", "-g", "-p"]
    assert BY_FIELD["port"].short == "-p", "not --prometheus-port, which declares it too in TGI"
    names = [name for parameter in build_command().params for name in parameter.opts]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_every_row_is_whole(flag: Flag) -> None:
    assert flag.help.endswith("."), "help is a sentence"
    assert bool(flag.note) == (flag.policy is not Policy.WORKS)
    assert not flag.choices or flag.default is None or flag.default in flag.choices
    assert "\n" not in help_text(flag)
    if not flag.is_switch and not flag.is_list and flag.default is not None:
        assert convert(flag, str(flag.default)) == flag.default


def test_description_masks_secrets() -> None:
    line = describe(parse(["--api-key", "hidden-one", "--ngrok-authtoken", "hidden-two", "--model-id", 'a"b'], {}).args)
    assert line.startswith('Args { model_id: "a\\"b", revision: None, ')
    assert "hidden" not in line
    assert 'api_key: "***"' in line
    assert "\n" not in line
