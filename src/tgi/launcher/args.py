"""The table of the launcher's flags: one field of `LauncherArgs` per flag, with all that parser, help, reference page
and tests need. Knows no parser and no machine.

A flag `--some-flag` is the field `some_flag` and the environment variable `SOME_FLAG`; the command line wins.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

from tgi.enums import ReasoningParser, ToolCallParser
from tgi.env import Kind
from tgi.observability.logging import MASK

PORTS = (1, 65535)


class Policy(StrEnum):
    """What happens when a flag is given."""

    WORKS = "works"
    NOTED = "works, with a remark in the log"
    NO_EFFECT = "accepted without effect, with a line in the log"
    GPU_ONLY = "works on a GPU; without one it is accepted without effect, with a line in the log"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table. `note` completes the line that the policy writes."""

    field: str
    kind: Kind
    is_list: bool
    is_switch: bool  # takes no value on the command line
    default: Any
    help: str
    short: str | None
    choices: tuple[str, ...]
    bounds: tuple[int | None, int | None]
    default_text: str | None  # where the default is worked out at start
    policy: Policy
    note: str
    secret: bool
    name: str  # with its dashes: "--max-batch-size"
    variable: str | None  # "MAX_BATCH_SIZE"


def _flag(
    default: Any,
    help: str,
    *,
    short: str | None = None,
    choices: tuple[str, ...] = (),
    bounds: tuple[int | None, int | None] = (0, None),
    default_text: str | None = None,
    policy: Policy = Policy.WORKS,
    note: str = "",
    secret: bool = False,
    takes_value: bool = False,
    name: str | None = None,
    mirrored: bool = True,
) -> Any:
    row = {
        "help": help,
        "short": short,
        "choices": choices,
        "bounds": bounds,
        "default_text": default_text,
        "policy": policy,
        "note": note,
        "secret": secret,
        "takes_value": takes_value,
        "name": name,
        "mirrored": mirrored,
    }
    return dataclasses.field(default=default, metadata=row)


