"""SamplingState: how each row chooses, as one packed device row per request, and the same on the host so that the kind
of a step is known without asking the device. Knows rows, not requests.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import InvalidRequest
from tgi.server.ops.sampling import (
    BAD_WORDS_SLOT,
    BAN_UNTIL,
    COUNT_SLOT,
    EDIT_SLOT,
    FLAG_BAD_WORDS,
    FLAG_BANNED,
    FLAG_BIASED,
    FLAG_PENALISED,
    FLAG_RAW,
    FLAG_SAMPLED,
    FLAG_TYPICAL,
    FLAG_WATERMARK,
    FLAGS,
    LAST_ID,
    NUM_WORDS,
    TOP_K,
    RowTables,
    sample_kernel,
)
from tgi.server.sampling.slots import BadWords, Edits, TokenCounts, upload
from tgi.shard_client.messages import Sampling

WATERMARK_GAMMA, WATERMARK_DELTA = 0.5, 2.0  # TGI's
_ROW = struct.Struct("<fffffffiIIIiiiii")
_MAX_INT32 = 2**31 - 1
_NO_IDS = np.empty(0, np.uint32)
# A repetition penalty beyond is beyond any logits already; within, no product of it leaves float32.
_MAX_REPETITION = 2.0**64


class SamplingState:
    """Parameters of `max_rows` permanent rows. A row that was never added, or was removed, is greedy.

    Memory: 64 bytes a row. From the first such row on (`slots`), further 4 × vocabulary bytes for each row with
    penalties, for each with biased or banned ids 12 × the most that any row has had, and for each with bad words 4 ×
    the most words × the tokens of the longest.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        watermark_gamma: float = WATERMARK_GAMMA,
        watermark_delta: float = WATERMARK_DELTA,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._neutral = np.frombuffer(_pack(Sampling()), dtype=np.int32)
        self._host = np.tile(self._neutral, (max_rows, 1))  # [max_rows, NUM_WORDS]
        # On a CPU host and device memory are one.
        self.table = torch.from_numpy(self._host)  # [max_rows, NUM_WORDS] int32
        if device.type != "cpu":
            self.table = self.table.to(device)
        self._counts = TokenCounts(vocab_size, device)
        self._edits = Edits(device)
        self._bad_words = BadWords(device)
        self._green_limit = round(min(max(watermark_gamma, 0.0), 1.0) * 2**32)
        self._green_delta = watermark_delta
        self.kernel = sample_kernel(device.type)  # compiled here, before anybody waits

    def add(
        self,
        row: int,
        sampling: Sampling,
        prompt_ids: npt.NDArray[np.uint32] = _NO_IDS,
        generated_ids: npt.NDArray[np.uint32] = _NO_IDS,
        ban_until: int = 0,
        banned_ids: Sequence[int] = (),
    ) -> None:
        """The row's parameters hold from the next launched step on. Touches that row alone; does not wait.

        `banned_ids` may not be chosen for a position before `ban_until`. Raises InvalidRequest for parameters that mean
        nothing.
        """
        refuse_invalid(sampling, self.vocab_size)
        self.remove(row)
        words = np.frombuffer(_pack(sampling), dtype=np.int32).copy()
        # An id named twice counts once: the last value.
        entries = [*dict(sampling.logit_bias).items(), *((token, -math.inf) for token in banned_ids)]
        if banned_ids:
            words[FLAGS] |= FLAG_BANNED
            words[BAN_UNTIL] = min(ban_until, _MAX_INT32)
        if entries:
            words[EDIT_SLOT] = self._edits.add(entries)
        if words[FLAGS] & FLAG_PENALISED:
            words[COUNT_SLOT] = self._counts.add(prompt_ids, generated_ids)
        if sampling.bad_words:
            words[BAD_WORDS_SLOT] = self._bad_words.add(sampling.bad_words, generated_ids)
        last = generated_ids if len(generated_ids) else prompt_ids
        words[LAST_ID] = int(last[-1]) if len(last) else 0
        self._host[row] = words
        if self.device.type != "cpu":
            upload(words, self.table[row])

    def remove(self, row: int) -> None:
        """The row is free. Its device words stay: no step names them before the next `add`."""
        words = self._host[row]
        if words[COUNT_SLOT]:
            self._counts.remove(int(words[COUNT_SLOT]))
        if words[EDIT_SLOT]:
            self._edits.remove(int(words[EDIT_SLOT]))
        if words[BAD_WORDS_SLOT]:
            self._bad_words.remove(int(words[BAD_WORDS_SLOT]))
        self._host[row] = self._neutral

    def flags(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> int:
        """What any of the rows (host ints) uses when it chooses the id at its position: the kind of a step. 0: every
        row is greedy, and nothing changes its logits."""
        flags = int(np.bitwise_or.reduce(self._host[rows, FLAGS], initial=0))
        if flags & FLAG_BANNED and not (positions < self._host[rows, BAN_UNTIL]).any():
            flags &= ~FLAG_BANNED
        return flags

    def commit(self, rows: torch.Tensor, ids: torch.Tensor, flags: int) -> None:
        """The rows [n] have got the ids [n] (int64): the last operation of their step (rule 3). `flags`: the step's."""
        if flags & FLAG_PENALISED:
            self._counts.count(self._slots_of(rows, COUNT_SLOT), ids)
        if flags & FLAG_BAD_WORDS:
            self._bad_words.push(self._slots_of(rows, BAD_WORDS_SLOT), ids)
        if flags & FLAG_WATERMARK:
            self.table.view(-1).index_copy_(0, rows * NUM_WORDS + LAST_ID, ids.to(torch.int32))

    def _slots_of(self, rows: torch.Tensor, word: int) -> torch.Tensor:
        return self.table[:, word].index_select(0, rows).long()

    @property
    def tables(self) -> RowTables:
        return RowTables(
            self.table,
            self._counts.table,
            self._edits.ids,
            self._edits.values,
            self._bad_words.words,
            self._bad_words.tails,
            self._green_limit,
            self._green_delta,
        )

    @property
    def max_top_k(self) -> int:
        """Largest top_k of all live rows; 0 where none uses it."""
        return int(self._host[:, TOP_K].max(initial=0))


def _pack(sampling: Sampling) -> bytes:
    """A greedy row keeps neutral warpers: its logprobs are those of the whole distribution."""
    seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
    warpers = (1.0, 1.0, 0.0, 1.0)
    if sampling.do_sample:
        warpers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p)
    return _ROW.pack(
        *warpers,
        min(max(sampling.repetition_penalty, 1 / _MAX_REPETITION), _MAX_REPETITION),
        sampling.frequency_penalty,
        sampling.presence_penalty,
        min(sampling.top_k, _MAX_INT32) if sampling.do_sample else 0,
        seed & 0xFFFFFFFF,
        seed >> 32,
        _flags(sampling),
        0,
        0,
        0,
        0,
        0,
    )


