"""Our attention as one of transformers': its models call it by name, and it passes on to the step that runs.

What a layer wants beyond plain causal attention comes in keywords and masks; what is not known here is refused, never
left out. transformers builds its masks from functions of positions: ours asks such a function what it hides, and makes
no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from tgi.server.context import AttentionStep

NAME = "tgi_paged"
FAR = 1 << 20  # a position behind every window
# Keywords that change nothing here: they belong to other implementations, or ask for outputs that nobody reads.
_IGNORED = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "dropout", "deterministic", "is_causal", "return_dict"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "target_dtype"),
    }
)
_step: ContextVar[AttentionStep] = ContextVar("step")


class NotPaged(Exception):
    """This model's attention cannot run over a paged cache; the message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What stands in for a mask: causal, the last `window` tokens where given."""

    window: int | None


def register() -> None:
    """Idempotent. Imports transformers' modelling code."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # what is wrong with a checkpoint is said once, in our words
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible)


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Within, the models' attention is `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: object,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """([1, tokens, heads, value_dim], no weights). Raises NotPaged for an option that is not known."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise NotPaged("its attention does not know its layer")
    window, softcap, sinks = _options(module, attention_mask, options)
    attended = _step.get()(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return attended.unsqueeze(0), None


def _options(
    module: torch.nn.Module, mask: object, given: dict[str, Any]
) -> tuple[int | None, float | None, torch.Tensor | None]:
    """(window, softcap, sinks)"""
    options = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    window, softcap = options.pop("sliding_window", None), options.pop("softcap", None)
    sinks = options.pop("s_aux", None)
    if sinks is None:
        sinks = options.pop("sinks", None)
    if options:
        raise NotPaged(f"its attention wants {', '.join(sorted(options))}")
    if isinstance(mask, Visible):
        window = mask.window  # the mask is what all implementations go by
    elif mask is not None:
        raise NotPaged("its attention adds a mask of its own")
    elif not given.get("is_causal", getattr(module, "is_causal", False)):
        raise NotPaged("its attention is not causal")
    return window, softcap, sinks


def visible(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: object,
) -> Visible:
    """In the place of a mask's tensor. Raises NotPaged for anything but a causal mask with or without a window."""
    if use_vmap:
        raise NotPaged("its masks depend on more than positions")

    def sees(query: int, key: int) -> bool:
        where = (torch.tensor(number) for number in (0, 0, query, key))
        return bool(mask_function(*where))

    # Off the borders that chunks of this size would have.
    query = FAR if local_size is None else FAR * local_size + local_size // 2
    first = 0 if local_size is None else query - local_size + 1
    if not sees(query, query) or sees(query, query + 1) or not sees(query, first):
        raise NotPaged("its masks are not causal")
    if local_size is not None and sees(query, first - 1):
        raise NotPaged("its masks are not those of a window")
    return Visible(local_size)