_NO_NGROK = "tunnels are not part of this server; put a reverse proxy in front of it"
_NOT_CHUNKED = "it acts only where prompts cannot be computed in chunks (PREFILL_CHUNKING=0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherArgs:
    """What the user asked for; None where the choice is the launcher's or the shard's."""

    model_id: str | None = _flag(
        None,
        "Model to serve: an id on the hub, a local directory, or a .gguf file.",
        default_text="the bundled SmolLM2-135M-Instruct where it is installed and there is no GPU, else "
        "bigscience/bloom-560m",
    )
    revision: str | None = _flag(None, "Revision on the hub: a branch, a tag, a commit or refs/pr/N.")
    validation_workers: int = _flag(2, "Threads of the router that turn text into tokens.")
    sharded: bool | None = _flag(
        None, "Split the model over several GPUs; without --num-shard over all that are visible.", takes_value=True
    )
    num_shard: int | None = _flag(None, "Number of shards (processes, one per GPU).", default_text="see --sharded")
    quantize: str | None = _flag(
        None,
        "Quantise the weights while loading.",
        choices=(
            "awq",
            "compressed-tensors",
            "eetq",
            "exl2",
            "gptq",
            "marlin",
            "bitsandbytes",
            "bitsandbytes-nf4",
            "bitsandbytes-fp4",
            "fp8",
        ),
        policy=Policy.REFUSED,
        note="no quantised format but GGUF is served yet",
    )
    speculate: int | None = _flag(
        None, "Tokens to guess ahead per step.", policy=Policy.REFUSED, note="speculative decoding is not there yet"
    )
    dtype: str | None = _flag(
        None,
        "Number format of weights and cache.",
        choices=("float16", "bfloat16", "float32"),
        default_text="bfloat16 where the device computes in it, else float16 on a GPU and float32 on a CPU",
    )
    kv_cache_dtype: str | None = _flag(
        None,
        "Number format of the cache alone.",
        choices=("fp8_e4m3fn", "fp8_e5m2"),
        policy=Policy.REFUSED,
        note="the cache has the format of the model (--dtype)",
    )
    trust_remote_code: bool = _flag(
        False,
        "Trust the model's repository: its pickled weights (.bin, .pt) may be converted to safetensors.",
        policy=Policy.NOTED,
        note="code of a model's repository is never run",
    )
    load_format: str | None = _flag(
        None,
        "Where weights come from: the model's files, or random numbers, which measure speed without any.",
        choices=("auto", "dummy"),
        default_text="auto",
    )
    model_plugins: str | None = _flag(
        None,
        "Folder of model files of your own, `<model_type>.py`, tried before the server's. They run with its rights.",
    )
    max_concurrent_requests: int = _flag(128, "Requests taken at once; more are answered with 429.", bounds=(1, None))
    max_best_of: int = _flag(2, "Largest `best_of` of a request.")
    max_stop_sequences: int = _flag(4, "Largest number of stop sequences of a request.")
    max_top_n_tokens: int = _flag(5, "Largest `top_n_tokens` of a request.")
    max_input_tokens: int | None = _flag(
        None, "Longest prompt, in tokens.", default_text="max_total_tokens - 1, found at warm-up"
    )
    max_input_length: int | None = _flag(None, "Older name of --max-input-tokens; giving both is an error.")
    max_total_tokens: int | None = _flag(
        None,
        "Longest prompt and answer together, in tokens.",
        default_text="what the model and the memory allow, found at warm-up",
    )
    waiting_served_ratio: float = _flag(
        0.3,
        "Waiting requests per running one from which on running ones are paused to start them.",
        policy=Policy.NOTED,
        note=_NOT_CHUNKED,
    )
    max_batch_prefill_tokens: int | None = _flag(
        None,
        "Prompt tokens computed in one step at most.",
        bounds=(1, None),
        default_text="worked out from the model and the GPU; 4096 where neither says anything",
    )
    max_batch_total_tokens: int | None = _flag(
        None,
        "Tokens in the cache, over all requests.",
        bounds=(1, None),
        default_text="what the memory allows, found at warm-up",
    )
    host_cache_bytes: int | None = _flag(
        None,
        "Host memory, over all shards, for cached prefixes that the KV cache gives up; they come back by copy.",
        bounds=(0, None),
        default_text="none: they are computed again",
    )
    max_waiting_tokens: int = _flag(
        20,
        "Steps that running requests may take before waiting ones are started whatever --waiting-served-ratio says.",
        policy=Policy.NOTED,
        note=_NOT_CHUNKED,
    )
    queue_timeout: float | None = _flag(
        None,
        "Seconds that a request may wait to start; it is then answered with 429.",
        default_text="as long as it takes",
    )
    max_batch_size: int | None = _flag(
        None,
        "Requests that run together at most.",
        bounds=(1, None),
        default_text="--max-concurrent-requests",
        policy=Policy.NOTED,
        note="it limits the running requests, though prompts are computed in chunks (TGI would ignore it then)",
    )
    cuda_graphs: tuple[int, ...] = _flag(
        (1, 2, 4, 8, 16, 32),
        "Batch sizes for which a CUDA graph is captured; 0 for none.",
        policy=Policy.NO_EFFECT,
        note="CUDA graphs are not captured yet",
    )
    hostname: str = _flag("0.0.0.0", "IP address to listen at.")
    port: int = _flag(3000, "Port to listen at.", short="-p", bounds=PORTS)
    prometheus_port: int = _flag(
        9000,
        "Port of the metrics in older versions.",
        bounds=PORTS,
        policy=Policy.NO_EFFECT,
        note="metrics are served at /metrics of the main port",
    )
    shard_uds_path: str = _flag(
        "/tmp/text-generation-server",
        "Prefix of the shards' sockets; shard N listens at PREFIX-N.",
        default_text="a new directory of this server's own",
    )
    master_addr: str = _flag("localhost", "Host at which the shards meet.")
    master_port: int = _flag(29500, "Port at which the shards meet.", bounds=PORTS)
    huggingface_hub_cache: str | None = _flag(None, "Directory of the hub's cache.")
    weights_cache_override: str | None = _flag(None, "Directory that directly holds the model's files.")
    disable_custom_kernels: bool = _flag(
        False,
        "Use plain kernels for some old architectures.",
        policy=Policy.NO_EFFECT,
        note="there are no such kernels here",
    )
    cuda_memory_fraction: float = _flag(
        1.0,
        "Fraction of each GPU's memory that may be used.",
        policy=Policy.GPU_ONLY,
        note="a CPU's share is set by --max-batch-total-tokens",
    )
    rope_scaling: str | None = _flag(
        None,
        "Stretch the positions of the model, instead of what its own config says.",
        choices=("linear", "dynamic"),
    )
    rope_factor: float | None = _flag(
        None,
        "Factor of --rope-scaling; alone it means linear.",
    )
    json_output: bool = _flag(False, "Write the log as JSON lines.")
    otlp_endpoint: str | None = _flag(None, "Where to send traces (OTLP over gRPC), http://host:4317.")
    otlp_service_name: str = _flag("text-generation-inference.router", "Name of router and shards in traces.")
    cors_allow_origin: tuple[str, ...] = _flag((), "Origin that browsers may call from; repeat for several.")
    api_key: str | None = _flag(None, "Key that clients must send (Authorization: Bearer KEY).", secret=True)
    watermark_gamma: float | None = _flag(None, "Share of the vocabulary that a watermark favours.")
    watermark_delta: float | None = _flag(None, "By how much a watermark favours it.")
    ngrok: bool = _flag(False, "Open an ngrok tunnel.", policy=Policy.REFUSED, note=_NO_NGROK)
    ngrok_authtoken: str | None = _flag(
        None, "Token of the ngrok account.", policy=Policy.REFUSED, note=_NO_NGROK, secret=True
    )
    ngrok_edge: str | None = _flag(None, "Edge of the ngrok account.", policy=Policy.REFUSED, note=_NO_NGROK)
    tokenizer_config_path: str | None = _flag(None, "File to use as tokenizer_config.json (chat template).")
    chat_template: str | None = _flag(
        None, "File with the chat template to use instead of the model's own templates, or the template's text."
    )
    tool_call_parser: str = _flag(
        ToolCallParser.AUTO.value,
        "How the model writes tool calls; auto takes it from the chat template.",
        choices=tuple(ToolCallParser),
    )
    reasoning_parser: str = _flag(
        ReasoningParser.AUTO.value,
        "Which marks the model puts around its thinking text; auto takes it from the chat template.",
        choices=tuple(ReasoningParser),
    )
    disable_grammar_support: bool = _flag(False, "Refuse requests with a grammar.")
    show_env: bool = _flag(False, "Log what this server runs on, then start.", short="-e", name="--env", mirrored=False)
    max_client_batch_size: int = _flag(4, "Prompts of one /v1/completions call at most.")
    lora_adapters: str | None = _flag(
        None, "LoRA adapters to load, a comma list.", policy=Policy.REFUSED, note="adapters are not there yet"
    )
    usage_stats: str = _flag(
        "on",
        "Send usage statistics.",
        choices=("on", "off", "no-stack"),
        policy=Policy.NO_EFFECT,
        note="usage statistics are never sent",
    )
    payload_limit: int = _flag(2_000_000, "Largest request body, in bytes.")
    kserve: bool = _flag(False, "Serve the routes of KServe's protocol, version 2 (/v2/...), too.")
    enable_prefill_logprobs: bool = _flag(
        False,
        "Answer requests for the logprobs of the prompt.",
        policy=Policy.NO_EFFECT,
        note="they are always answered, unless REQUEST_LOGPROBS is false",
    )
    hung_after: float = _flag(
        30.0,
        "Seconds that a step of the model may take at least before its shard counts as hung and is started again; "
        "20 times the time expected where that is longer.",
    )
    health_timeout: float = _flag(
        10.0, "Seconds that a shard may leave the launcher's health checks unanswered before it is started again."
    )
    graceful_termination_timeout: int = _flag(
        90, "Seconds that running requests have to finish when the server is asked to stop.", short="-g"
    )


