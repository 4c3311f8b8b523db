"""Models of transformers with caches of their own: decoders that do not take our attention, and encoder-decoders.

What has been read of a sequence stays in one cache per row, so nothing is padded and no row can see another; the rows
of a step are computed one after the other. A cache cannot go back: where a step failed, is run again, or its choice was
not made, the row is read anew from the ids that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError
from tgi.server.context import CacheShape, ForwardContext
from tgi.server.models.transformers_parts import DecoderHead, EncoderDecoderHead, cache_name, learned_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tgi.model_config import ModelConfig


@dataclass(slots=True)
class _Row:
    ids: torch.Tensor  # [tokens] that have been read; an encoder-decoder's prompt among them
    cache: Any = None  # transformers' own, of whichever kind; None while a step is reading into it
    encoded: Any = None  # what the encoder made of the prompt


class PaddedDecoder:
    can_chunk = False
    requires_padding = True
    scores_prompts = True

    def __init__(self, config: ModelConfig, head: DecoderHead, weight_bytes: int) -> None:
        self._body = head.body
        self._head = head
        self._cache = cache_name(head.body)
        self._rows: dict[int, _Row] = {}
        self.cache_shape = _accounted(config, head.body)
        self.vocab_size = head.vocab_size
        self.weight_bytes = weight_bytes

    @property
    def num_rows(self) -> int:
        """Rows that have a cache."""
        return len(self._rows)

    def allocate(self, num_rows: int) -> None:
        self._rows.clear()

    def begin(self, row: int, given: npt.NDArray[np.uint32]) -> None:
        self._rows.pop(row, None)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]"""
        assert context.rows is not None
        parts = input_ids.split(context.rows.query_lens)
        return torch.cat(
            [self._read(row, start, ids) for (row, start, _), ids in zip(context.rows, parts, strict=True)]
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self._head(hidden)

    def _read(self, row: int, start: int, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the row's `ids`, the first of them at `start`."""
        known = _take(self._rows, row, start)
        if known is None and start:
            return self._read(row, 0, torch.cat([self._rows[row].ids[:start], ids]))[start:]
        given = {} if known is None else {self._cache: known.cache}
        output = self._body(input_ids=ids.unsqueeze(0), use_cache=True, **given)
        read = ids if known is None else torch.cat([known.ids, ids])
        self._rows[row] = _Row(read, getattr(output, self._cache))
        return output.last_hidden_state[0]


class PaddedEncoderDecoder:
    """A row's prompt goes to the encoder; its answer is the decoder's, which begins with a token of its own:

    positions of the row    0 … prompt - 1    prompt    prompt + 1
    the decoder reads       its first token   answer 0  answer 1
    """

    can_chunk = False
    requires_padding = True
    scores_prompts = False

    def __init__(self, config: ModelConfig, lm: PreTrainedModel, weight_bytes: int) -> None:
        self._lm = lm
        self._head = EncoderDecoderHead(lm)
        self._encoder = lm.get_encoder()
        self._cache = cache_name(lm)
        self._first = _decoder_start(lm)
        self._rows: dict[int, _Row] = {}
        self.cache_shape = _accounted(config, lm)
        self.vocab_size = self._head.vocab_size
        self.weight_bytes = weight_bytes

    def allocate(self, num_rows: int) -> None:
        self._rows.clear()

    def begin(self, row: int, given: npt.NDArray[np.uint32]) -> None:
        self._rows.pop(row, None)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens] ids and positions -> [tokens, hidden]; zeros for a prompt's tokens but the last."""
        assert context.rows is not None
        parts = input_ids.split(context.rows.query_lens)
        return torch.cat([self._read(*row, ids) for row, ids in zip(context.rows, parts, strict=True)])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self._head(hidden)

    def _read(self, row: int, start: int, prompt_len: int, ids: torch.Tensor) -> torch.Tensor:
        known = _take(self._rows, row, start)
        if known is None and start:
            return self._read(row, 0, prompt_len, torch.cat([self._rows[row].ids[:start], ids]))[start:]
        if known is None:
            encoded = self._encoder(input_ids=ids[:prompt_len].unsqueeze(0))
            to_decode, given = torch.cat([ids.new_full((1,), self._first), ids[prompt_len:]]), {}
        else:
            encoded, to_decode, given = known.encoded, ids, {self._cache: known.cache}
        output = self._lm(encoder_outputs=encoded, decoder_input_ids=to_decode.unsqueeze(0), use_cache=True, **given)
        read = ids if known is None else torch.cat([known.ids, ids])
        self._rows[row] = _Row(read, getattr(output, self._cache), encoded)
        hidden = self._head.take()[0]
        return torch.nn.functional.pad(hidden, (0, 0, len(ids) - len(hidden), 0))


def _take(rows: dict[int, _Row], row: int, start: int) -> _Row | None:
    """The row with its cache where that ends at `start`, to go on from. Until the step is done only the ids stay: who
    fails in the middle leaves a cache that nobody can use."""
    known = rows.get(row)
    if known is None:
        assert start == 0, "the row has not begun here"
        return None
    if start == 0 or known.cache is None or len(known.ids) != start:
        return None
    rows[row] = _Row(known.ids)
    return known


def _decoder_start(lm: PreTrainedModel) -> int:
    for settings in (lm.generation_config, lm.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(settings, name, None)
            if token is not None:
                return int(token)
    raise StartupError("the model's configuration does not say decoder_start_token_id")


def _accounted(config: ModelConfig, module: torch.nn.Module) -> CacheShape:
    """No paged memory; what the router's blocks stand for is what transformers' caches will take."""
    itemsize = next(module.parameters()).element_size()
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    longest = learned_positions(module)
    return CacheShape(0, kv_heads, heads, head_dim, head_dim, token_bytes=kept, max_positions=longest)
