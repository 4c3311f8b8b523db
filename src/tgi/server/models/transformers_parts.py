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
LONGEST_WORDS = 300  # characters of somebody else's error
BODIES = ("model", "transformer")  # names of the body, where a class does not go by its own word for it
# What the models call the cache that they take and return.
CACHES = ("cache", "past_key_values", "cache_params", "state")


class DecoderHead:
    """What a causal model's own code makes of the last hidden states: projections, scales, caps. Takes the model's body
    out, to which nothing is left but `body`."""

    def __init__(self, lm: PreTrainedModel) -> None:
        """Raises StartupError where the two cannot be told apart."""
        ids = _first_ids(lm)
        logits = lm(input_ids=ids, use_cache=False).logits[0]
        self._lm = lm
        self.vocab_size = logits.shape[-1]
        for name in _bodies(lm):
            self.body: Any = lm.get_submodule(name)
            try:
                output = self.body(input_ids=ids, use_cache=False)
                self._given = _Given(self.body, type(output))
                lm.set_submodule(name, self._given)
                if gap(self(output.last_hidden_state[0]), logits) == 0.0:
                    self.hidden_size = output.last_hidden_state.shape[-1]
                    return
            except Exception:  # it is no body, or the head does not go by what it says
                pass
            lm.set_submodule(name, self.body)
        raise _stands_not_alone(lm)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        self._given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # nobody looks at them
        try:
            return self._lm(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._given.hidden = None


class _Given(torch.nn.Module):
    """In the place of a body: says what it is told to say. What a head asks of it beside that, its body answers."""

    def __init__(self, body: torch.nn.Module, kind: type) -> None:
        super().__init__()
        self._body = (body,)  # no submodule: nothing is found below this place
        self._kind = kind
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> Any:
        return self._kind(last_hidden_state=self.hidden)

    def __getattr__(self, name: str) -> Any:
        if name in ("_body", "hidden"):
            raise AttributeError(name)
        return getattr(self._body[0], name)


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
        hidden = self.take()[0]
        self.hidden_size = hidden.shape[-1]
        if gap(self(hidden), logits) != 0.0:
            raise _stands_not_alone(lm)

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


def _bodies(lm: PreTrainedModel) -> list[str]:
    """Where the model may have what makes hidden states of ids: what it calls its decoder, which may lie inside a
    wrapper, or its base by its own word or a usual one."""
    children, decoder = dict(lm.named_children()), lm.get_decoder()
    inside = next((name for name, module in lm.named_modules() if module is decoder and name), None)
    names = [name for name in (lm.base_model_prefix, *BODIES) if name in children]
    return list(dict.fromkeys([*([] if inside is None else [inside]), *names]))


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


def in_one_line(error: BaseException) -> str:
    """What an error says, its kind where it says nothing."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= LONGEST_WORDS else f"{words[:LONGEST_WORDS]}…"


def _stands_not_alone(lm: PreTrainedModel) -> StartupError:
    return StartupError(f"{type(lm).__name__} of transformers cannot be served: its head does not stand alone")


def _first_ids(lm: PreTrainedModel) -> torch.Tensor:
    return torch.tensor([[0, 1]], device=lm.device)
