"""Wire types of KServe's inference protocol, version 2. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from tgi.router.schema.generate import GenerateParameters

Byte = Annotated[int, Meta(ge=0, le=255)]


class InputTensor(Struct, frozen=True, kw_only=True):
    """Texts: as one list of the bytes of one text (TGI), or as a list of strings (the protocol)."""

    name: str
    shape: list[int] | None = None
    datatype: str | None = None
    data: list[Byte | str]  # all of one kind


class RequestedOutput(Struct, frozen=True):
    name: str


class InferRequest(Struct, frozen=True, kw_only=True):
    id: str | None = None
    parameters: GenerateParameters | None = None
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None


class OutputTensor(Struct, frozen=True, kw_only=True):
    name: str
    shape: list[int]
    datatype: str
    data: Sequence[int | str]  # all of one kind


class InferResponse(Struct, frozen=True, kw_only=True):
    id: str | UnsetType = UNSET
    model_name: str
    model_version: str | UnsetType = UNSET
    outputs: list[OutputTensor]


class Live(Struct, frozen=True):
    live: bool


class Ready(Struct, frozen=True):
    """`live` as TGI says it, `ready` as the protocol does."""

    live: bool
    ready: bool


class ModelReady(Struct, frozen=True):
    name: str
    live: bool
    ready: bool


class ServerMetadata(Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
