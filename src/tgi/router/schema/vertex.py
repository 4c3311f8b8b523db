"""Wire types of Vertex AI's predictions."""

from __future__ import annotations

from msgspec import Raw, Struct


class VertexRequest(Struct, frozen=True):
    instances: list[Raw]  # each a GenerateRequest or a ChatRequest, told apart by `inputs` and `messages`


class VertexResponse(Struct, frozen=True):
    predictions: list[str]  # in the order of the instances
