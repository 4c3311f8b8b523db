"""A request that passed validation: nothing in it can hurt the shard. Immutable; knows no HTTP and no blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tgi.shard_client.messages import Grammar, Sampling


@dataclass(frozen=True, slots=True)
class ValidStopping:
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True  # the stop string stays in the text (TGI's routes) or not (`/v1`)
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What the scheduler needs to run one answer."""

    prompt_ids: bytes  # u32, after truncation
    sampling: Sampling  # seed is set
    stopping: ValidStopping
    top_n: int = 0
    prompt_logprobs: bool = False
    priority: int = 0  # higher goes first
    adapter_id: str = ""
    grammar: Grammar | None = None
    use_cache: bool = True  # read from and publish to the prefix tree
    cache_salt: str = ""
    traceparent: str = ""
    received_at: float = field(default=0.0)  # time.perf_counter() when the request's body was read

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4