def _rows() -> Iterator[Flag]:
    hints = get_type_hints(LauncherArgs)
    kinds = {str: Kind.TEXT, int: Kind.INT, float: Kind.FLOAT, bool: Kind.BOOL}
    for field in dataclasses.fields(LauncherArgs):
        row = dict(field.metadata)
        types = [part for part in (get_args(hints[field.name]) or (hints[field.name],)) if part is not type(None)]
        name = row.pop("name") or "--" + field.name.replace("_", "-")
        mirrored, takes_value = row.pop("mirrored"), row.pop("takes_value")
        yield Flag(
            field=field.name,
            kind=kinds[types[0]],
            is_list=Ellipsis in types,
            is_switch=types[0] is bool and not takes_value,
            default=field.default,
            name=name,
            variable=field.name.upper() if mirrored else None,
            **row,
        )


FLAGS: tuple[Flag, ...] = tuple(_rows())
BY_FIELD: dict[str, Flag] = {flag.field: flag for flag in FLAGS}


def describe(args: LauncherArgs) -> str:
    """All arguments on one line, as the log shows them at start; secrets masked."""
    shown = ", ".join(f"{flag.field}: {_shown(flag, getattr(args, flag.field))}" for flag in FLAGS)
    return f"Args {{ {shown} }}"


def _shown(flag: Flag, value: Any) -> str:
    if value is None:
        return "None"
    return json.dumps(MASK if flag.secret else value)
