"""Models of transformers with caches of their own: decoders that do not take our attention, and encoder-decoders.

Prompts are read one by one. Rows that decode one token do so together where the model allows it, over one padded cache
that stays while its rows do; at start the model is asked whether it says the same that way as it does row by row.

A joined cache can be cut: where a step failed, is run again, or its choice was not made, the row goes on from what
counts. One that cannot be joined cannot go back either: then the row is read anew from the ids that count.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError
from tgi.server.context import CacheShape, ForwardContext, StepRows
from tgi.server.models.padded_batch import Batch, Part, can_join, length_class, mask_of, prompt_width, together
from tgi.server.models.transformers_parts import DecoderHead, EncoderDecoderHead, cache_name, gap, learned_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tgi.model_config import ModelConfig

TRIAL_PROMPTS = (20, 5)  # tokens, by row


class Batching(enum.Enum):
    """Which rows decode together."""

    ANY = "decoding in batches"
    EVEN = "decoding in batches of rows of one length"  # positions come from the cache, padding and all
    NONE = "row by row"


@dataclass(frozen=True, slots=True)
class _Row:
    ids: torch.Tensor  # [tokens] that have been read; an encoder-decoder's prompt among them
    batch: Batch | None = None  # where its cache is; None while a step is reading into one that cannot be cut
    index: int = 0  # in the batch
    encoded: Any = None  # what the encoder made of the prompt


class _Padded(ABC):
    can_chunk = False
    requires_padding = True

    def __init__(self, config: ModelConfig, head: DecoderHead | EncoderDecoderHead, module: Any, size: int) -> None:
        self._head = head
        self.module = module
        self._cache = cache_name(module)
        self._rows: dict[int, _Row] = {}
        self.vocab_size = head.vocab_size
        self.weight_bytes = size
        self.batching = Batching.NONE
        self.batching = self._try()
        self.cache_shape = _accounted(config, module, self.batching)

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
        """[tokens] ids and positions -> [tokens, hidden]; zeros for what only an encoder reads."""
        assert context.rows is not None
        return self._step(input_ids, context.rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size] float32"""
        return self._head(hidden)

    @abstractmethod
    def _unread(self, prompt_len: int) -> int:
        """Tokens of a row that its decoder does not read."""

    @abstractmethod
    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        """The row's `ids` after what is known -> [tokens, hidden], its cache, and what the encoder made of it."""

    @abstractmethod
    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """[rows, 1] ids and positions, [rows, tokens] mask -> [rows, hidden] and the cache. `encoded`: any row's."""

    def _step(self, input_ids: torch.Tensor, rows: StepRows) -> torch.Tensor:
        parts = input_ids.split(rows.query_lens)
        found: dict[int, torch.Tensor] = {}
        for places in self._groups(rows):
            found.update(zip(places, self._decode(places, rows, parts).split(1), strict=True))
        for place, row in enumerate(rows):
            if place not in found:
                found[place] = self._read(*row, parts[place])
        return torch.cat([found[place] for place in range(len(parts))])

    def _groups(self, rows: StepRows) -> list[list[int]]:
        """Places in the step of rows that decode together, in the order in which they lie in their batch."""
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for place, (row, start, prompt_len) in enumerate(rows):
            known, length = self._rows.get(row), start - self._unread(prompt_len)
            if known is None or known.batch is None or self.batching is Batching.NONE or rows.query_lens[place] > 1:
                continue
            if length > 0 and start <= len(known.ids):
                own = length_class(length) if self.batching is Batching.ANY else length
                groups[own, length_class(self._unread(prompt_len))].append(place)
        return [sorted(places, key=lambda place: self._rows[rows.rows[place]].index) for places in groups.values()]

    def _decode(self, places: list[int], rows: StepRows, ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[rows, hidden]. The step counts once a later one starts behind it; until then `together` can cut it off."""
        asked = [(rows.rows[place], rows.starts[place], rows.prompt_lens[place]) for place in places]
        parts: list[Part] = []
        for row, start, prompt_len in asked:
            known = self._rows[row]
            assert known.batch is not None
            parts.append(Part(known.batch, known.index, start - self._unread(prompt_len)))
        batch = together(parts)
        tokens = torch.cat([ids[place] for place in places])
        mask = mask_of(batch.pads, batch.pads[0] + parts[0].length + 1, tokens.device)
        positions = mask.sum(1, keepdim=True) - 1
        encoded = self._rows[asked[0][0]].encoded
        hidden, batch.cache = self._beside(batch, encoded, tokens.unsqueeze(1), mask, positions)
        for index, (place, (row, start, _)) in enumerate(zip(places, asked, strict=True)):
            known = self._rows[row]
            self._rows[row] = _Row(torch.cat([known.ids[:start], ids[place]]), batch, index, known.encoded)
        return hidden

    def _read(self, row: int, start: int, prompt_len: int, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the row's `ids`, the first of them at `start`."""
        known = self._take(row, start)
        if known is None and start:
            return self._read(row, 0, prompt_len, torch.cat([self._rows[row].ids[:start], ids]))[start:]
        hidden, cache, encoded = self._alone(known, prompt_len, ids)
        read = ids if known is None else torch.cat([known.ids, ids])
        self._rows[row] = _Row(read, Batch(cache, [0], [0]), 0, encoded)
        return hidden

    def _take(self, row: int, start: int) -> _Row | None:
        """The row with its cache where that ends at `start`, to go on from. Until the step is done only the ids stay:
        who fails in the middle leaves a cache that nobody can use."""
        known = self._rows.get(row)
        if known is None:
            assert start == 0, "the row has not begun here"
            return None
        if start == 0 or known.batch is None or len(known.batch.pads) > 1 or len(known.ids) != start:
            return None
        self._rows[row] = _Row(known.ids)
        return known

    def _try(self) -> Batching:
        """The most that the model allows: it must say the same of two rows together as of each in one piece."""
        for batching, lens in ((Batching.ANY, (36, 5)), (Batching.EVEN, (20, 20))):
            self.batching = batching
            try:
                if self._agrees(lens):
                    return batching
            except Exception:  # whatever its code says of a mask or positions that it does not know
                continue
            finally:
                self._rows.clear()
        return Batching.NONE

    def _agrees(self, lens: tuple[int, int]) -> bool:
        """`lens`: tokens that the decoder has read of each row before two more are read together."""
        generator = torch.Generator().manual_seed(0)
        texts: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        for row, (prompt_len, length) in enumerate(zip(TRIAL_PROMPTS, lens, strict=True)):
            start = self._unread(prompt_len) + length
            ids = torch.randint(self.vocab_size, (start + 2,), generator=generator).to(self.module.device)
            hidden, cache, _ = self._alone(None, prompt_len, ids)
            if not can_join(cache):
                return False
            texts.append(ids)
            expected.append(hidden[start:])
            self._read(row, 0, prompt_len, ids[:start])
        for step in range(2):
            starts = [len(ids) - 2 + step for ids in texts]
            ids = torch.stack([ids[start] for ids, start in zip(texts, starts, strict=True)])
            rows = StepRows([0, 1], starts, [1, 1], list(TRIAL_PROMPTS))
            found = self._step(ids, rows)
            if any(gap(found[row : row + 1], expected[row][step : step + 1]) != 0.0 for row in range(2)):
                return False
        return True


class PaddedDecoder(_Padded):
    scores_prompts = True

    def __init__(self, config: ModelConfig, head: DecoderHead, weight_bytes: int) -> None:
        self._takes_positions = "position_ids" in inspect.signature(head.body.forward).parameters
        super().__init__(config, head, head.body, weight_bytes)

    def _unread(self, prompt_len: int) -> int:
        return 0

    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        given = {} if known is None or known.batch is None else {self._cache: known.batch.cache}
        output = self.module(input_ids=ids.unsqueeze(0), use_cache=True, **given)
        return output.last_hidden_state[0], getattr(output, self._cache), None

    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        given = {self._cache: batch.cache} | ({"position_ids": positions} if self._takes_positions else {})
        output = self.module(input_ids=ids, attention_mask=mask, use_cache=True, **given)
        return output.last_hidden_state[:, 0], getattr(output, self._cache)


class PaddedEncoderDecoder(_Padded):
    """A row's prompt goes to the encoder; its answer is the decoder's, which begins with a token of its own:

    positions of the row    0 … prompt - 1    prompt    prompt + 1
    the decoder reads       its first token   answer 0  answer 1
    """

    scores_prompts = False

    def __init__(self, config: ModelConfig, lm: PreTrainedModel, weight_bytes: int) -> None:
        self._encoder = lm.get_encoder()
        self._first = _decoder_start(lm)
        self._outputs = EncoderDecoderHead(lm)
        super().__init__(config, self._outputs, lm, weight_bytes)

    def _unread(self, prompt_len: int) -> int:
        return prompt_len - 1

    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        if known is None or known.batch is None:
            encoded = self._encoder(input_ids=ids[:prompt_len].unsqueeze(0))
            to_decode, given = torch.cat([ids.new_full((1,), self._first), ids[prompt_len:]]), {}
        else:
            encoded, to_decode, given = known.encoded, ids, {self._cache: known.batch.cache}
        hidden, cache = self._call(encoded, to_decode.unsqueeze(0), given)
        return torch.nn.functional.pad(hidden[0], (0, 0, len(ids) - hidden.shape[1], 0)), cache, encoded

    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        from transformers.modeling_outputs import BaseModelOutput

        # Nobody looks into it, since its keys and values are in the cache: only its shape counts.
        states = encoded.last_hidden_state[:, :1].expand(len(ids), prompt_width(batch), -1)
        prompt_mask = mask_of(batch.prompt_pads, prompt_width(batch), ids.device)
        given = {self._cache: batch.cache, "attention_mask": prompt_mask, "decoder_attention_mask": mask}
        hidden, cache = self._call(BaseModelOutput(last_hidden_state=states), ids, given)
        return hidden[:, 0], cache

    def _call(self, encoded: Any, ids: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """[rows, tokens] ids -> [rows, tokens, hidden] and the cache."""
        output = self.module(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, **given)
        return self._outputs.take(), getattr(output, self._cache)


def _decoder_start(lm: PreTrainedModel) -> int:
    for settings in (lm.generation_config, lm.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(settings, name, None)
            if token is not None:
                return int(token)
    raise StartupError("the model's configuration does not say decoder_start_token_id")


def _accounted(config: ModelConfig, module: torch.nn.Module, batching: Batching) -> CacheShape:
    """No paged memory; what the router's blocks stand for is what transformers' caches will take: twice as much where
    they are padded."""
    itemsize = next(module.parameters()).element_size()
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    kept *= 1 if batching is Batching.NONE else 2
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    longest = learned_positions(module)
    return CacheShape(0, kv_heads, heads, head_dim, head_dim, token_bytes=kept, max_positions=longest)
