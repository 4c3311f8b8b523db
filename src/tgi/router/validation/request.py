"""A request that passed validation: nothing in it can hurt the shard. Immutable; knows no HTTP and no blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tgi.shard_client.messages import Grammar, Sampling

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ValidStopping:
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True  # the stop string or stop id stays in the text (TGI's routes) or not (`/v1`)
    ignore_eos: bool = False


class Siblings:
    """What the answers to one prompt have in common (`n`, `best_of`): one of them reads it, the others fork from it.

    Compared by identity: two requests with the same prompt are no siblings.
    """

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What the scheduler needs to run one answer."""

    prompt_ids: bytes  # u32, after truncation
    sampling: Sampling  # seed is set
    stopping: ValidStopping
    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_top_n: int = 0  # alternatives per prompt token; only with `prompt_logprobs`
    priority: int = 0  # higher goes first
    client: str = ""  # for whom, as far as fairness goes; "": the nameless, who are one
    adapter_id: str = ""
    grammar: Grammar | None = None
    use_cache: bool = True  # read from and publish to the prefix tree
    cache_salt: str = ""
    traceparent: str = ""
    siblings: Siblings | None = None
    received_at: float = field(default=0.0)  # time.perf_counter() when the request's body was read

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4


def fork(request: ValidRequest, num_answers: int) -> list[ValidRequest]:
    """The same request once per answer, each with a seed of its own; the first keeps the request's, and alone has the
    prompt's logprobs computed."""
    if num_answers == 1:
        return [request]
    siblings = Siblings()
    sampling = request.sampling
    return [
        replace(
            request,
            siblings=siblings,
            sampling=replace(sampling, seed=mix64(sampling.seed, index)),
            prompt_logprobs=request.prompt_logprobs and index == 0,
            prompt_top_n=0 if index else request.prompt_top_n,
        )
        for index in range(num_answers)
    ]


def mix64(seed: int, index: int) -> int:
    """The u64 seed of sibling `index`: `seed` itself for 0, else the index-th output of SplitMix64 started at `seed`
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
