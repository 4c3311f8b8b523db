"""What travels between router and shard, as plain data: Command one way, Step the other.

Knows no protobuf, no tensors and no policy. Token ids and block numbers are packed u32, little-endian (`bytes`), from
the tokenizer to the device: nobody in between needs them one by one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tgi.enums import EndReason

NEUTRAL_TEMPERATURE = 1.0
OWNER_KEY = "tgi-owner"  # metadata of a stream: who says which blocks of the KV cache hold what


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next id is chosen. Every default is neutral; `do_sample=False` is greedy."""

    do_sample: bool = False
    temperature: float = NEUTRAL_TEMPERATURE
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    seed: int = 0  # u64
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that the output may not hold in a row
    raw_logprobs: bool = False  # before processors and warpers (`/v1`); else after (TGI's routes)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a row ends. EOS wins over length on the last token."""

    max_new_tokens: int  # counted from the prompt's end; generated_ids of a resumed row are included
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends the row."""
        return frozenset(self.stop_ids if self.ignore_eos else (*self.eos_ids, *self.stop_ids))


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the generated ids from `begins_at` on. `kind`: json_schema, regex, lark."""

    kind: str
    source: str
    begins_at: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """A request becomes a row. Positions below `cached_len` are already in the KV cache (rule 5)."""

    handle: int  # counts up, never used twice on a stream (rule 4)
    prompt_ids: bytes  # u32
    generated_ids: bytes  # u32; the row goes on after the last
    cached_len: int  # tokens; multiple of the block size, smaller than the number of ids given
    blocks: bytes  # u32; enough for the ids and the first portion of growth
    sampling: Sampling
    stopping: Stopping
    priority: int = 0
    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_top_n: int = 0  # best tokens at each position with a prompt logprob
    adapter_id: str = ""
    adapter_load: int = 0
    grammar: Grammar | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Copies of whole blocks between the KV cache and the host's memory, one entry each, to be done in this order."""

    to_host: bytes = b""  # u8; 1: from the device to the host, 0: back
    sources: bytes = b""  # u32, where the block is
    targets: bytes = b""  # u32, where it goes

    def __len__(self) -> int:
        return len(self.to_host)

    def __add__(self, later: BlockMoves) -> BlockMoves:
        return BlockMoves(self.to_host + later.to_host, self.sources + later.sources, self.targets + later.targets)


@dataclass(slots=True)
class Command:
    """What changed. The shard applies moves, then cancel, grow and admit, before the next step (rule 1)."""

    seen: int = 0
    cancel: list[int] = field(default_factory=list)  # handles
    grow: list[tuple[int, bytes]] = field(default_factory=list)  # (handle, further blocks as u32)
    admit: list[Admit] = field(default_factory=list)
    moves: BlockMoves = BlockMoves()

    def __bool__(self) -> bool:
        return bool(self.cancel or self.grow or self.admit or self.moves)


@dataclass(frozen=True, slots=True)
class Opening:
    """Step 0 of a stream: what the shard has to offer."""

    window: int  # W, rule 6
    max_rows: int
    num_blocks: int  # block 0 included; it is scratch and never granted
    block_size: int  # tokens
    num_host_blocks: int = 0  # for what the cache gives up; numbered from 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    handle: int
    index: int  # which of the row's tokens in this Step
    token_ids: array[int]  # "I"
    logprobs: array[float]  # "f"


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a stretch of the prompt: log p(token | those before it), by the model alone. Parts of a row come in order."""

    handle: int
    first_position: int
    logprobs: array[float]  # "f"; the prompt's first token has none (NaN)
    # "I" and "f": top_n for each position, best first, or none at all; the logprobs of the first token's are NaN.
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))


@dataclass(frozen=True, slots=True)
class RowError:
    """A fault that belongs to one request. The row is gone."""

    handle: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Timings:
    plan_ns: int = 0
    forward_ns: int = 0
    collect_ns: int = 0
    steps: int = 0  # engine steps merged into this message
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class Step:
    """Results of one engine step, or of several merged. Columns of equal length, one entry per row.

    `num_tokens` and `ends` may be empty: one token each, none ended. `token_ids` and `logprobs` hold sum(num_tokens)
    values, row after row.
    """

    number: int
    kv_epoch: int
    handles: array[int] = field(default_factory=lambda: array("Q"))
    num_tokens: bytes = b""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ends: bytes = b""  # EndReason
    progress_handles: array[int] = field(default_factory=lambda: array("Q"))
    computed_len: array[int] = field(default_factory=lambda: array("I"))
    top_tokens: list[TopTokens] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    rows_running: int = 0
    rows_waiting: int = 0
    free_rows: int = 0
    timings: Timings = Timings()
    opening: Opening | None = None

    def end_of(self, index: int) -> EndReason:
        return EndReason(self.ends[index]) if self.ends else EndReason.RUNNING


@dataclass(frozen=True, slots=True)
class ShardInfo:
    model_type: str
    dtype: str  # torch's spelling without the prefix: "bfloat16"
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
    requires_padding: bool = False  # told on generate.v3 alone, whose clients plan by it


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    max_batch_prefill_tokens: int
    max_rows: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    host_cache_bytes: int = 0  # of all ranks together, for blocks that the cache gives up


@dataclass(frozen=True, slots=True)
class WarmupResult:
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    num_blocks: int
    block_size: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Health:
    phase: str
    step: int
    since_s: float
    hung_after_s: float
    finished: int = 0  # rows that yielded a token and ended without a fault, since the shard's start

    @property
    def is_hung(self) -> bool:
        return self.since_s > self.hung_after_s
