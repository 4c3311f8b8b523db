"""Slots: device memory that only some rows need, found by a number that stands in the row's words.

Made when a row first asks and doubled when more do, so rows without such a feature cost nothing. Slot 0 is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tgi.server.ops.sampling import IN_PROMPT

_FIRST = 4  # slots made at once


class Slots:
    """Which numbers are free. Knows no tensors."""

    def __init__(self) -> None:
        self.size = 1
        self._free: list[int] = []

    def take(self) -> int:
        """A free number, below `size`, which may have grown."""
        if not self._free:
            before, self.size = self.size, max(2 * self.size, 1 + _FIRST)
            self._free = list(range(self.size - 1, before - 1, -1))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


def upload(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy into a device tensor without waiting: from a pinned buffer of its own, which torch's allocator keeps until
    the copy is through."""
    host = torch.from_numpy(values)
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)


def grown(table: torch.Tensor, *shape: int) -> torch.Tensor:
    """The table with more rows or columns, the new ones zero. In order with what was launched before."""
    larger = table.new_zeros(shape)
    larger[tuple(slice(0, size) for size in table.shape)] = table
    return larger


class TokenCounts:
    """How often each token stands in a row's output, and whether its prompt has it: [slots, vocab] int32.

    Lives on the device, since there alone the last ids are known when a step is launched. 4 bytes times the vocabulary
    for each row that penalises.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._slots = Slots()
        self.table = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)

    def add(self, prompt_ids: npt.NDArray[np.uint32], generated_ids: npt.NDArray[np.uint32]) -> int:
        slot = self._slots.take()
        if self._slots.size > len(self.table):
            self.table = grown(self.table, self._slots.size, self._vocab_size)
        counts = np.bincount(generated_ids.astype(np.int64), minlength=self._vocab_size).astype(np.int32)
        counts[prompt_ids] |= IN_PROMPT
        upload(counts, self.table[slot])
        return slot

    def remove(self, slot: int) -> None:
        self._slots.give_back(slot)

    def count(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """One more of each id [n] int64 in each slot [n] int64."""
        ones = torch.ones_like(ids, dtype=torch.int32)
        self.table.view(-1).scatter_add_(0, slots * self._vocab_size + ids, ones)


class Edits:
    """What a row adds to the logits of a few tokens: ids and values, [slots, width]. -inf stands for a ban."""

    def __init__(self, device: torch.device) -> None:
        self._slots = Slots()
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.values = torch.zeros(1, 1, device=device)

    def add(self, entries: list[tuple[int, float]]) -> int:
        slot = self._slots.take()
        width = self.ids.shape[1]
        if len(entries) > width:
            width = _power_of_two(len(entries))
        if self._slots.size > len(self.ids) or width > self.ids.shape[1]:
            self.ids = grown(self.ids, self._slots.size, width)
            self.values = grown(self.values, self._slots.size, width)
        ids, values = np.zeros(width, np.int64), np.zeros(width, np.float32)
        for index, (token, value) in enumerate(entries):
            ids[index], values[index] = token, value
        upload(ids, self.ids[slot])
        upload(values, self.values[slot])
        return slot

    def remove(self, slot: int) -> None:
        self._slots.give_back(slot)


class BadWords:
    """Sequences that a row's output may not hold, and its last outputs, on which their last tokens hang.

    Like counts, the outputs are the device's: there alone the last ids are known when a step is launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._slots = Slots()
        self.words = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)  # as RowTables.bad_words
        self.tails = torch.zeros(1, 1, dtype=torch.int32, device=device)

    def add(self, words: Sequence[Sequence[int]], generated_ids: npt.NDArray[np.uint32]) -> int:
        slot = self._slots.take()
        self._make_room(len(words), max(map(len, words)))
        _, count, length = self.words.shape
        entries = np.zeros((count, length), np.int32)
        for index, word in enumerate(words):
            entries[index, : len(word)] = np.array(word[::-1], np.int32) + 1
        tail = np.zeros(length - 1, np.int32)
        newest = generated_ids[:-length:-1]
        tail[: len(newest)] = newest.astype(np.int32) + 1
        upload(entries, self.words[slot])
        upload(tail, self.tails[slot])
        return slot

    def _make_room(self, count: int, length: int) -> None:
        """For a slot more, of so many words of so many tokens."""
        slots, width, depth = self._slots.size, *self.words.shape[1:]
        width, depth = max(width, _power_of_two(count)), max(depth, _power_of_two(length))
        if (slots, width, depth) != tuple(self.words.shape):
            self.words = grown(self.words, slots, width, depth)
            self.tails = grown(self.tails, slots, depth - 1)

    def remove(self, slot: int) -> None:
        self._slots.give_back(slot)

    def push(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """The ids [n] int64 are the newest outputs of the slots [n] int64. What slot 0 is told is nobody's."""
        tails = torch.cat([ids.unsqueeze(1).to(torch.int32) + 1, self.tails[slots, :-1]], dim=1)
        self.tails.index_copy_(0, slots, tails)


def _power_of_two(count: int) -> int:
    """The smallest that is not below."""
    return 1 << (count - 1).bit_length()
