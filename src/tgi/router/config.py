"""What the router was started with. Frozen; read once by main.py, which hands its fields to the rooms."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RouterConfig:
    tokenizer_name: str  # model id, directory or .gguf file; also the name of the model in answers
    revision: str | None
    tokenizer_config_path: str | None
    chat_template: str | None  # a file, or the text itself; None: the model's own templates
    tool_call_parser: str  # "auto": as the chat template says
    reasoning_parser: str  # as well
    master_shard_uds_path: str
    hostname: str
    port: int
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_client_batch_size: int
    max_input_tokens: int | None  # None: what the warm-up answers
    max_total_tokens: int | None
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int | None
    max_batch_size: int | None  # rows; None: max_concurrent_requests
    host_cache_bytes: int  # of all shards together; 0: evicted prefixes are lost
    waiting_served_ratio: float
    max_waiting_tokens: int
    queue_timeout: float | None  # seconds; None: requests wait for as long as it takes
    validation_workers: int
    payload_limit: int  # bytes
    cors_allow_origin: tuple[str, ...]  # empty: any
    api_key: str | None = field(repr=False)
    json_output: bool
    prefix_caching: bool | None  # None: what the shard says
    compute_type: str
    docker_label: str | None
    git_sha: str | None
    disable_grammar_support: bool  # refuse requests with a grammar
    otlp_endpoint: str | None  # None: no traces
    otlp_service_name: str
    kserve: bool  # serve the routes of KServe's protocol, version 2
    aip_predict_route: str | None  # Vertex AI: another path of /vertex
    aip_health_route: str | None  # Vertex AI: another path of /health
    keep_alive_s: float = 15.0  # silence after which a stream gets a comment
    stall_s: float = 60.0  # a client that takes nothing for this long is cut off
