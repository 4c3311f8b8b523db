"""Words that both sides of a process boundary need."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class EndReason(IntEnum):
    """Why a row ended in the shard. The order is the wire's (`Step.ends`)."""

    RUNNING = 0
    LENGTH = 1
    EOS = 2
    STOP_ID = 3
    NAN = 4


class FinishReason(StrEnum):
    """Why an answer ended, in TGI's words. `/v1` routes translate."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class ToolCallParser(StrEnum):
    """How a model writes tool calls: words of --tool-call-parser."""

    AUTO = "auto"  # as its chat template says
    NONE = "none"
    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_V11 = "mistral_v11"
    GEMMA = "gemma"
    GRANITE = "granite"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    JSON = "json"


class ReasoningParser(StrEnum):
    """Which marks a model puts around its thinking text: words of --reasoning-parser."""

    AUTO = "auto"  # as its chat template says
    NONE = "none"
    THINK = "think"
    SEED = "seed"
    MAGISTRAL = "magistral"
    COHERE = "cohere"
    REASONING = "reasoning"


class Dtype(StrEnum):
    """Number formats that a model can be served in."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Phase(StrEnum):
    """What the shard's loop is doing: the liveness word."""

    STARTING = "starting"
    COMPILING = "compiling"
    CAPTURING = "capturing"
    IDLE = "idle"
    RUNNING = "running"
    FAILED = "failed"
