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
