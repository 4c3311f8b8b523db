"""SamplingState: how each row chooses, as one packed device row per request, and the same on the host so that the kind
of a step is known without asking the device. Knows rows, not requests.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from tgi.errors import InvalidRequest
from tgi.server.ops.sampling import FLAG_RAW, FLAG_SAMPLED, FLAGS, TOP_K, sample_kernel
from tgi.shard_client.messages import Sampling

_ROW = struct.Struct("<fffiIIII")
_MAX_TOP_K = 2**31 - 1


class SamplingState:
    """Parameters of `max_rows` permanent rows. A row that was never added, or was removed, is greedy."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        neutral = np.frombuffer(_pack(Sampling()), dtype=np.int32)
        self._host = np.tile(neutral, (max_rows, 1))  # [max_rows, NUM_WORDS]
        # On a CPU host and device memory are one.
        self.table = torch.from_numpy(self._host)  # [max_rows, NUM_WORDS] int32
        if device.type != "cpu":
            self.table = self.table.to(device)
        self._neutral = neutral
        self.kernel = sample_kernel(device.type)  # compiled here, before anybody waits

    def add(self, row: int, sampling: Sampling) -> None:
        """The row's parameters hold from the next launched step on. Touches that row alone; does not wait.

        Raises InvalidRequest for parameters that this shard does not apply: without them the answer would be wrong.
        """
        refuse_unsupported(sampling)
        self._host[row] = np.frombuffer(_pack(sampling), dtype=np.int32)
        if self.device.type != "cpu":
            # A pinned buffer of its own, which torch's allocator keeps until the copy is through.
            packed = torch.from_numpy(self._host[row].copy()).pin_memory()
            self.table[row].copy_(packed, non_blocking=True)

    def remove(self, row: int) -> None:
        """The row is free. Its device words stay: no step names them before the next `add`."""
        self._host[row] = self._neutral

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether none of the rows (host ints) samples: the step may take the greedy kind."""
        return not bool((self._host[rows, FLAGS] & FLAG_SAMPLED).any())

    @property
    def max_top_k(self) -> int:
        """Largest top_k of all live rows; 0 where none uses it."""
        return int(self._host[:, TOP_K].max(initial=0))


def _pack(sampling: Sampling) -> bytes:
    """A greedy row keeps neutral warpers: its logprobs are those of the whole distribution."""
    flags = (FLAG_SAMPLED if sampling.do_sample else 0) | (FLAG_RAW if sampling.raw_logprobs else 0)
    seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
    if not sampling.do_sample:
        return _ROW.pack(1.0, 1.0, 0.0, 0, seed & 0xFFFFFFFF, seed >> 32, flags, 0)
    return _ROW.pack(
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        min(sampling.top_k, _MAX_TOP_K),
        seed & 0xFFFFFFFF,
        seed >> 32,
        flags,
        0,
    )


def refuse_unsupported(sampling: Sampling) -> None:
    refused = {
        "typical_p": sampling.typical_p < 1.0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "logit_bias": bool(sampling.logit_bias),
        "watermark": sampling.watermark,
    }
    for name, is_set in refused.items():
        if is_set:
            raise InvalidRequest(f"`{name}` is not supported by this model server", name)
    if sampling.do_sample and not sampling.temperature > 0.0:
        raise InvalidRequest("`temperature` must be strictly positive", "temperature")
    if not 0.0 <= sampling.min_p <= 1.0:  # above 1 not even the best token would be left
        raise InvalidRequest("`min_p` must be >= 0.0 and <= 1.0", "min_p")
