"""Models of transformers with caches of their own: decoders that do not take our attention, and encoder-decoders.

Where the model allows it, prompts are read together, padded on the right where no token looks; and rows that decode one
token do so together, over a cache padded on the left that stays while its rows do. At start the model is asked whether
it says the same in these ways as it does row by row.

A joined cache can be cut: where a step failed, is run again, or its choice was not made, the row goes on from what
counts. One that cannot be joined cannot go back either: then the row is read anew from the ids that count.
"""

from __future__ import annotations

import enum
import inspect
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError
from tgi.server.context import CacheShape, ForwardContext, StepRows
from tgi.server.models.padded_batch import (
    Batch,
    Part,
    cache_bytes,
    can_join,
    left_mask,
    prompt_width,
    right_mask,
    right_padded,
    together,
)
from tgi.server.models.transformers_parts import (
    DecoderHead,
    EncoderDecoderHead,
    cache_name,
    gap,
    in_one_line,
    learned_positions,
)
from tgi.server.padding import PADDED_BY, rectangles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tgi.model_config import ModelConfig

COMPARED = 8  # tokens of each: fewer than a decoder has read
WEIGHED = 24, 40  # tokens: from what caches of either size take follows what a token takes, and a row
CACHES_IN_A_JOIN = 2  # the joined one, and those that it is made of


class Batching(enum.Enum):
    """Which rows decode together."""

    ANY = "decoding in batches"
    EVEN = "decoding in batches of rows of one length"  # positions come from the cache, padding and all
    NONE = "row by row"


TRIAL_PROMPTS = (20, 12)  # tokens, by row
# Decoding, are prompts read together, tokens by row that a decoder has read of them: the most first.
TRIALS = (
    (Batching.ANY, True, (36, 12)),
    (Batching.ANY, False, (36, 12)),
    (Batching.EVEN, True, (20, 20)),
    (Batching.EVEN, False, (20, 20)),
    (Batching.NONE, False, (36, 12)),
)


@dataclass(frozen=True, slots=True)
class _Row:
    ids: torch.Tensor  # [tokens] that have been read; an encoder-decoder's prompt among them
    batch: Batch | None = None  # where its cache is; None while a step is reading into one that cannot be cut
    index: int = 0  # in the batch
    encoded: Any = None  # what the encoder made of the prompt: all of it where rows go one by one, else a token


