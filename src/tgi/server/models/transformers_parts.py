"""A loaded model of transformers in two parts, since the engine asks for hidden states and logits apart: what reads
tokens, and the head. Knows no cache.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from tgi.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AGREEMENT = {torch.float32: 1e-3}  # relative, for the token in the middle
ROUGH_AGREEMENT = 0.1  # in half precision: an architecture that is misunderstood is off by about 1
BODIES = ("model", "transformer")  # names of the body, where a class does not go by its own word for it
# What the models call the cache that they take and return.
CACHES = ("cache", "past_key_values", "cache_params")


class DecoderHead:
    """What a causal model's own code makes of the last hidden states: projections, scales, caps. Takes the model's body
    out, to which nothing is left but `body`."""

    def __init__(self, lm: PreTrainedModel) -> None:
        """Raises StartupError where the two cannot be told apart."""
        name = next((name for name in (lm.base_model_prefix, *BODIES) if name in dict(lm.named_children())), None)
        if name is None:
            raise StartupError(f"{type(lm).__name__} of transformers cannot be served: its body has no name of its own")
        ids = _first_ids(lm)
        logits = lm(input_ids=ids, use_cache=False).logits[0]
        self.body: Any = lm.get_submodule(name)
        output = self.body(input_ids=ids, use_cache=False)
        self._given = _Given(type(output))
        self._lm = lm
        setattr(lm, name, self._given)
        self.vocab_size = logits.shape[-1]
        _check_head(lm, self(output.last_hidden_state[0]), logits)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        self._given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # nobody looks at them
        try:
            return self._lm(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._given.hidden = None


class _Given(torch.nn.Module):
    """In the place of a body: says what it is told to say."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> Any:
        return self._kind(last_hidden_state=self.hidden)


class EncoderDecoderHead:
    """The projection of an encoder-decoder. Its model gets a module in its place that keeps what it is given."""

    def __init__(self, lm: PreTrainedModel) -> None:
        """Raises StartupError where the logits are more than a projection and a bias."""
        ids = _first_ids(lm)
        logits = lm(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits[0]
        self._projection: Any = lm.get_output_embeddings()
        self._bias = getattr(lm, "final_logits_bias", None)
        self._kept = _Kept(logits.shape[-1])
        self.vocab_size = logits.shape[-1]
        lm.set_output_embeddings(self._kept)
        lm(input_ids=ids, decoder_input_ids=ids, use_cache=False)
        _check_head(lm, self(self.take()[0]), logits)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        logits = self._projection(hidden).float()
        return logits if self._bias is None else logits + self._bias

    def take(self) -> torch.Tensor:
        """[1, tokens, hidden] of the model's last call."""
        hidden, self._kept.hidden = self._kept.hidden, None
        assert hidden is not None
        return hidden


class _Kept(torch.nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.hidden: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        return hidden.new_zeros(1).expand(*hidden.shape[:-1], self._vocab_size)


def cache_name(module: torch.nn.Module) -> str:
    """The keyword and the field of the output under which this model has its cache. StartupError where it has none."""
    taken = inspect.signature(module.forward).parameters
    for name in CACHES:
        if name in taken:
            return name
    raise StartupError(f"{type(module).__name__} of transformers cannot be served: it keeps no cache")


def learned_positions(module: torch.nn.Module) -> int | None:
    """How many positions there are, where they are learned and so come to an end."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding) and "position" in name.rpartition(".")[2]:
            return part.num_embeddings - int(getattr(part, "offset", 0))  # some tables begin with rows for padding
    return None


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two [tokens, n] are apart, relative, for the token in the middle; 0.0 where that is no more than another
    order of summation makes."""
    tiny = torch.finfo(torch.float32).tiny
    gaps = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=tiny)
    middle = float(gaps.median())
    return 0.0 if middle <= AGREEMENT.get(expected.dtype, ROUGH_AGREEMENT) else middle


def _check_head(lm: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> None:
    if gap(found, expected) != 0.0:
        raise StartupError(f"{type(lm).__name__} of transformers cannot be served: its head does not stand alone")


def _first_ids(lm: PreTrainedModel) -> torch.Tensor:
    return torch.tensor([[0, 1]], device=lm.device)
