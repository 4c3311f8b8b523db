"""Wire types of /info, /v1/models, /flush_cache and of every error body."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class Info(Struct, frozen=True, kw_only=True):
    """`GET /info`; the order of the keys is TGI's."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class Model(Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str  # the name under which the weights were found
    max_model_len: int  # tokens, prompt and answer together


class ModelList(Struct, frozen=True):
    object: str
    data: list[Model]


class FlushedCache(Struct, frozen=True, kw_only=True):
    """`POST /flush_cache`, in KV blocks."""

    flushed_blocks: int  # that held prefixes which no running request used
    live_blocks: int  # that running requests use


class NativeError(Struct, frozen=True):
    """Body of an error on TGI's own routes."""

    error: str
    error_type: str


class OpenAIErrorObject(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None
    http_status_code: int | UnsetType = UNSET  # in a stream only, where no status line can say it


class OpenAIError(Struct, frozen=True):
    """Body of an error on /v1 routes. `error_type` is TGI's word, by which its own clients choose their exception."""

    error: OpenAIErrorObject
    error_type: str