@dataclass(frozen=True, slots=True)
class _Text:
    """What a step reads from its beginning."""

    row: int
    prompt_len: int
    ids: torch.Tensor  # [tokens]
    start: int  # of the tokens whose hidden states are asked for


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
        takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        self._may_tell = (True, False) if takes_positions else (False,)
        self._try()
        self.cache_shape = self._accounted(config)

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
    def _decoded(self, prompt_len: int, length: int) -> int:
        """Tokens that the decoder has read once the row's first `length` have been read; 0 before it begins."""

    @abstractmethod
    def _looked_at(self, prompt_len: int) -> int:
        """Tokens at an encoder that the decoder looks at."""

    @abstractmethod
    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        """The row's `ids` after what is known -> [tokens, hidden], its cache, and what of its encoder to keep."""

    @abstractmethod
    def _all(self, texts: Sequence[_Text]) -> tuple[list[torch.Tensor], Any, Any]:
        """The same of several texts from their beginnings, whose cache is padded on the right."""

    @abstractmethod
    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """[rows, 1] ids and positions, [rows, tokens] mask -> [rows, hidden] and the cache. `encoded`: any row's."""

    def _step(self, input_ids: torch.Tensor, rows: StepRows) -> torch.Tensor:
        parts = input_ids.split(rows.query_lens)
        found: dict[int, torch.Tensor] = {}
        for places in self._decoding(rows):
            found.update(zip(places, self._decode(places, rows, parts).split(1), strict=True))
        texts: dict[int, _Text] = {}
        for place, (row, start, prompt_len) in enumerate(rows):
            if place in found:
                continue
            ids = parts[place]
            if (known := self._take(row, start)) is not None:
                found[place] = self._go_on(row, known, prompt_len, ids)
                continue
            ids = torch.cat([self._rows[row].ids[:start], ids]) if start else ids
            if self._decoded(prompt_len, len(ids)):
                texts[place] = _Text(row, prompt_len, ids, start)
            else:  # a piece of a prompt that an encoder reads as a whole, with the last piece
                self._rows[row] = _Row(ids)
                found[place] = self._blank(rows.query_lens[place])
        for places in self._reading(texts):
            found.update(zip(places, self._read([texts[place] for place in places]), strict=True))
        return torch.cat([found[place] for place in range(len(parts))])

    def _blank(self, num_tokens: int) -> torch.Tensor:
        """[tokens, hidden] that nobody asks for."""
        module = self.module
        return torch.zeros(num_tokens, self._head.hidden_size, dtype=module.dtype, device=module.device)

    def _decoding(self, rows: StepRows) -> list[list[int]]:
        """Places in the step of rows that decode together, in the order in which they lie in their batch."""
        sizes: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for place, (row, start, prompt_len) in enumerate(rows):
            known, decoded = self._rows.get(row), self._decoded(prompt_len, start)
            if known is None or known.batch is None or self.batching is Batching.NONE or rows.query_lens[place] > 1:
                continue
            if decoded and start <= len(known.ids):
                alike = decoded if self.batching is Batching.EVEN else 0
                sizes[alike][place] = decoded, self._looked_at(prompt_len)
        groups = (group for alike in sizes.values() for group in _grouped(alike))
        return [sorted(group, key=lambda place: self._rows[rows.rows[place]].index) for group in groups]

    def _reading(self, texts: dict[int, _Text]) -> list[list[int]]:
        """Places of texts that are read together."""
        if not self.reads_together:
            return [[place] for place in texts]
        return _grouped(
            {
                place: (self._decoded(text.prompt_len, len(text.ids)), self._looked_at(text.prompt_len))
                for place, text in texts.items()
            }
        )

    def _decode(self, places: list[int], rows: StepRows, ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[rows, hidden]. The step counts once a later one starts behind it; until then `together` can cut it off."""
        asked = [(rows.rows[place], rows.starts[place], rows.prompt_lens[place]) for place in places]
        parts: list[Part] = []
        for row, start, prompt_len in asked:
            known = self._rows[row]
            assert known.batch is not None
            parts.append(Part(known.batch, known.index, self._decoded(prompt_len, start)))
        batch = together(parts)
        tokens = torch.cat([ids[place] for place in places])
        mask = left_mask(batch.pads, batch.pads[0] + parts[0].length + 1, tokens.device)
        positions = mask.sum(1, keepdim=True) - 1
        encoded = self._rows[asked[0][0]].encoded
        hidden, batch.cache = self._beside(batch, encoded, tokens.unsqueeze(1), mask, positions)
        for index, (place, (row, start, _)) in enumerate(zip(places, asked, strict=True)):
            known = self._rows[row]
            self._rows[row] = _Row(torch.cat([known.ids[:start], ids[place]]), batch, index, known.encoded)
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

    def _go_on(self, row: int, known: _Row, prompt_len: int, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of the row's `ids`, which come behind what is known."""
        hidden, cache, encoded = self._alone(known, prompt_len, ids)
        batch = Batch(cache, [0], [self._looked_at(prompt_len)])
        self._rows[row] = _Row(torch.cat([known.ids, ids]), batch, 0, encoded)
        return hidden

    def _read(self, texts: Sequence[_Text]) -> list[torch.Tensor]:
        """[tokens, hidden] of each text, from its `start` on."""
        if len(texts) == 1:
            hidden, cache, encoded = self._alone(None, texts[0].prompt_len, texts[0].ids)
            found = [hidden]
        else:
            found, cache, encoded = self._all(texts)
        batch = Batch(cache, [0] * len(texts), [self._looked_at(text.prompt_len) for text in texts])
        for index, text in enumerate(texts):
            self._rows[text.row] = _Row(text.ids, batch, index, encoded)
        return [hidden[text.start :] for hidden, text in zip(found, texts, strict=True)]

    def _try(self) -> None:
        """The most that the model allows: it must say the same of two rows in several steps as of each in one piece.
        Raises StartupError where it does not even say so of rows by themselves."""
        reason = ""
        for (batching, reads_together, lens), tells_positions in product(TRIALS, self._may_tell):
            self.batching, self.reads_together, self._tells_positions = batching, reads_together, tells_positions
            try:
                off = self._gap(lens)
                if off == 0.0:
                    return
                reason = f"it says something else (off by {off:.2g})"
            except Exception as error:  # whatever its code says of a mask or positions that it does not know
                reason = f"it fails with {type(error).__name__}: {in_one_line(error)}"
            finally:
                self._rows.clear()
        name = type(self.module).__name__
        raise StartupError(f"{name} of transformers cannot be served: a token at a time, with its own cache, {reason}")

    def _gap(self, lens: tuple[int, int]) -> float:
        """How far the last of two rows' hidden states are off. `lens`: tokens that the decoder has read of each row
        before two more are read, one by one."""
        generator = torch.Generator().manual_seed(0)
        # Of a decoder that reads its prompt itself these are the row's first tokens, else they lie behind the prompt.
        starts = [
            prompt_len + length - self._decoded(prompt_len, prompt_len)
            for prompt_len, length in zip(TRIAL_PROMPTS, lens, strict=True)
        ]
        texts = [torch.randint(self.vocab_size, (start + 2,), generator=generator) for start in starts]
        # Padding in the midst of a text would not count as a position, in some models.
        padding = getattr(self.module.config, "pad_token_id", None)
        if padding is not None:
            texts = [ids.where(ids != padding, (ids + 1) % self.vocab_size) for ids in texts]
        texts = [ids.to(self.module.device) for ids in texts]
        expected: list[torch.Tensor] = []
        for prompt_len, ids in zip(TRIAL_PROMPTS, texts, strict=True):
            hidden, cache, _ = self._alone(None, prompt_len, ids)
            if self.batching is not Batching.NONE and not can_join(cache):
                raise TypeError("its cache holds more than keys and values")
            expected.append(hidden)
        # Read both; then a token, of the first alone and once more of both; then another.
        after, last = [start + 1 for start in starts], [start + 2 for start in starts]
        for rows, begins, ends in (
            ([0, 1], [0, 0], starts),
            ([0], starts, after),
            ([0, 1], starts, after),
            ([0, 1], after, last),
        ):
            spans = [slice(begins[row], ends[row]) for row in rows]
            query_lens = [span.stop - span.start for span in spans]
            found = self._step(
                torch.cat([texts[row][span] for row, span in zip(rows, spans, strict=True)]),
                StepRows(rows, [span.start for span in spans], query_lens, [TRIAL_PROMPTS[row] for row in rows]),
            ).split(query_lens)
            for row, span, ours in zip(rows, spans, found, strict=True):
                if (off := gap(ours[-COMPARED:], expected[row][span][-COMPARED:])) != 0.0:
                    return off
        is_joined = self._rows[0].batch is self._rows[1].batch
        assert is_joined is (self.batching is not Batching.NONE), "the trial is not of what it is meant to try"
        return 0.0

    def _accounted(self, config: ModelConfig) -> CacheShape:
        """No paged memory: what the router's blocks stand for is what transformers' caches will take, padding and
        joins included."""
        few, many = WEIGHED
        least = self._weight(few, few)
        most = max(self._weight(many, many), self._weight(few, many))
        token_bytes = max(0, math.ceil((most - least) / (many - few)))
        share = 1 if self.batching is Batching.NONE else PADDED_BY * CACHES_IN_A_JOIN
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        return CacheShape(
            *(0, kv_heads, heads, head_dim, head_dim),
            token_bytes=share * token_bytes,
            row_bytes=max(0, least - few * token_bytes),
            max_positions=learned_positions(self.module),
        )

    def _weight(self, prompt_len: int, length: int) -> int:
        """Bytes that a row keeps once so many of its tokens have been read."""
        ids = torch.zeros(length, dtype=torch.int64, device=self.module.device)
        _, cache, encoded = self._alone(None, prompt_len, ids)
        return cache_bytes((cache, encoded))


class PaddedDecoder(_Padded):
    scores_prompts = True

    def __init__(self, config: ModelConfig, head: DecoderHead, weight_bytes: int) -> None:
        super().__init__(config, head, head.body, weight_bytes)

    def _decoded(self, prompt_len: int, length: int) -> int:
        return length

    def _looked_at(self, prompt_len: int) -> int:
        return 0

    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        given: dict[str, Any] = {}
        if known is not None and known.batch is not None:
            given = {self._cache: known.batch.cache}
            if self._tells_positions:  # else some count from zero again
                given["position_ids"] = torch.arange(len(ids), device=ids.device).unsqueeze(0) + len(known.ids)
        output = self.module(input_ids=ids.unsqueeze(0), use_cache=True, **given)
        return output.last_hidden_state[0], getattr(output, self._cache), None

    def _all(self, texts: Sequence[_Text]) -> tuple[list[torch.Tensor], Any, Any]:
        # No mask: what is padded comes behind, and a token looks at those before it.
        output = self.module(input_ids=right_padded([text.ids for text in texts]), use_cache=True)
        hidden = [row[: len(text.ids)] for row, text in zip(output.last_hidden_state, texts, strict=True)]
        return hidden, getattr(output, self._cache), None

    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        given = {self._cache: batch.cache} | ({"position_ids": positions} if self._tells_positions else {})
        output = self.module(input_ids=ids, attention_mask=mask, use_cache=True, **given)
        return output.last_hidden_state[:, 0], getattr(output, self._cache)


class PaddedEncoderDecoder(_Padded):
    """A row's prompt goes to the encoder; its answer is the decoder's, which begins with tokens of its own:

    positions of the row    0 … prompt - 1     prompt    prompt + 1
    the decoder reads       its first tokens   answer 0  answer 1
    """

    scores_prompts = False

    def __init__(self, config: ModelConfig, lm: PreTrainedModel, weight_bytes: int) -> None:
        self._encoder = lm.get_encoder()
        self._firsts = _decoder_firsts(lm)
        self._outputs = EncoderDecoderHead(lm)
        super().__init__(config, self._outputs, lm, weight_bytes)

    def _decoded(self, prompt_len: int, length: int) -> int:
        return len(self._firsts) + length - prompt_len if length >= prompt_len else 0

    def _looked_at(self, prompt_len: int) -> int:
        return prompt_len

    def _alone(self, known: _Row | None, prompt_len: int, ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        if known is None or known.batch is None:
            encoded = self._encoder(input_ids=ids[:prompt_len].unsqueeze(0))
            hidden, cache = self._call(encoded, self._read_by_decoder(prompt_len, ids).unsqueeze(0), {})
            return self._of_row(hidden[0], prompt_len, len(ids)), cache, self._kept(encoded)
        encoded = known.encoded if self.batching is Batching.NONE else _shaped(known.encoded, 1, prompt_len)
        hidden, cache = self._call(encoded, ids.unsqueeze(0), {self._cache: known.batch.cache})
        return hidden[0], cache, known.encoded

    def _all(self, texts: Sequence[_Text]) -> tuple[list[torch.Tensor], Any, Any]:
        prompts = right_padded([text.ids[: text.prompt_len] for text in texts])
        mask = right_mask([text.prompt_len for text in texts], prompts.shape[1], prompts.device)
        encoded = self._encoder(input_ids=prompts, attention_mask=mask)
        ids = right_padded([self._read_by_decoder(text.prompt_len, text.ids) for text in texts])
        hidden, cache = self._call(encoded, ids, {"attention_mask": mask})
        rows = [self._of_row(row, text.prompt_len, len(text.ids)) for row, text in zip(hidden, texts, strict=True)]
        return rows, cache, self._kept(encoded)

    def _beside(
        self, batch: Batch, encoded: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        width = prompt_width(batch)
        prompt_mask = right_mask(batch.prompt_lens, width, ids.device)
        given = {self._cache: batch.cache, "attention_mask": prompt_mask, "decoder_attention_mask": mask}
        hidden, cache = self._call(_shaped(encoded, len(ids), width), ids, given)
        return hidden[:, 0], cache

    def _read_by_decoder(self, prompt_len: int, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids.new_tensor(self._firsts), ids[prompt_len:]])

    def _of_row(self, hidden: torch.Tensor, prompt_len: int, length: int) -> torch.Tensor:
        """[length, hidden] by position of the row, from the decoder's own [tokens, hidden]."""
        found = hidden[len(self._firsts) - 1 : len(self._firsts) + length - prompt_len]
        return torch.nn.functional.pad(found, (0, 0, prompt_len - 1, 0))

    def _kept(self, encoded: Any) -> Any:
        if self.batching is Batching.NONE:
            return encoded
        encoded.last_hidden_state = encoded.last_hidden_state[:1, :1].clone()
        return encoded

    def _call(self, encoded: Any, ids: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """[rows, tokens] ids -> [rows, tokens, hidden] and the cache."""
        output = self.module(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, **given)
        return self._outputs.take(), getattr(output, self._cache)


def _grouped(sizes: dict[int, tuple[int, int]]) -> list[list[int]]:
    """The keys of texts that share a rectangle."""
    keys = list(sizes)
    return [[keys[index] for index in group] for group in rectangles(list(sizes.values()))]


def _shaped(encoded: Any, num_rows: int, width: int) -> Any:
    """Nobody looks into it, since its keys and values are in the cache: only its shape counts."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=encoded.last_hidden_state[:1, :1].expand(num_rows, width, -1))


def _decoder_firsts(lm: PreTrainedModel) -> list[int]:
    """What a decoder reads before it answers: its start, and a token that its generation config has every answer begin
    with (a language, in models that translate)."""
    start = _setting(lm, "decoder_start_token_id", "bos_token_id")
    if start is None:
        raise StartupError("the model's configuration does not say decoder_start_token_id")
    forced = _setting(lm, "forced_bos_token_id")
    return [start] if forced is None else [start, forced]


def _setting(lm: PreTrainedModel, *names: str) -> int | None:
    """Of the generation config, else of the model's own."""
    for settings in (lm.generation_config, lm.config):
        for name in names:
            token = getattr(settings, name, None)
            if token is not None:
                return int(token)
    return None