def _flags(sampling: Sampling) -> int:
    is_penalised = (
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )
    used = {
        FLAG_SAMPLED: sampling.do_sample,
        FLAG_RAW: sampling.raw_logprobs,
        FLAG_PENALISED: is_penalised,
        FLAG_BIASED: bool(sampling.logit_bias),
        FLAG_WATERMARK: sampling.watermark,
        FLAG_BAD_WORDS: bool(sampling.bad_words),
        FLAG_TYPICAL: sampling.do_sample and sampling.typical_p < 1.0,
    }
    return sum(flag for flag, is_used in used.items() if is_used)


def refuse_invalid(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequest for what the router should never have let through, and a choice cannot be made with."""
    if sampling.do_sample and not 0.0 < sampling.temperature < math.inf:
        raise InvalidRequest("`temperature` must be strictly positive", "temperature")
    if not 0.0 <= sampling.min_p <= 1.0:  # above 1 not even the best token would be left
        raise InvalidRequest("`min_p` must be >= 0.0 and <= 1.0", "min_p")
    for name in ("top_p", "typical_p"):
        if math.isnan(getattr(sampling, name)):
            raise InvalidRequest(f"`{name}` must be a number", name)
    if not 0.0 < sampling.repetition_penalty < math.inf:
        raise InvalidRequest("`repetition_penalty` must be strictly positive", "repetition_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequest(f"`{name}` must be a finite number", name)
    for token, value in sampling.logit_bias:
        if token >= vocab_size or not math.isfinite(value):
            raise InvalidRequest(
                f"`logit_bias` names a token id outside the vocabulary of {vocab_size}, or a value that is not finite",
                "logit_bias",
            )
    for word in sampling.bad_words:
        if not word or max(word) >= vocab_size:
            raise InvalidRequest(
                f"`bad_words` names a token id outside the vocabulary of {vocab_size}, or a word without tokens",
                "bad_words",
            )
