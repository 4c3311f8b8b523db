from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("model_type", "dtype", "device_type", "attention", "block_size", "vocab_size", "supports_chunking", "prefix_caching", "speculate", "world_size", "max_position_embeddings", "prompt_logprobs")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_CHUNKING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    dtype: str
    device_type: str
    attention: str
    block_size: int
    vocab_size: int
    supports_chunking: bool
    prefix_caching: bool
    speculate: int
    world_size: int
    max_position_embeddings: int
    prompt_logprobs: bool
    def __init__(self, model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., attention: _Optional[str] = ..., block_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., supports_chunking: _Optional[bool] = ..., prefix_caching: _Optional[bool] = ..., speculate: _Optional[int] = ..., world_size: _Optional[int] = ..., max_position_embeddings: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("phase", "step", "since_s", "hung_after_s", "finished")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    HUNG_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    phase: str
    step: int
    since_s: float
    hung_after_s: float
    finished: int
    def __init__(self, phase: _Optional[str] = ..., step: _Optional[int] = ..., since_s: _Optional[float] = ..., hung_after_s: _Optional[float] = ..., finished: _Optional[int] = ...) -> None: ...

class ServiceDiscoveryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceDiscoveryResponse(_message.Message):
    __slots__ = ("urls",)
    URLS_FIELD_NUMBER: _ClassVar[int]
    urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, urls: _Optional[_Iterable[str]] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("max_batch_prefill_tokens", "max_input_tokens", "max_total_tokens", "max_batch_total_tokens", "max_rows", "host_cache_bytes")
    MAX_BATCH_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_batch_prefill_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_rows: int
    host_cache_bytes: int
    def __init__(self, max_batch_prefill_tokens: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., max_rows: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("max_input_tokens", "max_total_tokens", "max_batch_total_tokens", "num_blocks", "block_size", "max_rows")
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    num_blocks: int
    block_size: int
    max_rows: int
    def __init__(self, max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_rows: _Optional[int] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Command(_message.Message):
    __slots__ = ("seen", "cancel", "grow", "admit", "moves")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    seen: int
    cancel: bytes
    grow: Grow
    admit: _containers.RepeatedCompositeFieldContainer[Admit]
    moves: BlockMoves
    def __init__(self, seen: _Optional[int] = ..., cancel: _Optional[bytes] = ..., grow: _Optional[_Union[Grow, _Mapping]] = ..., admit: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ..., moves: _Optional[_Union[BlockMoves, _Mapping]] = ...) -> None: ...

class BlockMoves(_message.Message):
    __slots__ = ("to_host", "sources", "targets")
    TO_HOST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    to_host: bytes
    sources: bytes
    targets: bytes
    def __init__(self, to_host: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., targets: _Optional[bytes] = ...) -> None: ...

class Grow(_message.Message):
    __slots__ = ("handles", "num_blocks", "blocks")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    num_blocks: bytes
    blocks: bytes
    def __init__(self, handles: _Optional[bytes] = ..., num_blocks: _Optional[bytes] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_ids", "values")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    values: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "watermark", "seed", "logit_bias", "raw_logprobs", "bad_words")
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    watermark: bool
    seed: int
    logit_bias: LogitBias
    raw_logprobs: bool
    bad_words: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., watermark: _Optional[bool] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Union[LogitBias, _Mapping]] = ..., raw_logprobs: _Optional[bool] = ..., bad_words: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "eos_ids", "stop_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    eos_ids: bytes
    stop_ids: bytes
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., eos_ids: _Optional[bytes] = ..., stop_ids: _Optional[bytes] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source", "begins_at")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    begins_at: int
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., begins_at: _Optional[int] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("handle", "prompt_ids", "generated_ids", "cached_len", "blocks", "priority", "sampling", "stopping", "top_n", "prompt_logprobs", "adapter_id", "adapter_load", "grammar", "traceparent", "prompt_top_n")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_N_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_ids: bytes
    generated_ids: bytes
    cached_len: int
    blocks: bytes
    priority: int
    sampling: Sampling
    stopping: Stopping
    top_n: int
    prompt_logprobs: bool
    adapter_id: str
    adapter_load: int
    grammar: Grammar
    traceparent: str
    prompt_top_n: int
    def __init__(self, handle: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., generated_ids: _Optional[bytes] = ..., cached_len: _Optional[int] = ..., blocks: _Optional[bytes] = ..., priority: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., top_n: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., adapter_id: _Optional[str] = ..., adapter_load: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., traceparent: _Optional[str] = ..., prompt_top_n: _Optional[int] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("handle", "index", "token_ids", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    token_ids: bytes
    logprobs: bytes
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "first_position", "logprobs", "top_ids", "top_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first_position: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, handle: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("handle", "code", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: str
    message: str
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("plan_ns", "forward_ns", "collect_ns", "steps", "prefill_tokens", "decode_tokens")
    PLAN_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECT_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    plan_ns: int
    forward_ns: int
    collect_ns: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    def __init__(self, plan_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., collect_ns: _Optional[int] = ..., steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("window", "max_rows", "num_blocks", "block_size", "num_host_blocks")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    window: int
    max_rows: int
    num_blocks: int
    block_size: int
    num_host_blocks: int
    def __init__(self, window: _Optional[int] = ..., max_rows: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "kv_epoch", "handles", "num_tokens", "token_ids", "logprobs", "ends", "progress_handles", "computed_len", "top_tokens", "prompt_logprobs", "errors", "rows_running", "rows_waiting", "free_rows", "timings", "opening")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KV_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_HANDLES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_LEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ROWS_WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    number: int
    kv_epoch: int
    handles: bytes
    num_tokens: bytes
    token_ids: bytes
    logprobs: bytes
    ends: bytes
    progress_handles: bytes
    computed_len: bytes
    top_tokens: _containers.RepeatedCompositeFieldContainer[TopTokens]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    errors: _containers.RepeatedCompositeFieldContainer[RequestError]
    rows_running: int
    rows_waiting: int
    free_rows: int
    timings: Timings
    opening: Opening
    def __init__(self, number: _Optional[int] = ..., kv_epoch: _Optional[int] = ..., handles: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ends: _Optional[bytes] = ..., progress_handles: _Optional[bytes] = ..., computed_len: _Optional[bytes] = ..., top_tokens: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[RequestError, _Mapping]]] = ..., rows_running: _Optional[int] = ..., rows_waiting: _Optional[int] = ..., free_rows: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...
